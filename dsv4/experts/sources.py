"""Where the bytes of an expert lie: in the shards of a checkpoint, a rank's part of every tensor."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ..checkpoint import Checkpoint
from ..config import ModelConfig
from ..errors import BackendError, CheckpointError
from ..split import Split
from ..weights import banks, expert_tensors
from .layout import ExpertLayout


class Source(Protocol):
    """Experts of one rank. banks: how many each layer and draft stage has, by the prefix of its tensors' names."""

    layout: ExpertLayout
    banks: dict[str, int]

    def pieces(self, prefix: str, expert: int) -> np.ndarray:
        """Where the six arrays lie, as _staging.gather takes it: int64 [6, 7]; scales marked as such."""
        ...

    def where(self, prefix: str, expert: int, piece: int) -> str:
        """File and tensor of a piece, for messages."""
        ...


class CheckpointExperts:
    """The experts in a checkpoint's shards."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, stages: tuple[int, ...], split: Split):
        self._checkpoint, self._split = checkpoint, split
        self.banks = banks(config, stages)
        parts = [part for _, part in expert_tensors(checkpoint, next(iter(self.banks)), 0, split)]
        self.layout = ExpertLayout(tuple((rows.stop - rows.start, k.stop - k.start) for rows, k in parts))

    def pieces(self, prefix: str, expert: int) -> np.ndarray:
        tensors = expert_tensors(self._checkpoint, prefix, expert, self._split)
        lies = [self._checkpoint.lies(name, part) for name, part in tensors]
        return np.array([(*place, to, i % 2) for i, (place, to) in enumerate(zip(lies, self.layout.starts))], np.int64)

    def where(self, prefix: str, expert: int, piece: int) -> str:
        name, _ = expert_tensors(self._checkpoint, prefix, expert, self._split)[piece]
        return f"{self._checkpoint.directory / self._checkpoint.info(name).shard}: {name}"


def read_expert(source: Source, prefix: str, expert: int, buffer: Any, threads: int) -> None:
    """An expert's bytes into uint8 [layout.nbytes], read by so many threads.

    Raises CheckpointError for a file that cannot be read or was cut short since it was opened, and for a NaN scale;
    BackendError without the compiled module.
    """
    try:
        from .. import _staging
    except ImportError as error:
        raise BackendError(
            f"experts: the compiled module is missing ({error}); install with `pip install -e .` in a checkout"
        ) from error
    fault = _staging.gather(buffer, source.pieces(prefix, expert), threads)
    if fault:
        piece, at, found = fault
        raise CheckpointError(
            f"{source.where(prefix, expert, piece)}: expected whole tensors of finite scales, as when it was opened; "
            f"found {found} at byte {at}; fetch or pack the file again"
        )
