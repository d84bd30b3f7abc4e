"""Every CUDA kernel compiles for every supported architecture, and none spills registers. No GPU needed."""

from pathlib import Path

import pytest
from tools import compile_gate

from dsv4.errors import BackendError
from dsv4.ops import kernels, nvrtc

pytestmark = pytest.mark.compile_gate

FILES = sorted(p.name for p in kernels.source_directory().glob("*.cu"))


@pytest.mark.parametrize("name", FILES)
def test_compiles_everywhere_without_spills(name):
    usages = [
        usage
        for arch in compile_gate.ARCHITECTURES
        for usage in compile_gate.compile_file(kernels.source_directory() / name, arch)
    ]
    assert {u.arch for u in usages} == set(compile_gate.ARCHITECTURES)
    assert not [u for u in usages if u.spills]
    assert not [u for u in usages if u.shared > 48 << 10], "static shared memory ends at 48 KB"


def test_the_page_of_registers_has_every_kernel():
    page = Path(__file__).resolve().parents[1] / "docs" / "measurements" / "cuda-registers.md"
    if not page.exists():
        pytest.skip("needs a checkout")
    listed = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in page.read_text("utf-8").splitlines() if ".cu |" in line}
    assert listed == {(name, kernel) for name in FILES for kernel in kernels.kernel_names(kernels.inline(name))}


@pytest.mark.parametrize("arch", [(7, 5), (9, 0)])
def test_index_functions_compile_without_a_device(arch):
    from numba import cuda

    from dsv4.ops.cuda_places import INDEX_KERNELS

    for function, types in INDEX_KERNELS.items():
        made = kernels.index_kernel(function, function.__code__.co_argcount - 1)
        ptx, _ = cuda.compile_ptx(made, f"void(int64, {types})", cc=arch)
        assert f".target sm_{arch[0]}{arch[1]}" in ptx and function.__name__ in ptx


def test_a_spill_is_seen(tmp_path):
    body = "\n".join(f"    float a{i} = x[{i} * n];" for i in range(120))
    use = "\n".join(f"    x[{i} * n + 1] = a{i} * a{(i * 7) % 120};" for i in range(120))
    (tmp_path / "spill.cu").write_text(
        f'extern "C" __global__ void __launch_bounds__(1024, 2)\nspill(float* x, int n) {{\n{body}\n    __syncthreads();\n{use}\n}}\n'
    )
    (usage,) = compile_gate.run(tmp_path, (80,))
    assert usage.kernel == "spill" and usage.spills > 0
    assert "| spill.cu | spill |" in compile_gate.table([usage])


def test_an_error_names_the_file_and_line(tmp_path):
    (tmp_path / "head.cuh").write_text("#pragma once\n\nint wrong = ;\n")
    (tmp_path / "broken.cu").write_text('#include "head.cuh"\nextern "C" __global__ void k() {}\n')
    with pytest.raises(BackendError, match=r"head\.cuh\(3\)"):
        compile_gate.run(tmp_path, (75,))


def test_multiplications_and_additions_are_not_fused():
    text = 'extern "C" __global__ void k(float* x) { x[0] = x[1] * x[2] + x[3]; }'
    lib = nvrtc.library()
    apart = nvrtc.compile_text(lib, text, "k.cu", 80)
    fused = nvrtc.compile_text(lib, text, "k.cu", 80, tuple(f for f in nvrtc.FLAGS if "fmad" not in f))
    assert apart.cubin != fused.cubin
