"""What the sanitizers run: every kernel at a few shapes, odd ones among them. Uses the cases of the ops' tests."""

import mutants
import ops_cases as make
from cuda_ops import HostOps, emulated

CASES = [
    make.embed(3, 7, 33, 3), make.act_quant(3, 136), make.act_quant(1, 31), make.rmsnorm(2, 257),
    make.rotation(3, 3, 30, 6), make.keys(5, 77, 13), make.store_keys(3, 128, 64), make.attend(3, 5, 128, 64, (20, 45), 1),
    make.attend(3, 17, 72, 8, (20,), 1), make.compression(3, 4, 33), make.compression(3, 6, 33), make.index_keys(3, 3, 64, 64),
    make.index_select(3, 4, 64, 200, 16, 64, "ties"), make.entry_places(3, 5, 8),
    make.connections(2, 4, 300, 1e-2, 1e-4), make.connections(3, 2, 33, 1e-4, 1e-2),
    *(make.linear(fmt, t, n, k, slices, False) for t in (1, 9, 35) for fmt, n, k, slices in (
        ("fp8", 37, 288, 1), ("fp8", 20, 512, 4), ("fp4", 17, 1056, 1), ("bf16", 9, 99, 1), ("f32", 5, 264, 2))),
    make.grouped_linear(3, 3, 136, 20), make.gate(3, 40, 32, 6, "bias"), make.gate(2, 9, 32, 4, "fixed"),
    make.swiglu(3, 37, 2.0, True), make.moe(2, 5, 160, 256, 2, 2, 7.0), make.moe(9, 3, 96, 128, 2, 1, 7.0),
    make.moe(35, 5, 96, 128, 2, 1, 7.0),
]  # fmt: skip


def run(sanitizer: str, mutant: str = "") -> set[str]:
    """Run all cases, or those of a mutant on its kernels → names of the kernels that ran."""
    edit = mutants.BY_NAME[mutant].edit if mutant else None
    ops = HostOps(emulated(sanitizer=sanitizer, edit=edit, threads=2))
    for case in [mutants.BY_NAME[mutant].case] if mutant else CASES:
        case(ops)
    ops.has_nonfinite(case.inputs[case.by_row[0]])
    return ops.ops.launcher.kernels_run
