#!/usr/bin/env bash
# On a machine with a GPU: sets everything up (wheels only; needs a driver, no CUDA toolkit), runs the CUDA kernels' tests on
# the device, and measures it. The exit status is 0 if all tests passed; 2 where there is no GPU or the set-up failed.
#
#   launch/gpu_check.sh [options of `python -m dsv4 bench cuda`]
#
# Results: gpu_check.json in the current directory (--output FILE: there). Settings: see setup.sh (VENV, PYTHON, CC).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# The driver's CUDA version (12 for 12.x) if it has a device, else 0.
driver() {
  "${PYTHON:-python3}" - <<'END'
import ctypes
major = 0
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    version, devices = ctypes.c_int(), ctypes.c_int()
    if not (cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(devices)) or cuda.cuDriverGetVersion(ctypes.byref(version))):
        major = version.value // 1000 if devices.value else 0
except OSError:
    pass
print(major)
END
}

command -v "${PYTHON:-python3}" >/dev/null || need_system
major=$(driver)
[ "$major" -gt 0 ] || { say "gpu_check: expected a GPU and its driver (libcuda.so.1), found none; nothing was run"; exit 2; }
[ "$major" -ge 12 ] || { say "gpu_check: expected a driver for CUDA 12 or newer, found $major; install a newer driver"; exit 2; }
major=$((major > 13 ? 13 : major))
setup "cuda$major,gpu$major"

status=0
here=$PWD
cd "$root"
say "tests on the device: tensor cores first, then kernels, goldens and the engine's promises"
"$python" -m pytest -q -m gpu -rs tests/test_cuda_mma.py tests/test_cuda_[!m]*.py tests/test_cuda_moe.py || status=1
cd "$here"
say "measuring"
"$python" -m dsv4 bench cuda --output gpu_check.json "$@" || status=1
exit $status
