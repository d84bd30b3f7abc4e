"""The CUDA backend's norms, hyper-connections, activation quantiser and embedding: cuda/norm.cu and cuda/formats.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BackendError
from . import Mix
from .cuda_base import Array, CudaBase, ceil

_THREADS = 256
_HC_CHUNK = 1024
_MAX_STREAMS = 16
_i32, _f32 = np.int32, np.float32


class NormMixin(CudaBase):
    """Ops of this family; what they compute is said in Ops."""

    def embed(self, table: Array, tokens: Array, streams: int) -> Array:
        out = self.empty((len(tokens), streams, table.shape[1]))
        d = table.shape[1]
        self.run("formats.cu", "embed", (ceil(d, 256), len(tokens)), (256,), table, tokens, out, _i32(d), _i32(streams))
        return out

    def act_quant(self, x: Array) -> Array:
        t, k = x.shape
        y = self.empty(x.shape)
        self.run("formats.cu", "act_quant", (ceil(ceil(k, 128), 8), t), (256,), x, y, _i32(k))
        return y

    def has_nonfinite(self, x: Array) -> bool:
        found = self.launcher.zeros(1, np.int32)
        self.run("formats.cu", "find_nonfinite", (ceil(x.size, 1024),), (256,), x, found, np.int64(x.size))
        return bool(self.launcher.download(found)[0])

    def rmsnorm(self, x: Array, w: Array, eps: float) -> Array:
        y = self.empty(x.shape)
        k = x.shape[-1]
        self.run("norm.cu", "rmsnorm", (x.size // k,), (_THREADS,), x, w, y, _i32(k), _f32(eps))
        return y

    # ------------------------------------------------------------------ hyper-connections
    def hc_pre(self, h: Array, hc: Any) -> tuple[Array, Mix]:
        return self._hc(h, hc, None, 0.0)

    def hc_pre_norm(self, h: Array, hc: Any, norm: Array, eps: float) -> tuple[Array, Mix]:
        return self._hc(h, hc, norm, eps)

    def _hc(self, h: Array, hc: Any, norm: Array | None, eps: float) -> tuple[Array, Mix]:
        t, m, _ = h.shape
        mix = Mix(self.empty((t, m)), self.empty((t, m, m)))
        return self._combine(h, hc, mix, norm, eps), mix

    def hc_head(self, h: Array, hc: Any) -> Array:
        return self._combine(h, hc, Mix(None, None), None, 0.0)

    def _combine(self, h: Array, hc: Any, mix: Mix, norm: Array | None, eps: float) -> Array:
        """u of hc_pre, normed where there is a norm; mix is filled where it has arrays."""
        t, m, d = h.shape
        if m > _MAX_STREAMS:
            raise BackendError(f"backend cuda: expected at most {_MAX_STREAMS} hyper-connection streams, found {m}")
        outputs, width = hc.fn.shape
        chunks = ceil(width, _HC_CHUNK)
        partial, u = self.empty((t, chunks, outputs + 1)), self.empty((t, d))
        fn = hc.fn.weight
        self.run("norm.cu", "hc_mixes", (chunks, t), (_THREADS,), h, fn, partial, _i32(width), _i32(outputs))
        sizes = map(_i32, (chunks, outputs, m, d, hc.iterations))
        self.run(
            "norm.cu", "hc_combine", (t,), (_THREADS,), partial, hc.base, hc.scale, h, mix.post, mix.comb, norm, u,
            *sizes, _f32(hc.eps), _f32(hc.norm_eps), _f32(eps),
        )  # fmt: skip
        return u

    def hc_post(self, y: Array, h: Array, mix: Mix) -> Array:
        t, m, d = h.shape
        out = self.empty(h.shape)
        grid = (ceil(d, _THREADS), t)
        self.run("norm.cu", "hc_post", grid, (_THREADS,), y, h, mix.post, mix.comb, out, _i32(m), _i32(d))
        return out

    def mean_streams(self, h: Array) -> Array:
        t, m, d = h.shape
        y = self.empty((t, d))
        self.run("norm.cu", "mean_streams", (ceil(d, _THREADS), t), (_THREADS,), h, y, _i32(m), _i32(d))
        return y
