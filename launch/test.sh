#!/usr/bin/env bash
# Sets everything up and runs the tests; arguments go to pytest. Settings: see launch/setup.sh (VENV, PYTHON, CC).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup test
cd "$root"
exec "$python" -m pytest "$@"
