"""Reading memory at its full speed, with the threads that the kernels use: what measurements are compared with."""

from __future__ import annotations

from .. import _cpu

read_all = _cpu.read_all
