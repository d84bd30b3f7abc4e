"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
import resource
import sys
import threading
from pathlib import Path

import numpy as np

from .. import __version__


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor as the system tells it: its name, which a virtual machine may cut short, and its generation."""
    lines = info.read_text().splitlines() if info.exists() else []
    first = {}
    for name, colon, value in (line.partition(":") for line in lines):
        first.setdefault(name.strip(), value.strip())
    name = first.get("model name") or platform.processor() or platform.machine()
    return f"{name}, family {first['cpu family']} model {first['model']}" if "cpu family" in first else name


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy() -> str | None:
    """A warning where, over the last minute, more threads wanted to run than the machine has cores; else None."""
    try:
        load, count = os.getloadavg()[0], os.cpu_count() or 1
    except OSError:  # not known here
        return None
    if load <= count:
        return None
    return f"this machine is busy (load average {load:.1f}, {count} cores): it can do better than these figures"


def _numbers(text: str) -> set[int]:
    """The kernel's list notation, 0-3,8, as numbers."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def placement(root: Path = Path("/sys/devices/system/node")) -> dict:
    """Memory nodes and where this process may run: {"nodes": n, "affinity": {node: cores of it that are allowed}}.

    Nodes none of whose cores are allowed are left out of affinity. Where the system does not tell: one node, 0.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(cores()))
    nodes = {int(p.name[4:]): _numbers((p / "cpulist").read_text()) for p in root.glob("node[0-9]*")} or {0: allowed}
    return {"nodes": len(nodes), "affinity": {n: len(held & allowed) for n, held in sorted(nodes.items()) if held & allowed}}


def peak_memory() -> int:
    """The most memory this process ever held, bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def own_memory() -> int | None:
    """What this process holds now that is not mapped from files, bytes: weights that lie in a checkpoint do not count.

    None where the system does not tell.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    held = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return 1024 * int(held[0]) if held else None


class OwnPeak:
    """A block's largest own_memory(), by looking every 2 ms; `bytes` says it after the block."""

    bytes: int | None = None

    def __enter__(self) -> OwnPeak:
        self.bytes, self._ended = own_memory(), threading.Event()
        if self.bytes is not None:
            self._watch = threading.Thread(target=self._look, daemon=True)
            self._watch.start()
        return self

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self.bytes = max(self.bytes, own_memory())

    def __exit__(self, *exception) -> None:
        self._ended.set()
        if self.bytes is not None:
            self._watch.join()
            self.bytes = max(self.bytes, own_memory())


def describe() -> dict:
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        **placement(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "dsv4": __version__,
    }
