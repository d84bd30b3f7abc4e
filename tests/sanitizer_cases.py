"""What the sanitizers run: every kernel at a few shapes, odd ones among them. Uses the cases of the ops' tests."""

import mutants
import ops_cases as make
from cuda_ops import HostOps, emulated

CASES = [
    make.embed(3, 7, 33, 3), make.act_quant(3, 136), make.act_quant(1, 31), make.rmsnorm(2, 257),
    make.connections(2, 4, 300, 1e-2, 1e-4), make.connections(3, 2, 33, 1e-4, 1e-2),
    make.rotation(3, 3, 30, 6), make.keys(5, 77, 13), make.store_keys(3, 128, 64), make.attend(1, 2, 96, 32, (40,), 1),
    make.attend(3, 5, 128, 64, (20, 45), 1), make.attend(3, 17, 72, 8, (20,), 1), make.attend(6, 3, 72, 8, (5, 33), 1),
    make.compression(3, 4, 33), make.compression(3, 6, 33), make.compression(2, 16, 128),
    make.index_keys(3, 3, 64, 64), make.index_keys(2, 3, 32, 8), make.entry_places(3, 17, 8),
    make.index_select(3, 4, 64, 200, 16, 64, "ties"), make.index_select(2, 3, 64, 70, 8, 8, "any"),
    *(make.linear(fmt, t, n, k, slices, False) for t in (1, 9, 33) for fmt, n, k, slices in (
        ("fp8", 37, 288, 1), ("fp8", 20, 512, 4), ("fp4", 17, 288, 1))),
    make.linear("fp8", 65, 20, 512, 2, False), make.linear("fp4", 65, 20, 512, 2, False), make.linear("fp8", 2, 5, 136, 1, True),
    *(make.linear(fmt, t, 9, k, slices, False) for fmt in ("bf16", "f32") for t, k, slices in ((1, 33, 1), (9, 64, 2))),
    make.grouped_linear(3, 3, 136, 20), make.gate(3, 18, 64, 4, "bias"), make.gate(1, 9, 32, 4, "fixed"),
    make.swiglu(3, 37, 2.0, True), make.moe(2, 5, 160, 256, 2, 2, 7.0), make.moe(9, 3, 96, 128, 2, 1, 7.0),
    make.moe(35, 5, 96, 128, 2, 1, 0),
]  # fmt: skip

# The thread sanitizer takes ten times as long: the kernels in which threads give each other something, at one shape each.
EXCHANGING = [
    make.act_quant(1, 136), make.rmsnorm(1, 257), make.connections(1, 2, 33, 1e-4, 1e-2), make.linear("fp8", 1, 17, 136, 1, False),
    make.linear("fp4", 33, 16, 64, 1, False), make.linear("fp8", 65, 16, 256, 1, True), make.linear("bf16", 1, 5, 33, 1, False),
    make.moe(2, 4, 128, 128, 2, 1, 1.0), make.gate(1, 18, 64, 4, "bias"), make.store_keys(1, 128, 64),
    make.attend(1, 2, 96, 32, (40,), 1), make.attend(6, 3, 72, 8, (5, 33), 1), make.compression(1, 4, 33),
    make.index_keys(1, 2, 32, 8), make.index_select(1, 3, 64, 70, 8, 8, "ties"),
]  # fmt: skip


def run(sanitizer: str, mutant: str = "") -> set[str]:
    """Run all cases, or those of a mutant on its kernels → names of the kernels that ran."""
    edit = mutants.BY_NAME[mutant].edit if mutant else None
    ops = HostOps(emulated(sanitizer=sanitizer, edit=edit, threads=2))
    cases = EXCHANGING if sanitizer == "thread" else CASES
    for case in [mutants.BY_NAME[mutant].case] if mutant else cases:
        case(ops)
    ops.has_nonfinite(make.rmsnorm(3, 1000).inputs["x"])
    ops.best(make.rmsnorm(2, 1000).inputs["x"])
    return ops.ops.launcher.kernels_run
