"""The launcher for a GPU, as far as it goes without one: what it says where it cannot run, and what it asks of CuPy."""

import subprocess
import sys

import numpy as np
import pytest
from fake_cupy import fake_cupy

from dsv4.errors import BackendError, CapacityError
from dsv4.ops import kernels, nvrtc
from dsv4.ops.kernels import DeviceLauncher, open_cupy


# ---------------------------------------------------------------------- one line each, with what to do
@pytest.mark.parametrize(
    "machine, expected",
    [
        ({"driver": 0}, "expected an NVIDIA driver, found none; install one, or use --backend cpu"),
        ({"driver": 11080}, r"CuPy is made for CUDA 12, the driver knows up to 11.8; install a newer driver, or use"),
        ({"driver": 12020, "built": 13000}, r"made for CUDA 13, the driver knows up to 12.2; `pip install -e '.\[cuda12\]'` in a checkout, or install a newer driver, or"),
        ({"no_device": "cudaErrorNoDevice: no CUDA-capable device is detected"}, "expected a CUDA device; cudaErrorNoDevice"),
        ({"devices": 0}, "found 0 and need number 0"),
        ({"capability": "70"}, "compute capability 7.5 or newer, device 0 has 7.0"),
    ],
)
def test_where_there_is_no_device_to_use(machine, expected):
    with pytest.raises(BackendError, match=expected) as raised:
        open_cupy(0, fake_cupy(**machine)[0])
    text = str(raised.value)
    assert "\n" not in text and "--backend cpu" in text and text.startswith("backend cuda:")


def test_a_rank_without_a_device_of_its_own():
    with pytest.raises(BackendError, match="found 2 and need number 2.*start fewer ranks"):
        open_cupy(2, fake_cupy(devices=2)[0])


