"""Ranks: what the processes other than rank 0 run, where a program does not load an engine in all of them itself."""

from __future__ import annotations

from pathlib import Path

from .comm import open_communicator
from .config import World
from .crew import Crew
from .engine import Engine
from .errors import ConfigError


def serve(path: str | Path | None = None, **settings) -> None:
    """On ranks other than 0: load what rank 0 loads and repeat what its engine does, until that engine is closed.

    path, settings: as for Engine.load; by default rank 0's. They may name another directory that holds the same
    checkpoint. On rank 0, which calls Engine.load, it ends the job, or raises ConfigError where there is no other rank.
    """
    world = World.from_env()
    if world.rank == 0:
        with Crew(open_communicator(world)).together():  # only once the ranks have met can the job end well
            raise ConfigError(f"serve: expected a rank other than 0, found rank 0 of {world.size}; call Engine.load there")
    engine = Engine.join(path, **settings)
    engine.crew.follow(engine)
