"""The equipment itself: kernels on the CPU behave as on a device, and planted bugs are caught."""

import numpy as np
import ops_cases as make
import pytest
from compare import same_bits
from cuda_ops import HostOps, emulated
from emulation import sanitized
from emulation.build import BuildError
from emulation.launcher import FORWARD, REVERSE, EmulatedLauncher, EmulationError
from mutants import MUTANTS
from test_ops_backends import mistakes

from dsv4.ops import kernels
from dsv4.ops.reference import ReferenceOps

pytestmark = pytest.mark.emulated
ORDERS = (FORWARD, REVERSE, 3)


PROBES: list[str] = []  # kernels of the tests, compiled together


def probe(body, parameters="int* out"):
    """The name of a kernel of this body."""
    PROBES.append(f'#line 1 "probe{len(PROBES)}"\nextern "C" __global__ void probe{len(PROBES)}({parameters}) {{ {body} }}\n')
    return f"probe{len(PROBES) - 1}"


def run(name, *args, threads=64, blocks=(1,), shared=0, order=FORWARD):
    EmulatedLauncher(order).compile_text("".join(PROBES)).kernel(name)(blocks, threads if isinstance(threads, tuple) else (threads,), args, shared)


def out(n=64, dtype=np.int32):
    return np.full(n, -7, dtype)


# ---------------------------------------------------------------------- what CUDA says
PLACE = probe("out[blockIdx.x * blockDim.x + threadIdx.x] = 1000 * blockIdx.x + threadIdx.x;")


@pytest.mark.parametrize("order", ORDERS)
def test_threads_and_blocks_know_where_they_are(order):
    found = out(128)
    run(PLACE, found, threads=32, blocks=(4,), order=order)
    np.testing.assert_array_equal(found, [1000 * b + t for b in range(4) for t in range(32)])


CUBE = probe(
    """int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x, b = blockIdx.y * gridDim.x + blockIdx.x;
    out[b * 64 + t] = threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z + 1000 * blockIdx.x + 10000 * blockIdx.y;"""
)


def test_two_and_three_dimensions():
    found = out(6 * 64)
    run(CUBE, found, threads=(4, 8, 2), blocks=(3, 2))
    np.testing.assert_array_equal(
        found, [x + 10 * y + 100 * z + 1000 * bx + 10000 * by
                for by in range(2) for bx in range(3) for z in range(2) for y in range(8) for x in range(4)]
    )  # fmt: skip


