"""Arrays that stand for a device's: they behave like CuPy's where CuPy is strict, so that a mix-up shows without a device.

A device array is no NumPy array: NumPy functions refuse it (but for the few that CuPy takes over), arithmetic with a
host array is an error, and reading a value on the host is counted as a synchronisation.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

_TAKEN_OVER = {np.concatenate, np.repeat}


class DeviceArray:
    """An array of the emulated device. `host`: the NumPy array that holds it; only the launcher looks at that."""

    __slots__ = ("host", "launcher")
    __hash__ = None
    __array_ufunc__ = None

    def __init__(self, host: np.ndarray, launcher: Any):
        self.host, self.launcher = host, launcher
        if host.base is None:
            launcher.count(host)

    shape = property(lambda self: self.host.shape)
    dtype = property(lambda self: self.host.dtype)
    ndim = property(lambda self: self.host.ndim)
    size = property(lambda self: self.host.size)
    nbytes = property(lambda self: self.host.nbytes)
    strides = property(lambda self: self.host.strides)
    data = property(lambda self: SimpleNamespace(ptr=self.host.ctypes.data))
    flags = property(lambda self: _Flags(self.host.flags.c_contiguous))

    def __len__(self) -> int:
        return len(self.host)

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}, {self.shape})"

    def _new(self, host: np.ndarray) -> DeviceArray:
        return DeviceArray(np.asarray(host), self.launcher)

    def reshape(self, *shape) -> DeviceArray:
        return self._new(self.host.reshape(*shape))

    def view(self, dtype) -> DeviceArray:
        return self._new(self.host.view(dtype))

    def copy(self) -> DeviceArray:
        return self._new(self.host.copy())

    # ------------------------------------------------------------------ parts
    def __getitem__(self, key) -> DeviceArray:
        return self._new(self.host[_key(key)])

    def __setitem__(self, key, value) -> None:
        self.host[_key(key)] = _operand(value)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    # ------------------------------------------------------------------ arithmetic between device arrays
    def __add__(self, other) -> DeviceArray:
        return self._new(self.host + _operand(other))

    def __iadd__(self, other) -> DeviceArray:
        self.host += _operand(other)
        return self

    # ------------------------------------------------------------------ what waits for the device
    def __int__(self) -> int:
        return int(self._read())

    __index__ = __int__

    def __float__(self) -> float:
        return float(self._read())

    def __bool__(self) -> bool:
        return bool(self._read())

    def _read(self) -> np.ndarray:
        self.launcher.synchronisations += 1
        return self.host

    # ------------------------------------------------------------------ what is refused
    def __array__(self, *_, **__):
        raise TypeError("implicit conversion of a device array to a NumPy array: use ops.to_host")

    def __array_function__(self, function, types, args, kwargs):
        if function not in _TAKEN_OVER:
            raise TypeError(f"numpy.{function.__name__} on a device array: write a kernel, or use ops.to_host")
        args = [[_operand(a) for a in arg] if isinstance(arg, (list, tuple)) else _plain(arg) for arg in args]
        return self._new(function(*args, **kwargs))


class _Flags:
    def __init__(self, c_contiguous: bool):
        self.c_contiguous = c_contiguous


def _plain(value):
    return value.host if isinstance(value, DeviceArray) else value


def _operand(value):
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("a host array meets a device array: upload it (ops.table)")
    return _plain(value)


def _key(key):
    parts = key if isinstance(key, tuple) else (key,)
    if any(isinstance(part, (np.ndarray, list)) for part in parts):
        raise TypeError("a device array indexed by a host array: upload it (ops.table)")
    plain = tuple(_plain(part) for part in parts)
    return plain if isinstance(key, tuple) else plain[0]
