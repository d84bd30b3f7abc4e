"""The CUDA backend without its kernels: it makes all the arrays it would make, of memory that nobody touches, and counts them."""

from __future__ import annotations

import gc

import numpy as np
from emulation.arrays import DeviceArray
from emulation.launcher import EmulatedLauncher

from dsv4.checkpoint import DTYPES
from dsv4.comm import Communicator
from dsv4.config import ModelConfig
from dsv4.dspark import Ask, Draft
from dsv4.model import Model
from dsv4.ops.cuda import CudaOps
from dsv4.rows import Rows, Span
from dsv4.sampling import greedy
from dsv4.split import Split
from dsv4.state import Pool
from dsv4.step import Step
from dsv4.synth import Drawn, Recipe
from dsv4.weights import load_weights

_SMALL = 1 << 20  # bytes of arrays whose values count: tables of rows


class Sizing(EmulatedLauncher):
    """Arrays of the right sizes, hardly any values."""

    def compile(self, source, defines=None):
        return self

    def kernel(self, name):
        return lambda grid, block, args, shared=0: None

    def each(self, function, n, args):
        pass

    def empty(self, shape, dtype):
        return DeviceArray(np.zeros(shape, dtype), self)  # pages of zeros are there once somebody writes

    def upload(self, array):
        return super().upload(array) if array.nbytes <= _SMALL else self.empty(array.shape, array.dtype)

    def download(self, array):
        self.synchronisations += 1
        return np.zeros(array.shape, array.dtype)


class Blank(Drawn):
    """A checkpoint of zeros."""

    def view(self, name, part=()):
        tensor = self._tensors[name]
        shape = np.broadcast_to(np.uint8(0), tensor.shape)[part].shape
        return np.zeros(shape, DTYPES[tensor.dtype])


class Rank(Communicator):
    """Rank 0 of several, with arrays as NCCL's: all parts of a sum beside each other."""

    def __init__(self, launcher: Sizing, size: int, columns: int):
        super().__init__()
        self.launcher, self.size, self.columns = launcher, size, columns

    def sum_parts(self, y, parts):
        if parts == 1:
            return y
        sums = list(self.launcher.empty((parts, *y.shape), y.dtype))
        while len(sums) > 1:
            sums = [low + high for low, high in zip(sums[0::2], sums[1::2])]
        return sums[0]

    def join(self, y):
        rest = self.columns - y.shape[1]
        return np.concatenate([y, self.launcher.empty((len(y), rest), y.dtype)], axis=1) if rest else y


class Sized:
    """A model on the sizing launcher; `taken` says how many bytes of arrays a call had at once beside what there was."""

    def __init__(self, config: ModelConfig, *, rows: int, context: int, ranks: int = 1, stages: int = 0):
        self.launcher = Sizing()
        ops, self.config, self.rows = CudaOps(self.launcher), config, rows
        self.split = Split.of(config, 0, ranks)
        weights = load_weights(Blank(Recipe(config, stages, 0)), config, ops, None, self.split)
        comm = Rank(self.launcher, ranks, config.vocab_size)
        self.model, self.draft = Model(config, weights, ops, comm), Draft(config, weights, ops, comm) if stages else None
        self.context, self.stages = context, stages

    def pool(self, slots: int = 1) -> Pool:
        headroom = self.rows if slots == 1 else 1
        return Pool(self.model.ops, self.config, slots=slots, max_context=self.context, headroom=headroom, stages=self.stages)

    def taken(self, call, *args) -> int:
        gc.collect()
        before = self.launcher.peak = self.launcher.live
        call(*args)
        return self.launcher.peak - before

    def forward(self, wanted: str = "all") -> int:
        pool, rows = self.pool(), Rows.of(0, self.context - self.rows, np.zeros(self.rows, np.int32), wanted)
        return self.taken(lambda: self.model.forward(Step(self.model.ops, pool, rows), pool))

    def drafts(self) -> int:
        slots = max(1, self.rows // self.config.dspark.block_size)
        asks = [Ask(slot, self.context - 9, 0, greedy) for slot in range(slots)]
        return self.taken(self.draft.draft, self.pool(slots), asks)

    def prime(self) -> int:
        return self.taken(self.draft.prime, self.pool(), [Span(0, self.context - self.rows, self.context)])
