"""Reading memory and multiplying bytes at full speed, with the kernels' threads: what measurements are compared with."""

from __future__ import annotations

from .. import _cpu

read_all = _cpu.read_all
multiply_bytes = _cpu.multiply_bytes
