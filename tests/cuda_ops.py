"""The CUDA backend for tests: on the CPU, with NumPy arrays going in and coming out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from emulation.arrays import DeviceArray
from emulation.launcher import EmulatedLauncher

from dsv4.weights import HyperConnection


def emulated(**settings):
    """CudaOps on an emulated device; settings: EmulatedLauncher's."""
    from dsv4.ops.cuda import CudaOps

    return CudaOps(EmulatedLauncher(**settings))


class HostOps:
    """Ops whose device arrays are seen as the NumPy arrays that hold them, so that tests of NumPy backends run as they are.

    Nothing is copied: an op that works in place changes the array it was given.
    """

    def __init__(self, ops):
        self.ops, self.name = ops, ops.name

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.ops, name)
        if not callable(method):
            return method

        def call(*args, **kwargs):
            args = [self._in(a) for a in args]
            return _out(method(*args, **{k: self._in(a) for k, a in kwargs.items()}))

        return call

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x

    def _in(self, value):
        if isinstance(value, np.ndarray):
            return DeviceArray(value if value.flags.c_contiguous else np.ascontiguousarray(value), self.ops.launcher)
        if isinstance(value, HyperConnection):
            return dataclasses.replace(value, base=self._in(value.base), scale=self._in(value.scale))
        return _each(value, self._in)


def _out(value):
    return value.host if isinstance(value, DeviceArray) else _each(value, _out)


def _each(value, function):
    """The parts of a tuple, named tuple or list of arrays, one by one; anything else as it is."""
    if isinstance(value, (list, tuple)):
        parts = [function(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
