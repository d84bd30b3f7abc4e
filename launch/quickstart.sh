#!/usr/bin/env bash
# From a clean checkout to text from the embedded model: sets everything up, then writes. Run it again at will.
# Settings: see launch/setup.sh (VENV, PYTHON, CC).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup
[ $# -gt 0 ] || say 'the embedded model goes on from "Once upon a time":'
"$python" -m dsv4 generate --model nano --prompt "Once upon a time" --max-tokens 40 --temperature 0 "$@"
say "next: $venv/bin/python -m dsv4 chat --seed 3, and ask for: Write a short story about Elsa. Or ./launch/serve.sh 1 and http://127.0.0.1:8000"
