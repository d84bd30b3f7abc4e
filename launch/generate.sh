#!/usr/bin/env bash
# Text from a model on several ranks of this host: launch/generate.sh RANKS [options of `python -m dsv4 generate`]
#
#   launch/generate.sh 2 --model nano --prompt "Once upon a time" --max-tokens 40 --temperature 0
#
# The first run sets up the environment, with an MPI from PyPI. Settings: see setup.sh (VENV, PYTHON, CC); MPIRUN, to start
# with another one (then mpi4py must belong to it).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ranks=${1:-}
check_ranks "$ranks"
shift
setup mpi
allow_ranks
exec "${MPIRUN:-$venv/bin/mpirun}" -n "$ranks" "$python" -m dsv4 generate "$@" </dev/null
