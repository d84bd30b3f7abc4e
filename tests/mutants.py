"""Bugs planted in copies of the real kernels, and the case that must show each: what the equipment has to catch."""

from __future__ import annotations

from typing import NamedTuple

import ops_cases as make


class Mutant(NamedTuple):
    """`old` → `new` in one kernel file. sanitizer: "" where running it is enough, else the one that must stop it."""

    name: str
    file: str
    old: str
    new: str
    case: make.Case
    sanitizer: str = ""

    def edit(self, file: str, text: str) -> str:
        if file != self.file:
            return text
        assert self.old in text, f"{self.name}: the text to change is not in {file} any more"
        return text.replace(self.old, self.new, 1)


_NORM = make.rmsnorm(3, 1000)
_HYPER = make.connections(3, 4, 300, 1e-2, 1e-4)
_WIDE = make.linear("fp8", 65, 130, 640, 1, True)  # more rows than the kernels for few take; several blocks of K
_EXPERTS = make.moe(3, 6, 128, 256, 2, 2, 1.0)
_FIRST_BARRIER = "scratch[threadIdx.x >> 5] = x;\n    __syncthreads();"

MUTANTS = [
    Mutant("missing syncthreads", "norm.cu", _FIRST_BARRIER, _FIRST_BARRIER.replace("__syncthreads();", ""), _NORM),
    Mutant("missing syncwarp", "norm.cu", "c[first + i * step] /= sum;\n    }\n    __syncwarp();",
           "c[first + i * step] /= sum;\n    }", _HYPER),
    Mutant("divergent barrier", "norm.cu", _FIRST_BARRIER,
           _FIRST_BARRIER.replace("__syncthreads", "if (threadIdx.x < 100) __syncthreads"), _NORM),
    Mutant("ended threads at a barrier", "norm.cu", "f[i] = row[i];\n    __syncthreads();",
           "f[i] = row[i];\n    if (threadIdx.x >= n) return;\n    __syncthreads();", make.connections(1, 2, 33, 1e-4, 1e-2)),
    Mutant("shuffle of half a warp", "norm.cu", "x += __shfl_xor_sync(FULL_MASK, x, d);",
           "if ((threadIdx.x & 31) < 16) x += __shfl_xor_sync(FULL_MASK, x, d);", _NORM),
    Mutant("index outside of shared memory", "norm.cu", "f[i] = row[i];", "f[i + HC_CHUNK] = row[i];", _HYPER),
    Mutant("shared memory not filled", "norm.cu", "for (int i = threadIdx.x; i < n; i += THREADS) f[i] = row[i];",
           "for (int i = threadIdx.x; i < n - 1; i += THREADS) f[i] = row[i];", _HYPER),
    Mutant("write beyond a row's end", "formats.cu", "if (k < K) y[row + k]", "if (k <= K) y[row + k]",
           make.act_quant(3, 100), "address"),
    Mutant("read before an array's start", "norm.cu", "float sum = part[0];", "float sum = part[-8];", _HYPER, "address"),
    Mutant("shared memory through a pointer, beyond its end", "norm.cu", "sinkhorn(mix + 2 * m, m,", "sinkhorn(mix + 20 * m * m, m,",
           _HYPER, "address"),
    Mutant("dynamic shared memory, beyond its end", "moe.cu", "int* tile_of = counts + experts;", "int* tile_of = counts + 2 * experts;",
           _EXPERTS, "address"),
    Mutant("missing wait for cp.async", "linear.cu", "copy_wait<1>();", "", _WIDE),
    Mutant("overwritten while others read", "linear.cu", "__syncthreads();\n        if (block + 1 < end) continue;",
           "if (block + 1 < end) continue;", _WIDE),
    Mutant("missing syncthreads, as a race", "norm.cu", "f[i] = row[i];\n    __syncthreads();", "f[i] = row[i];", make.connections(1, 2, 33, 1e-4, 1e-2),
           "thread"),
    Mutant("misaligned wide load", "linear.cu", "wide_x = K % 8 == 0 && width % 8 == 0 && (u64)x % 16 == 0;", "wide_x = true;",
           make.linear("bf16", 5, 7, 33, 1, False)),
]  # fmt: skip
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