WARP = [
    (probe(f"int lane = threadIdx.x & 31; out[threadIdx.x] = {expression};"), expected)
    for expression, expected in [
        ("__shfl_sync(0xffffffffu, lane, 5)", lambda l: 5),
        ("__shfl_sync(0xffffffffu, lane, lane + 1)", lambda l: (l + 1) % 32),
        ("__shfl_sync(0xffffffffu, lane, 3, 8)", lambda l: l // 8 * 8 + 3),
        ("__shfl_up_sync(0xffffffffu, lane, 3)", lambda l: l - 3 if l >= 3 else l),
        ("__shfl_down_sync(0xffffffffu, lane, 3)", lambda l: l + 3 if l < 29 else l),
        ("__shfl_down_sync(0xffffffffu, lane, 3, 16)", lambda l: l + 3 if l % 16 < 13 else l),
        ("__shfl_xor_sync(0xffffffffu, lane, 9)", lambda l: l ^ 9),
        ("(int)__ballot_sync(0xffffffffu, lane % 3 == 0)", lambda l: sum(1 << i for i in range(0, 32, 3))),
        ("__any_sync(0xffffffffu, lane == 31)", lambda l: 1),
        ("__all_sync(0xffffffffu, lane < 31)", lambda l: 0),
        ("__popc(__brev(lane)) + 100 * __clz(lane) + 10000 * __ffs(lane)",
         lambda l: l.bit_count() + 100 * (32 - l.bit_length()) + 10000 * (l & -l).bit_length()),
        ("(int)__byte_perm(0x03020100u, 0x07060504u, 0x7531u)", lambda l: 0x07050301),
    ]
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel, expected", WARP)
def test_warp_operations(kernel, expected, order):
    found = out()
    run(kernel, found, order=order)
    np.testing.assert_array_equal(found, np.array([expected(t % 32) for t in range(64)], np.uint32).view(np.int32))


HALVES = probe(
    """int lane = threadIdx.x & 31; unsigned half = lane < 16 ? 0xffffu : 0xffff0000u; int sum = lane;
        for (int d = 8; d; d /= 2) sum += __shfl_xor_sync(half, sum, d);
        out[threadIdx.x] = sum;"""
)


@pytest.mark.parametrize("order", ORDERS)
def test_half_warps_may_meet_on_their_own(order):
    found = out()
    run(HALVES, found, order=order)
    np.testing.assert_array_equal(found, np.tile(np.repeat([120, 376], 16), 2))


SHARED = probe(
    """__shared__ int mine[64]; extern __shared__ int given[];
        for (int round = 0; round < 3; round++) {
            mine[threadIdx.x] = threadIdx.x + round; given[63 - threadIdx.x] = threadIdx.x;
            __syncthreads();
            out[threadIdx.x] = mine[(threadIdx.x + 33) % 64] + given[threadIdx.x];
            __syncthreads();
        }"""
)


@pytest.mark.parametrize("order", ORDERS)
def test_barriers_static_and_dynamic_shared_memory(order):
    found = out()
    run(SHARED, found, shared=256, order=order)
    np.testing.assert_array_equal(found, [(t + 33) % 64 + 2 + 63 - t for t in range(64)])


VOTES = probe(
    """int n = __syncthreads_count(threadIdx.x % 4 == 0); int any = __syncthreads_or(threadIdx.x == 63);
        atomicAdd(out, 1); atomicMax(out + 1, n); if (any) atomicOr(out + 2, 4);"""
)


def test_voting_barriers_and_atomics_over_blocks():
    total = np.zeros(3, np.int32)
    run(VOTES, total, blocks=(50,))
    assert total.tolist() == [3200, 16, 4]


FRESH = probe("__shared__ float x[4]; if (threadIdx.x == 0) { out[blockIdx.x] = x[3]; x[3] = 1.0f; }", "float* out")


def test_shared_memory_starts_as_nan_in_every_block():
    found = np.zeros(8, np.float32)
    run(FRESH, found, blocks=(8,))
    assert np.isnan(found).all()


# ---------------------------------------------------------------------- cp.async happens as late as the waits allow
COPIES = [
    probe(
        f"""__shared__ int x[2];
        if (threadIdx.x == 0) {{
            emu::copy_later(&x[0], in, 4); emu::copy_commit(); emu::copy_later(&x[1], in + 1, 4); emu::copy_commit();
            emu::copy_wait({waited}); out[0] = x[0]; out[1] = x[1]; emu::copy_wait(0);
        }}""",
        "int* out, const int* in",
    )
    for waited in (0, 1)
]
FORGOTTEN = probe("__shared__ int x[2]; emu::copy_later(&x[0], out, 4);")


@pytest.mark.parametrize("waited, expected", [(0, [10, 20]), (1, [10, -1])])
def test_copies_come_when_they_are_waited_for(waited, expected):
    found = out(2)
    run(COPIES[waited], found, np.array([10, 20], np.int32))
    assert found.tolist() == expected


def test_copies_never_waited_for_are_an_error():
    with pytest.raises(EmulationError, match="never waited for"):
        run(FORGOTTEN, out(), threads=32)


# ---------------------------------------------------------------------- what is refused
WRONG = [
    (probe(body), message)
    for body, message in [
        ("if (threadIdx.x < 32) __syncthreads();", "has ended"),
        ("if (threadIdx.x < 32) __syncthreads(); else __syncthreads();", "another barrier"),
        ("if (threadIdx.x < 7) return; __syncwarp();", "ended|never come"),
        ("if (threadIdx.x & 1) __shfl_sync(0xffffffffu, 1, 0); else __shfl_sync(0xffffffffu, 2, 0);", "while lanes of it wait"),
        ("out[threadIdx.x] = __shfl_sync(0xffffu, 1, 0);", "not in its own mask"),
        ("if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1, 20);", "not in the mask"),
        ("__shared__ int x[4]; x[threadIdx.x] = 1;", "outside of the array"),
        ("out[0] = ((int4*)(out + 1))->x;", "misaligned"),
        ("__shared__ int x[20000]; x[threadIdx.x] = 1;", "at most 65536 bytes"),
    ]
]
TWO = probe("", "int* out, int n")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel, message", WRONG)
def test_what_a_device_would_not_forgive(kernel, message, order):
    with pytest.raises(EmulationError, match=message):
        run(kernel, out(), order=order)


def test_float_atomics_do_not_compile():
    with pytest.raises(BuildError, match="no float atomics"):
        EmulatedLauncher().compile_text('extern "C" __global__ void k(float* x) { atomicAdd(x, 1.0f); }\n')


@pytest.mark.parametrize(
    "args, message",
    [
        ((np.zeros(4, np.float32), np.int32(1)), "expected i4, found an array of float32"),
        ((np.zeros(4, np.int32), np.float32(1)), "expected i4, found float32"),
        ((np.zeros(4, np.int32), np.int64(1)), "expected i4, found int64"),
        ((np.zeros(4, np.int32),), "expected 2 arguments"),
        ((np.int32(0), np.int32(1)), "expected pi4, found int32"),
    ],
)
def test_arguments_are_of_the_kernels_types(args, message):
    with pytest.raises(EmulationError, match=message):
        run(TWO, *args)


def test_python_numbers_and_strided_arrays_are_no_arguments():
    with pytest.raises(TypeError, match="NumPy scalar"):
        run(TWO, out(), 3)
    with pytest.raises(ValueError, match="contiguous"):
        run(PLACE, out()[::2])


@pytest.mark.parametrize("threads", [0, 33, 1056])
def test_blocks_are_whole_warps(threads):
    with pytest.raises(EmulationError, match="whole warps"):
        run(PLACE, out(), threads=threads)


def test_an_error_leaves_the_equipment_usable():
    for _ in range(3):
        with pytest.raises(EmulationError):
            run(WRONG[0][0], out(), blocks=(9,))
        test_barriers_static_and_dynamic_shared_memory(FORWARD)


def test_other_processors_switch_threads_too():
    for case in (make.rmsnorm(3, 1000), make.connections(1, 4, 48, 1e-6, 1e-6)):
        found, expected = case(HostOps(emulated(sanitizer="portable"))), case(HostOps(emulated()))
        for name in expected:
            same_bits(found[name], expected[name], name)


# ---------------------------------------------------------------------- planted bugs
def caught(mutant, order) -> bool:
    """Whether running the mutant's case fails or gives other results than the reference."""
    try:
        found = mutant.case(HostOps(emulated(edit=mutant.edit, order=order)))
    except EmulationError:
        return True
    return bool(mistakes(mutant.case, found, mutant.case(ReferenceOps())))


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if not m.sanitizer], ids=lambda m: m.name)
def test_planted_bug_is_caught_by_running_it(mutant):
    assert not mistakes(mutant.case, mutant.case(HostOps(emulated())), mutant.case(ReferenceOps()))
    assert any(caught(mutant, order) for order in ORDERS)


@pytest.mark.sanitizer
def test_no_kernel_touches_what_is_not_its_own():
    """Every kernel under the address and undefined-behaviour sanitizers."""
    done = sanitized.start("address")
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    every = {name for path in kernels.source_directory().glob("*.cu") for name in kernels.kernel_names(kernels.inline(path.name))}
    assert set(done.stdout.split()) == every - {"mma_check"}  # test_cuda_mma.py's own


@pytest.mark.sanitizer
def test_no_kernel_races():
    """Under the thread sanitizer, which knows the emulation's barriers and exchanges and no other order."""
    done = sanitized.start("thread")
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    assert {"rmsnorm", "hc_combine", "product_fp8_8", "product_fp8_64", "attend_tiles", "index_choose", "plan"} <= set(done.stdout.split())


@pytest.mark.sanitizer
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.sanitizer], ids=lambda m: m.name)
def test_planted_bug_is_caught_by_a_sanitizer(mutant):
    done = sanitized.start(mutant.sanitizer, mutant.name)
    assert done.returncode == 77, done.stdout + done.stderr
    assert "Sanitizer" in done.stderr or "runtime error" in done.stderr
