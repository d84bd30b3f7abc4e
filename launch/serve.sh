#!/usr/bin/env bash
# A server on several ranks of this host: launch/serve.sh RANKS [options of `python -m dsv4 serve`]
#
#   launch/serve.sh 2 --model nano --port 8000          then open http://127.0.0.1:8000
#
# Ctrl-C (or SIGTERM) lets running answers end, a second one does not. The first run sets up the environment; with more
# than one rank, with an MPI from PyPI. Settings: see setup.sh (VENV, PYTHON, CC); MPIRUN, to start with another one (then
# mpi4py must belong to it).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ranks=${1:-}
check_ranks "$ranks"
shift
if [ "$ranks" = 1 ]; then
  setup
  exec "$python" -m dsv4 serve "$@" </dev/null
fi
setup mpi
allow_ranks
# mpirun kills its job a moment after SIGINT and SIGTERM, but hands SIGUSR1 on. So it runs in a process group of its own
# (-m), which the terminal's Ctrl-C does not reach, and is sent that instead.
set -m
"${MPIRUN:-$venv/bin/mpirun}" -n "$ranks" "$python" -m dsv4 serve "$@" </dev/null &
job=$!
trap 'kill -USR1 "$job" 2>/dev/null || true' INT TERM
while kill -0 "$job" 2>/dev/null; do
  wait "$job" || true # ended by a signal, too: then mpirun still runs
done
wait "$job"