def test_cupy_is_not_installed():
    code = "import sys; sys.modules['cupy'] = None; sys.argv[1:] = ['generate', '--backend', 'cuda', '--prompt', 'hi']; "
    code += "from dsv4.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "CuPy cannot be loaded" in done.stderr and "pip install -e '.[cuda12]'` or `pip install -e '.[cuda13]'`" in done.stderr and "--backend cpu" in done.stderr


def test_nvrtc_is_not_installed(monkeypatch):
    monkeypatch.setattr(nvrtc, "_PLACES", ("nvidia/nowhere/libnvrtc-none.so.77",))
    nvrtc.library.cache_clear()
    with pytest.raises(BackendError, match=r"expected libnvrtc-none.so.77, found none; `pip install -e '.\[cuda12\]'`"):
        nvrtc.library()
    nvrtc.library.cache_clear()


def test_the_devices_memory_is_full(tmp_path):
    cupy, _ = fake_cupy(memory=1 << 20)
    launcher = DeviceLauncher(cache=tmp_path, cupy=cupy)
    with pytest.raises(BackendError, match=r"device 0 is out of memory: 4 MB asked for, 1 of 1 MB free; .*--backend cpu") as raised:
        launcher.empty((1 << 20,), np.float32)
    assert "\n" not in str(raised.value)


def test_a_kernel_failed(tmp_path):
    launcher = DeviceLauncher(cache=tmp_path, cupy=fake_cupy(broken="cudaErrorIllegalAddress: an illegal memory access")[0])
    with pytest.raises(BackendError, match="device 0 failed: cudaErrorIllegalAddress.*CUDA_LAUNCH_BLOCKING=1.*--backend cpu"):
        launcher.download(launcher.zeros(3, np.int32))


def test_weights_that_do_not_fit_are_said_before_loading(tmp_path):
    from dsv4.ops.cuda import CudaOps

    ops = CudaOps(DeviceLauncher(cache=tmp_path, cupy=fake_cupy(memory=8 << 30)[0]))
    assert ops.room(1 << 30) == ops.launcher.free_bytes() - (1 << 30)
    with pytest.raises(CapacityError, match=r"expected 5.37 GB of device memory for the weights, found 4.29 GB free; .*--expert-cache"):
        ops.room(5 << 30)


# ---------------------------------------------------------------------- what is asked of CuPy
@pytest.fixture
def launcher(tmp_path):
    cupy, calls = fake_cupy()
    made = DeviceLauncher(cache=tmp_path / "kernels", cupy=cupy)
    made.calls = calls
    return made


def test_a_steps_memory_is_taken_ahead(launcher):
    launcher.reserve(1 << 16)
    assert ("use", 0) in launcher.calls and launcher.calls[-1] == ("malloc", 1 << 16)
    with pytest.raises(BackendError, match="device 0 is out of memory: 2147 MB asked for, .*smaller chunks"):
        launcher.reserve(2 << 30)


@pytest.mark.compile_gate
def test_kernels_are_compiled_once_by_content_with_our_flags(launcher, monkeypatch):
    compiled = []
    real = nvrtc.compile_text

    def compile_text(lib, text, name, arch, flags=nvrtc.FLAGS):
        compiled.append((name, arch, flags))
        return real(lib, text, name, arch, flags)

    monkeypatch.setattr(kernels.nvrtc, "compile_text", compile_text)
    for _ in range(2):
        launcher.compile("formats.cu").kernel("act_quant")
    assert compiled == [("formats.cu", 90, nvrtc.FLAGS)]
    assert {"-fmad=false", "-ftz=false"} <= set(nvrtc.FLAGS)
    again = DeviceLauncher(cache=launcher.cache, cupy=fake_cupy()[0])
    again.compile("formats.cu")
    assert len(compiled) == 1, "the cache is not used"
    again.compile("formats.cu", {"ANY": 1})
    assert len(compiled) == 2, "macros are part of what is cached"


@pytest.mark.compile_gate
def test_launches(launcher):
    kernel = launcher.compile("formats.cu").kernel("act_quant")
    x = launcher.upload(np.ones((2, 64), np.float32))
    kernel((1, 2), (256,), (x, None, np.int32(64)))
    *_, (_, name, grid, block, args, shared, _) = launcher.calls
    assert (name, grid, block, shared) == ("act_quant", (1, 2), (256,), 0)
    assert args[0] is x and args[1] == np.uint64(0) and args[1].dtype == np.uint64 and args[2] == 64
    before = len(launcher.calls)
    kernel((0, 2), (256,), (x, x, np.int32(64)))
    assert len(launcher.calls) == before, "an empty grid is no launch"
    kernel((1, 2), (256,), (x, x, np.int32(64)), shared=60000)
    assert launcher.calls[-1][-2:] == (60000, 60000), "more than 48 KB of shared memory must be asked for"
    with pytest.raises(TypeError, match="NumPy scalar"):
        kernel((1, 2), (256,), (x, x, 64))


def test_index_functions_do_not_make_the_host_wait(launcher, monkeypatch):
    """numba waits for the stream of every CuPy array it is given, and takes a stream by its object alone."""
    from numba import cuda

    found = []
    monkeypatch.setattr(kernels, "index_kernel", lambda function, count: function)
    monkeypatch.setattr(cuda, "jit", lambda function: Configured())
    monkeypatch.setattr(cuda, "as_cuda_array", lambda array, sync: (array, sync))
    monkeypatch.setattr(cuda, "external_stream", lambda number: ("stream", number))

    class Configured:
        def __getitem__(self, how):
            return lambda *args: found.append((how, args))

    x = launcher.upload(np.zeros(3, np.int32))
    launcher.each(len, 300, (x, np.int32(4)))
    assert found == [((3, 128, ("stream", 7)), (300, (x, False), np.int32(4)))]


def test_a_kernel_cache_that_is_not_ones_own(launcher, monkeypatch):
    monkeypatch.setattr(kernels.os, "getuid", lambda: 12345)
    with pytest.raises(BackendError, match="kernels to be one's own, found another user's"):
        launcher.compile("formats.cu")
    launcher.cache.rmdir()
    launcher.cache.write_text("a file")
    with pytest.raises(BackendError, match="expected to write to .*kernels: File exists; set TMPDIR"):
        launcher.compile("formats.cu")


def test_arrays(launcher):
    host = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.testing.assert_array_equal(launcher.download(launcher.upload(host)), host)
    assert not launcher.download(launcher.zeros((2, 2), np.float32)).any()
    assert launcher.empty((0, 5), np.float32).shape == (0, 5)
    assert ("array", 24) in launcher.calls, "a step's tables go through pinned memory"
    del launcher.calls[:]
    launcher.upload(np.zeros(1 << 20, np.int32))
    assert ("set", 4 << 20) in launcher.calls, "weights do not: they would take as much pinned memory"


def test_copies_are_ordered_by_events_and_only_the_host_wait_waits(launcher, monkeypatch):
    from dsv4.ops.cuda_stage import DeviceStage

    launcher.empty = lambda shape, dtype: [SlotArray(launcher) for _ in range(shape[0])]
    stage = DeviceStage(launcher, 3, 100)
    del launcher.calls[:]
    stage.free(0)
    assert launcher.calls == []
    copied = stage.send(0, 2, stage.mark())
    assert launcher.calls == [
        ("record", "compute"), ("enter", 0), ("wait", "copies"), ("copy", 100, "copies"), ("record", "copies")
    ]  # fmt: skip
    del launcher.calls[:]
    stage.settle(copied)
    assert launcher.calls == [("wait", "compute")]
    stage.free(1)
    stage.free(0)
    assert launcher.calls[1:] == [("synchronize",)]
    monkeypatch.setattr(launcher, "wait", (waited := []).append)
    stage.send(1, 0, stage.mark())
    stage.settle(copied)
    assert waited == [copied], "later copies go on while this slot's expert computes"


def test_measurements(launcher):
    """Milliseconds of the device's clock; a copy and a product on the compute stream."""
    start, end = launcher.clock(), launcher.clock()
    del launcher.calls[:]
    assert launcher.between(start, end) == 0.25 and launcher.calls == [("synchronize",)]
    source, target = launcher.zeros(40, np.uint8), launcher.zeros(40, np.uint8)
    del launcher.calls[:]
    launcher.duplicate(source, target)
    assert launcher.calls == [("duplicate", 40, "compute")]
    assert launcher.multiply(source, target) == ("product", source, target)
    assert launcher.about() == {"device": "Card", "memory_bytes": 1 << 30, "capability": 9.0, "driver_cuda": "12.8"}


class SlotArray:
    def __init__(self, launcher):
        self.data = launcher.pool.malloc(100)


def test_importing_the_backend_needs_no_cupy():
    code = "import sys; sys.modules['cupy'] = None; sys.modules['numba'] = None; import dsv4.ops.cuda"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
