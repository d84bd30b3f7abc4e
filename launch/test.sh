#!/usr/bin/env bash
# Sets everything up and runs the tests. Settings: see launch/setup.sh (VENV, PYTHON, CC).
#
#   test.sh            all tests, files side by side on the cores; those that start processes of their own afterwards
#   test.sh ARGS...    pytest ARGS, as one process
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup test
cd "$root"
[ $# -eq 0 ] || exec "$python" -m pytest "$@"
"$python" -m pytest -q -n auto --dist loadfile -m "not mpi"
"$python" -m pytest -q -m mpi
