"""The CUDA backend's attention side: rotation, stored keys, sparse attention, compressor and indexer.

Each method launches kernels of cuda/keys.cu, attention.cu, compressor.cu and indexer.cu; what they compute is said in
Ops. Places are worked out by the index functions of cuda_places.py. How work is cut over blocks depends on the number of
rows and on the card's size; no bit of a row does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..config import pooled_blocks
from ..errors import InputError
from . import IndexCache, KeyCache, Ring, Rope
from .cuda_base import Array, ceil
from .cuda_places import PlacesMixin

THREADS = 256  # of a block where each thread works by itself
WARPS = 4  # of a block where each warp does
TILE = 32  # keys that attention takes at a time
BLOCKS = 128  # that fill a card; with fewer, attention takes the tiles of a row side by side
SCRATCH = 1 << 24  # floats of scratch memory that a launch may ask for
SCORED = 128  # entries that a block of index_scores takes at a time

i32, f32 = np.int32, np.float32


def blocks_for(n: int, each: int) -> tuple[int]:
    """A grid of blocks that take `each` of n."""
    return (ceil(n, each),)


class RowsMixin(PlacesMixin):
    """Ops that CudaOps inherits."""

    # ------------------------------------------------------------------ rotation
    def rope_angles(self, positions: Array, theta: Array) -> Rope:
        n, pairs = len(positions), len(theta)
        rope = Rope(self.empty((n, pairs)), self.empty((n, pairs)))
        grid = blocks_for(n * pairs, THREADS)
        self.run("keys.cu", "rope_angles", grid, (THREADS,), positions, theta, *rope, i32(n), i32(pairs))
        return rope

    def rotate(self, x: Array, rope: Rope, inverse: bool = False) -> Array:
        (t, heads, dim), pairs = x.shape, self._pairs(x, rope)
        sizes = i32(t), i32(heads), i32(dim), i32(pairs)
        grid = blocks_for(t * heads * pairs, THREADS)
        self.run("keys.cu", "rotate", grid, (THREADS,), x, *rope, *sizes, f32(-1 if inverse else 1))
        return x

    def query(self, q: Array, rope: Rope, eps: float) -> Array:
        (t, heads, dim), pairs = q.shape, self._pairs(q, rope)
        sizes = i32(t), i32(heads), i32(dim), i32(pairs)
        self.run("keys.cu", "query", blocks_for(t * heads, WARPS), (32 * WARPS,), q, *rope, *sizes, f32(eps))
        return q

    def _pairs(self, x: Array, rope: Rope) -> int:
        rows, pairs = rope.cos.shape
        if rows != len(x) or 2 * pairs > x.shape[-1]:
            raise InputError(f"rope: expected angles of {len(x)} rows and at most {x.shape[-1] // 2} pairs, found {rows} and {pairs}")
        return pairs

    # ------------------------------------------------------------------ stored keys
    def encode_keys(self, k: Array, cache: KeyCache, where: Array) -> None:
        n, dim, rope_dim = self._key_sizes(cache, k, where)
        grid, block = blocks_for(n, WARPS), (32 * WARPS,)
        self.run("keys.cu", "encode_keys", grid, block, k, where, *cache, i32(n), i32(dim), i32(rope_dim))

    def store_keys(self, kv: Array, norm: Array, rope: Rope, cache: KeyCache, where: Array, eps: float) -> None:
        n, dim, rope_dim = self._key_sizes(cache, kv, where)
        sizes = i32(n), i32(dim), i32(rope_dim), i32(self._pairs(kv, rope))
        grid, block = blocks_for(n, WARPS), (32 * WARPS,)
        self.run("keys.cu", "store_keys", grid, block, kv, norm, *rope, where, *cache, *sizes, f32(eps))

    def decode_keys(self, cache: KeyCache, where: Array) -> Array:
        n, dim, rope_dim = len(where), cache.codes.shape[1] + cache.rope.shape[1], cache.rope.shape[1]
        out = self.empty((n, dim))
        grid = blocks_for(n * dim, THREADS)
        self.run("keys.cu", "decode_keys", grid, (THREADS,), *cache, where, out, i32(n), i32(dim), i32(rope_dim))
        return out

    def _key_sizes(self, cache: KeyCache, k: Array, where: Array) -> tuple[int, int, int]:
        """(keys, their dims, the rotated ones of these)."""
        rope_dim = cache.rope.shape[1]
        expected = (len(where), cache.codes.shape[1] + rope_dim)
        if k.shape != expected:
            raise InputError(f"keys: expected {expected} as the places and the cache say, found {k.shape}")
        return *expected, rope_dim

    # ------------------------------------------------------------------ attention
    def attend(self, q: Array, sink: Array, parts: list[tuple[KeyCache, Array]]) -> Array:
        (t, heads, dim), out = q.shape, self.empty(q.shape)
        groups = self._attend_groups(q, parts)
        (cache0, places0), (cache1, places1) = parts[0], parts[-1]
        n0, n1 = places0.shape[1], places1.shape[1] if len(parts) == 2 else 0
        blocks, tiles = ceil(heads, 16), ceil(n0 + n1, TILE)
        aside = t * blocks < BLOCKS and tiles > 1  # tiles side by side, or one after the other
        need = blocks * groups * 1024 + (tiles * heads * dim if aside else 0)
        some = max(1, min(SCRATCH // need, 65535))
        for start in range(0, t, some):
            rows = slice(start, min(start + some, t))
            lists = self._attend_prepare(q[rows], (places0[rows], i32(n0), places1[rows], i32(n1)), groups, dim - cache0.codes.shape[1])
            caches = (*cache0, *cache1)
            sizes = i32(heads), i32(dim), i32(cache0.rope.shape[1]), i32(n0 + n1), f32(1 / math.sqrt(dim))
            if aside:
                self._attend_tiles(out[rows], sink, lists, caches, sizes, groups, tiles)
            else:
                grid, how = (len(out[rows]), blocks), self._attend_how(groups)
                self.run("attention.cu", "attend_rows", grid, (128,), *lists, *caches, sink, out[rows], *sizes, **how)
            del lists  # before there are the next
        return out

    def _attend_groups(self, q: Array, parts: list[tuple[KeyCache, Array]]) -> int:
        """Groups of 64 dims: as many as a key has scales, and one of rotated dims."""
        if not 1 <= len(parts) <= 2:
            raise InputError(f"attend: expected one or two parts, found {len(parts)}")
        t, _, dim = q.shape
        for cache, places in parts:
            plain, rope_dim = cache.codes.shape[1], cache.rope.shape[1]
            if plain + rope_dim != dim or len(places) != t:
                raise InputError(f"attend: expected keys of {dim} dims and places of {t} rows, found {plain + rope_dim} and {len(places)}")
            if rope_dim > 64 or plain > 448:
                raise InputError(f"attend: expected keys of at most 448 plain and 64 rotated dims, found {plain} and {rope_dim}")
        return ceil(plain, 64) + 1

    @staticmethod
    def _attend_how(groups: int) -> dict[str, Any]:
        """The shared memory of a block (SHARED_BYTES in attention.cu) and its macros."""
        floats = groups * 16 + groups * TILE + 16 * 40 + 96
        return {"shared": groups * 4096 + 4 * floats + TILE * (64 * (groups - 1) + 16 + 144), "defines": {"GROUPS": groups}}

    def _attend_prepare(self, q: Array, places: tuple, groups: int, rope_dim: int) -> tuple[Array, ...]:
        """(keys that each row sees, their numbers, its queries as fragments, the scales of these)."""
        t, heads, dim = q.shape
        blocks, width = ceil(heads, 16), int(places[1] + places[3])
        listed, counts = self.empty((t, width), i32), self.empty((t, 2), i32)
        fragments, scales = self.empty((t, blocks, groups * 1024), np.uint32), self.empty((t, blocks, groups, 16))
        self.run("attention.cu", "attend_prepare", (t, 1 + blocks), (THREADS,), q, *places, listed, counts, fragments, scales,
                 i32(heads), i32(dim), i32(rope_dim), defines={"GROUPS": groups})  # fmt: skip
        return listed, counts, fragments, scales

    def _attend_tiles(self, out: Array, sink: Array, lists: tuple, caches: tuple, sizes: tuple, groups: int, tiles: int) -> None:
        """A block for every tile, and one that joins them."""
        t, heads, dim = out.shape
        seen, part = self.empty((t, heads, tiles, 2)), self.empty((t, heads, tiles, dim))
        grid, how = (tiles, ceil(heads, 16), t), self._attend_how(groups)
        self.run("attention.cu", "attend_tiles", grid, (128,), *lists, *caches, seen, part, *sizes, **how)
        self.run("attention.cu", "attend_merge", (t * heads,), (128,), seen, part, sink, lists[1], out,
                 i32(heads), i32(dim), i32(tiles), defines=how["defines"])  # fmt: skip

    # ------------------------------------------------------------------ compressor
    def compress_store(self, kv: Array, gate: Array, ape: Array, positions: Array, ring: Ring, where: Array) -> None:
        (t, width), ratio = kv.shape, len(ape)
        if ape.shape[1] != width or ring.kv.shape[1] != width:
            raise InputError(f"compressor: expected rows of {width}, found {ape.shape[1]} in ape, {ring.kv.shape[1]} in the ring")
        self.run("compressor.cu", "compress_store", blocks_for(t * width, THREADS), (THREADS,),
                 kv, gate, ape, positions, where, *ring, i32(t), i32(width), i32(ratio))  # fmt: skip

    def compress_pool(self, ring: Ring, slots: Array, entries: Array, ratio: int, capacity: int) -> Array:
        n, dim = len(entries), ring.kv.shape[1] // pooled_blocks(ratio)
        out = self.empty((n, dim))
        self.run("compressor.cu", "compress_pool", blocks_for(n * dim, THREADS), (THREADS,),
                 *ring, slots, entries, out, i32(n), i32(dim), i32(ratio), i32(capacity))  # fmt: skip
        return out

    # ------------------------------------------------------------------ indexer
    def index_query(self, q: Array, rope: Rope) -> Array:
        (t, heads, dim), pairs = q.shape, self._pairs(q, rope)
        groups, out = self._groups(dim), self.empty(q.shape)
        sizes = np.int64(t * heads), i32(heads), i32(pairs), np.float64(dim**-0.5)
        grid = blocks_for(t * heads, WARPS)
        self.run("indexer.cu", "index_query", grid, (32 * WARPS,), q, *rope, out, *sizes, defines=groups)
        return out

    def encode_index(self, k: Array, cache: IndexCache, where: Array) -> None:
        n, dim = k.shape
        if dim != 2 * cache.codes.shape[1] or len(where) != n:
            raise InputError(f"index keys: expected {len(where)} of {2 * cache.codes.shape[1]} dims, found {n} of {dim}")
        grid, block = blocks_for(n, WARPS), (32 * WARPS,)
        self.run("indexer.cu", "encode_index", grid, block, k, where, *cache, i32(n), np.float64(dim**-0.5),
                 defines=self._groups(dim))  # fmt: skip

    def decode_index(self, cache: IndexCache, where: Array) -> Array:
        n, dim = len(where), 2 * cache.codes.shape[1]
        out = self.empty((n, dim))
        grid = blocks_for(n * dim, THREADS)
        self.run("indexer.cu", "decode_index", grid, (THREADS,), *cache, where, out, i32(n), defines=self._groups(dim))
        return out

    @staticmethod
    def _groups(dim: int) -> dict[str, int]:
        if dim not in (32, 64, 128):
            raise InputError(f"indexer: expected a head size of 32, 64 or 128, found {dim}")
        return {"GROUPS": dim // 32}

    def index_select(
        self, q: Array, w: Array, cache: IndexCache, slots: Array, visible: Array, pages: Array, page_entries: int, k: int
    ) -> Array:
        """As in Ops. That no row sees more entries than its pages hold is the caller's business."""
        (t, heads, dim), most = q.shape, pages.shape[1] * page_entries
        if dim != 2 * cache.codes.shape[1]:
            raise InputError(f"indexer: expected queries of {2 * cache.codes.shape[1]} dims, found {dim}")
        groups, chosen = self._groups(dim), self.empty((t, k), i32)
        tiles = ceil(heads, 16)
        shared = tiles * (groups["GROUPS"] * (1024 + 64) + 64)
        some = max(1, min(SCRATCH // max(most, 1), 65535))
        for start in range(0, t, some):
            rows = slice(start, min(start + some, t))
            n = rows.stop - start
            scores = self.empty((n, most))
            grid = (min(ceil(most, SCORED), max(1, 4 * BLOCKS // n)), n)
            self.run("indexer.cu", "index_scores", grid, (128,), q[rows], w[rows], *cache, slots[rows], visible[rows], pages, scores,
                     i32(heads), i32(pages.shape[1]), i32(page_entries), i32(k), np.int64(most), f32((dim * heads) ** -0.5),
                     shared=shared, defines=groups)  # fmt: skip
            self.run("indexer.cu", "index_choose", (n,), (256 if most <= 4096 else 1024,), scores, visible[rows], chosen[rows],
                     i32(k), np.int64(most), defines=groups)  # fmt: skip
            del scores  # before there are the next
        return chosen
