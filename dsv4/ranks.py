"""Ranks: what the processes other than rank 0 run, where a program does not load an engine in all of them itself."""

from __future__ import annotations

from pathlib import Path

from .engine import Engine


def serve(path: str | Path | None = None, **settings) -> None:
    """Load what rank 0 loads and repeat what its engine does, until that is closed.

    path, settings: as for Engine.load; by default rank 0's. They may name another directory that holds the same
    checkpoint. Raises SystemExit on rank 0 itself: that one calls Engine.load.
    """
    engine = Engine.join(path, **settings)
    engine.crew.follow(engine)
