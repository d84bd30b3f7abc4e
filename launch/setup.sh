# Sourced by the other scripts: dsv4 from this checkout, installed editable in a virtual environment, with chat and server.
#
#   setup [EXTRA]   sets $python to the environment's interpreter; does nothing when sources and EXTRA are unchanged
#   check_ranks N   fails unless N, a script's first argument, is a number of ranks
#   allow_ranks     before mpirun: as many ranks on this host as are asked for
#
# VENV     the environment's directory (default: .venv in the checkout)
# PYTHON   the interpreter to make it with (default: python3); CC the C compiler (default: cc)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
[[ $venv = /* ]] || venv=$PWD/$venv
packages="python3 python3-venv python3-dev build-essential"

say() { echo "dsv4: $*" >&2; }
fail() { say "error: $*"; exit 2; }

check_ranks() {
  [[ $1 =~ ^[1248]$ ]] || fail "expected the number of ranks first (1, 2, 4 or 8), found '$1'; see the head of $0"
}

# Root allowed (containers), more ranks than cores allowed, and no process tied to a single core: as variables of Open MPI,
# which another MPI's mpirun ignores.
allow_ranks() {
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
}

# What is missing to make an environment and compile for it, as words; nothing when all is there.
missing() {
  local base=${PYTHON:-python3} include
  command -v "$base" >/dev/null || { echo "$base"; return; }
  "$base" -c 'import ensurepip, venv' 2>/dev/null || echo "Python's venv module"
  command -v "${CC:-cc}" >/dev/null || { echo "a C compiler"; return; }
  include=$("$base" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  printf '#include <stdio.h>\n#include <Python.h>\n' | "${CC:-cc}" -fsyntax-only -I"$include" -x c - 2>/dev/null ||
    echo "the C headers of Python (Python.h)"
}

need_system() {
  local lacking
  lacking=$(missing | paste -sd, | sed 's/,/, /g')
  [ -n "$lacking" ] || return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing what is missing: $lacking"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >&2 && apt-get install -y -qq --no-install-recommends $packages >&2 || fail "apt-get failed"
    lacking=$(missing | paste -sd, | sed 's/,/, /g')
  fi
  [ -z "$lacking" ] || fail "missing: $lacking. On Debian or Ubuntu: sudo apt-get install -y $packages"
}

need_version() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "expected Python 3.10 or newer, found $("$1" -V 2>&1); install one and set PYTHON to it"
}

make_venv() {
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
  if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "$venv: expected a virtual environment or nothing, found something else; set VENV to another directory"
  fi
  say "making $venv"
  "${PYTHON:-python3}" -m venv --clear "$venv" || fail "could not make $venv"
}

# One line that changes with anything the installed package is built from (pyx/*.c is made by the build).
stamp() {
  (cd "$root" && "$python" -V && pwd && find pyproject.toml setup.* MANIFEST.in pyx cuda -type f |
    grep -v '^pyx/[^/]*\.c$' | LC_ALL=C sort | xargs sha256sum) | sha256sum | cut -d' ' -f1
}

# The packages that dsv4, as installed, wants for extras EXTRA,EXTRA; one a line.
wanted() {
  "$python" -I - "$1" <<'END'
import sys
from importlib.metadata import requires
for line in requires("dsv4"):
    package, _, marker = line.partition(";")
    if any(f'extra == "{extra}"' in marker for extra in sys.argv[1].split(",")):
        print(package.strip())
END
}

setup() {
  local extra=${1:-run} extras=chat,serve now packages
  [ "$extra" = run ] || extras+=,$extra
  python=$venv/bin/python
  if ! [ -x "$python" ] || ! "$python" -m pip --version >/dev/null 2>&1; then
    need_system
    need_version "${PYTHON:-python3}"
    make_venv
  fi
  need_version "$python"
  now=$(stamp)
  if "$python" -c 'import dsv4.ops.cpu' 2>/dev/null; then
    [ "$(cat "$venv/.dsv4-$extra" 2>/dev/null)" != "$now" ] || return 0
    if [ "$(cat "$venv/.dsv4-run" 2>/dev/null)" = "$now" ]; then # compiled from these sources: only packages are missing
      say "installing packages for $extra into $venv"
      packages=$(wanted "$extras") || fail "$venv: dsv4 is not installed there; remove $venv and run this again"
      "$python" -m pip install --quiet --disable-pip-version-check $packages >&2 || fail "installation failed (see above)"
      echo "$now" >"$venv/.dsv4-$extra"
      return
    fi
  fi
  need_system
  say "installing into $venv (downloads, then compiles the kernels: a few minutes without a word)"
  "$python" -m pip install --quiet --disable-pip-version-check -e "$root[$extras]" >&2 || fail "installation failed (see above)"
  echo "$now" >"$venv/.dsv4-run"
  echo "$now" >"$venv/.dsv4-$extra"
}
