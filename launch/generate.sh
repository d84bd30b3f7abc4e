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
[[ $ranks =~ ^[1248]$ ]] || fail "expected the number of ranks first (1, 2, 4 or 8), found '${ranks}'; see the head of $0"
shift
setup mpi
# Open MPI, by its variables, so that another MPI's mpirun will do: root allowed (containers), more ranks than cores
# allowed, and no process tied to a single core.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
exec "${MPIRUN:-$venv/bin/mpirun}" -n "$ranks" "$python" -m dsv4 generate "$@" </dev/null
