#!/usr/bin/env bash
# Text from a model on ranks of several hosts: launch/multi_host.sh HOSTFILE INTERFACE [options of `python -m dsv4 generate`]
#
#   launch/multi_host.sh hosts.txt eth0 --model /models/DeepSeek-V4-Flash --prompt "Hello" --max-tokens 40
#
# HOSTFILE   Open MPI's: one host a line, with the ranks it takes:   node1 slots=1
#                                                                    node2 slots=1
#            The ranks of all lines together must be 2, 4 or 8. Rank 0 runs on the first host.
# INTERFACE  the network to use, by name (ip -br link) or as 10.0.0.0/24, when the hosts share more than one
#
# Needed on every host: this checkout and its environment under the same path and of the same version (run
# `launch/generate.sh 1 --model nano --prompt Hello` there once, or share the directory), the checkpoint under the same
# path, and a login by ssh from here that asks for nothing. Ranks that find different files or versions refuse to start.
# Settings: see setup.sh (VENV, PYTHON, CC).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
hosts=${1:-} interface=${2:-}
[ -f "$hosts" ] && [ -n "$interface" ] || fail "expected a host file and an interface; see the head of $0"
shift 2
setup mpi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # containers
exec "$venv/bin/mpirun" --hostfile "$hosts" --prefix "$venv" --bind-to none \
  --mca btl_tcp_if_include "$interface" --prtemca prte_if_include "$interface" \
  -x OMPI_ALLOW_RUN_AS_ROOT -x OMPI_ALLOW_RUN_AS_ROOT_CONFIRM \
  "$python" -m dsv4 generate "$@" </dev/null
