"""dsv4: a standalone inference engine for DeepSeek-V4-Flash.

Importing the package imports no backend: `Engine` and friends are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import Dsv4Error

__version__ = "0.1.0"
__all__ = ["Dsv4Error", "Engine", "SamplingParams", "Snapshot", "__version__"]

if TYPE_CHECKING:
    from .engine import Engine
    from .sampling import SamplingParams
    from .snapshot import Snapshot

_LAZY = {"Engine": "engine", "SamplingParams": "sampling", "Snapshot": "snapshot"}


def __getattr__(name: str):
    from importlib import import_module

    if name == "chat":
        return import_module(".chat", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
