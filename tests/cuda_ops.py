"""The CUDA backend for tests: on the CPU or on a GPU, with NumPy arrays going in and coming out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from emulation.arrays import DeviceArray
from emulation.launcher import EmulatedLauncher

from dsv4.errors import BackendError
from dsv4.parameters import HyperConnection

# For a test that asks for the fixture device_ops, or for one made of it, and means nothing on a GPU.
only_emulated = pytest.mark.parametrize("device_ops", [pytest.param("emulated", marks=pytest.mark.emulated)], indirect=True)


def emulated(**settings):
    """CudaOps on an emulated device; settings: EmulatedLauncher's."""
    from dsv4.ops.cuda import CudaOps

    return CudaOps(EmulatedLauncher(**settings))


def on_device():
    """CudaOps on a GPU. Skips the test, with the reason, where there is none."""
    from dsv4.ops.cuda import CudaOps
    from dsv4.ops.kernels import DeviceLauncher

    try:
        return CudaOps(DeviceLauncher())
    except BackendError as error:
        pytest.skip(str(error))


def host_ops(ops):
    """Ops for NumPy arrays over these."""
    return HostOps(ops) if ops.launcher.name == "emulated" else CopyingOps(ops)


def launch(launcher, kernel, grid, block, args, shared=0) -> None:
    """Run a kernel on NumPy arrays: copied to the launcher's memory, and back, so that they hold what it wrote."""
    there = [launcher.upload(a) if isinstance(a, np.ndarray) else a for a in args]
    kernel(grid, block, tuple(there), shared=shared)
    for host, array in zip(args, there):
        if isinstance(host, np.ndarray):
            host[...] = launcher.download(array)


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
            there = [self._in(a) for a in args]
            out = method(*there, **{k: self._in(a) for k, a in kwargs.items()})
            self._after(name, args, there)
            return self._out(out)

        return call

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x

    def _in(self, value):
        if isinstance(value, np.ndarray):
            return DeviceArray(value if value.flags.c_contiguous else np.ascontiguousarray(value), self.ops.launcher)
        if isinstance(value, HyperConnection):
            return dataclasses.replace(value, base=self._in(value.base), scale=self._in(value.scale))
        return _each(value, self._in)

    def _after(self, name: str, args: tuple, there: list) -> None:
        """Nothing: `there` is the memory of `args`."""

    def _out(self, value):
        return value.host if isinstance(value, DeviceArray) else _each(value, self._out)


class CopyingOps(HostOps):
    """The same where a device's memory is its own: arrays are copied there, and back from ops that work in place."""

    IN_PLACE = {"rotate", "query", "encode_keys", "store_keys", "compress_store", "encode_index", "moe_add"}

    def _in(self, value):
        if isinstance(value, np.ndarray):
            return self.ops.launcher.upload(value)
        return super()._in(value)

    def _after(self, name: str, args: tuple, there: list) -> None:
        if name in self.IN_PLACE:
            for host, array in zip(args, there):
                self._back(host, array)

    def _back(self, host, array) -> None:
        if isinstance(host, np.ndarray):
            host[...] = self.ops.launcher.download(array)
        elif isinstance(host, tuple):
            for part, other in zip(host, array):
                self._back(part, other)

    def _out(self, value):
        if hasattr(value, "dtype") and not isinstance(value, (np.ndarray, np.generic)):
            return self.ops.launcher.download(value)
        return _each(value, self._out)


def _each(value, function):
    """The parts of a tuple, named tuple or list of arrays, one by one; anything else as it is."""
    if isinstance(value, (list, tuple)):
        parts = [function(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
