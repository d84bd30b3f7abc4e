"""How fast experts come from files that the system holds in memory, beside the speed at which memory can be read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np

from ..checkpoint import Checkpoint
from ..config import ModelConfig
from ..experts.packed import PackedExperts, pack
from ..experts.sources import CheckpointExperts, Source, read_expert
from ..split import Split
from ..synth import Recipe, write
from .experts import COLD, expert_bytes
from .timing import bandwidth, record, seconds, thread_counts

RANKS = (1, 4)
PREFIX = "layers.0."


@contextmanager
def _sources(config: ModelConfig) -> Iterator[dict[str, Source]]:
    """One layer's experts, more than any cache holds, in a checkpoint and packed: as rank 0 of 1 and of 4 reads them."""
    small = replace(config, vocab_size=1024, num_hash_layers=0, bos_token_id=0, eos_token_ids=(0,), dspark=None)
    count = max(config.num_experts_per_tok, ceil(COLD / expert_bytes(config)))
    recipe = Recipe.of(small, layers=1, ratios=(0,), experts=count)
    with tempfile.TemporaryDirectory() as folder:
        directory, found = Path(folder), {}
        write(directory / "model", recipe)
        with Checkpoint(directory / "model") as checkpoint:
            for ranks in (n for n in RANKS if config.moe_slices % n == 0):
                split = Split.of(recipe.config, 0, ranks)
                experts = CheckpointExperts(checkpoint, recipe.config, (), split)
                path = directory / f"{ranks}.bin"
                pack(directory / "model", path, ranks)
                found[f"staging, checkpoint, {ranks} rank(s)"] = experts
                found[f"staging, packed, {ranks} rank(s)"] = PackedExperts(path, experts, checkpoint.identity, split)
            yield found


def staging(
    config: ModelConfig, threads: Sequence[int] | None = None, repeats: int = 31, progress: Callable | None = None
) -> list[dict]:
    """One expert after another into a staging buffer, as the store reads them."""
    found = []
    with _sources(config) as sources:
        counts = thread_counts(threads)
        for number, n in enumerate(counts):
            speed = bandwidth(n)
            for name, source in sources.items():
                buffer, experts = np.empty(source.layout.nbytes, np.uint8), source.banks[PREFIX]

                def run(i: int) -> None:
                    read_expert(source, PREFIX, i % experts, buffer, n)  # noqa: B023

                size = source.layout.nbytes
                found.append(record(name, n, 1, seconds(run, repeats), size, speed, experts=1))
            if progress:
                progress("measure", number + 1, len(counts))
    return found
