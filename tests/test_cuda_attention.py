"""cuda/keys.cu and cuda/attention.cu, run on the CPU: rotation, stored keys, sparse attention."""

from dataclasses import replace

import numpy as np
import ops_cases as make
import pytest
from compare import rel_l2, same_bits
from emulated_rows import OTHERS, PLAIN, EmulatedRows, same_otherwise, same_rows
from emulation.launcher import FORWARD, REVERSE, EmulationError
from test_ops_backends import mistakes

from dsv4 import formats
from dsv4.errors import InputError
from dsv4.ops import kernels
from dsv4.ops.reference import ReferenceOps

REFERENCE = ReferenceOps()

CASES = [
    *(make.rotation(t, *shape) for t in (1, 130) for shape in ((1, 64, 64), (3, 96, 64), (8, 512, 64), (3, 30, 6))),
    *(make.keys(t, *shape) for t in (1, 130) for shape in ((128, 64), (512, 64), (72, 8), (77, 13))),
    *(make.store_keys(t, *shape) for t in (1, 130) for shape in ((128, 64), (192, 64), (512, 64))),
    *(make.attend(t, *shape, 1) for t in (1, 33) for shape in (
        (1, 128, 64, (40,)), (4, 128, 64, (16, 20)), (3, 128, 64, (1, 5)), (5, 102, 16, (70,)), (17, 72, 8, (33,)))),
    make.attend(130, 4, 128, 64, (20, 30), 1),
    make.attend(6, 4, 128, 64, (30, 65), 500),  # scores that overflow e^s
    make.attend(1, 64, 512, 64, (40, 33), 1), make.attend(6, 8, 512, 64, (40, 23), 1),
]  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def i32(values):
    return np.array(values, np.int32)


@each_case
def test_the_formula(case, cuda):
    close = replace(case, limit=case.limit and 1e-5)
    assert not mistakes(close, case(cuda), case(REFERENCE))


@each_case
def test_a_row_alone_has_the_same_bits(case, cuda):
    same_rows(case, cuda)


@pytest.mark.emulated
@each_case
def test_order_of_threads_and_addresses_do_not_show(case):
    same_otherwise(case)


@pytest.mark.emulated
@pytest.mark.parametrize("case", [make.rotation(130, 2, 40, 8), make.keys(130, 128, 64), make.attend(130, 2, 96, 32, (9, 25), 1)],
                         ids=lambda case: case.name)  # fmt: skip
def test_any_number_of_rows(case):
    same_rows(case, counts=[*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129])
    every = case(PLAIN)
    for row in range(case.rows):
        for name, found in case(PLAIN, slice(row, row + 1)).items():
            same_bits(found, every[name][row : row + 1], f"{name}, row {row}")


# ---------------------------------------------------------------------- keys
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_value_spoils_its_block_only(value, cuda):
    k = make.normal(make.seeded("broken"), 2, 192)
    caches = [cuda.key_cache(2, 192, 64) for _ in range(2)]
    cuda.encode_keys(k, caches[0], i32([0, 1]))
    k[1, 70] = value
    cuda.encode_keys(k, caches[1], i32([0, 1]))
    good, bad = (cuda.decode_keys(cache, i32([0, 1])) for cache in caches)
    assert np.isnan(bad[1, 64:128]).all()
    bad[1, 64:128] = good[1, 64:128]
    same_bits(bad, good)


def test_every_rounding_of_keys(cuda):
    codes = formats.E4M3[np.isfinite(formats.E4M3)]
    values = np.unique(codes)
    x = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    x = np.clip(np.pad(x, (0, -len(x) % 63)), -448, 448).reshape(-1, 63)
    x = np.concatenate([np.full((len(x), 1), 448, np.float32), x], axis=1)
    k = np.concatenate([x * np.float32(2.0**e) for e in (-22, 0, 100)])
    k = np.concatenate([k, np.nextafter(k, np.float32(0))], axis=1)
    found, expected = cuda.key_cache(len(k), 128, 64), REFERENCE.key_cache(len(k), 128, 64)
    for ops, cache in ((cuda, found), (REFERENCE, expected)):
        ops.encode_keys(k, cache, np.arange(len(k), dtype=np.int32))
    for a, b in zip(found, expected):
        same_bits(a, b)


def test_only_the_places_named_are_written(cuda):
    cache = cuda.key_cache(7, 128, 64)
    cuda.encode_keys(np.ones((3, 128), np.float32), cache, i32([5, 0, 2]))
    for array in cache:
        assert np.flatnonzero(array.any(axis=1)).tolist() == [0, 2, 5]


# ---------------------------------------------------------------------- attention
def scene(heads=4, dim=128, n=90, t=3, name="scene"):
    """Queries, sink and a cache of n keys."""
    rng = make.seeded(name)
    cache = PLAIN.key_cache(n, dim, 64)
    PLAIN.encode_keys(make.normal(rng, n, dim), cache, np.arange(n, dtype=np.int32))
    return rng, make.normal(rng, t, heads, dim), make.normal(rng, heads), cache


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 70])
def test_absent_places_and_parts_change_no_bits(count, cuda):
    """The same keys in the same order, cut into parts in another way and with absent places strewn in."""
    rng, q, sink, cache = scene()
    places = rng.integers(0, 90, (3, count)).astype(np.int32)
    whole = cuda.attend(q, sink, [(cache, places)])
    assert rel_l2(whole, REFERENCE.attend(q, sink, [(cache, places)])) <= 1e-5
    for width in (count, count + 1, count + 300):
        strewn = np.full((3, width), -1, np.int32)
        for row, keys in zip(strewn, places):
            row[np.sort(rng.choice(width, count, replace=False))] = keys
        for cut in (0, 1, width // 2, width):
            parts = [(cache, np.ascontiguousarray(part)) for part in (strewn[:, :cut], strewn[:, cut:])]
            same_bits(cuda.attend(q, sink, parts), whole, f"width {width}, cut at {cut}")


@pytest.mark.emulated
@pytest.mark.parametrize("heads, dim", [(4, 128), (1, 128), (33, 512)])
def test_one_block_or_one_for_every_tile(heads, dim, monkeypatch):
    """How a row's tiles are cut over blocks, and its rows over launches, is not in the bits."""
    rng, q, sink, cache = scene(heads, dim)
    places = [(cache, rng.integers(-1, 90, (3, n)).astype(np.int32)) for n in (70, 40)]
    expected = PLAIN.attend(q, sink, places)
    monkeypatch.setattr("dsv4.ops.cuda_rows.BLOCKS", 0)
    launches = PLAIN.launcher.launches
    same_bits(PLAIN.attend(q, sink, places), expected)
    assert PLAIN.launcher.launches == launches + 2
    monkeypatch.setattr("dsv4.ops.cuda_rows.BLOCKS", 10**6)
    monkeypatch.setattr("dsv4.ops.cuda_rows.SCRATCH", 1)
    same_bits(PLAIN.attend(q, sink, places), expected)
    assert PLAIN.launcher.launches == launches + 2 + 3 * 3


def test_no_keys_and_no_rows(cuda):
    _, q, sink, cache = scene()
    for parts in ([(cache, np.full((3, 40), -1, np.int32))], [(cache, np.empty((3, 0), np.int32))] * 2):
        assert not cuda.attend(q, sink, parts).any()
    assert cuda.attend(q[:0], sink, [(cache, np.empty((0, 9), np.int32))]).shape == (0, 4, 128)
    rope = cuda.rope_angles(i32([]), np.ones(32, np.float32))
    assert rope.cos.shape == (0, 32) and cuda.query(q[:0], rope, 1e-6).shape == cuda.rotate(q[:0], rope).shape == (0, 4, 128)
    cuda.encode_keys(q[:0, 0], cache, i32([]))
    cuda.store_keys(q[:0, 0], np.ones(128, np.float32), rope, cache, i32([]), 1e-6)
    assert cuda.decode_keys(cache, i32([])).shape == (0, 128)


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e4, 1e18])
def test_queries_of_any_size(size, cuda):
    """Scores of any size; with the largest one key takes it all."""
    rng, q, sink, cache = scene(name="sizes")
    q = (q * np.array([1, -1, 3], np.float32)[:, None, None] * np.float32(size)).astype(np.float32)
    places = [(cache, rng.integers(-1, 90, (3, 70)).astype(np.int32))]
    assert rel_l2(cuda.attend(q, sink, places), REFERENCE.attend(q, sink, places)) <= 1e-5


@pytest.mark.parametrize("spread", [8, 30])
def test_keys_whose_parts_differ_in_size(spread, cuda):
    """Blocks of 64 and the rotated dims of other sizes, within a key and between keys."""
    rng, q, sink, _ = scene(name="spread")
    k = make.normal(rng, 50, 3, 64) * np.ldexp(np.float32(1), rng.integers(-spread, 3, (50, 3, 1)))
    cache, q = cuda.key_cache(50, 192, 64), make.normal(rng, 3, 4, 192)
    cuda.encode_keys(k.reshape(50, 192).astype(np.float32), cache, np.arange(50, dtype=np.int32))
    places = [(cache, rng.integers(0, 50, (3, 45)).astype(np.int32))]
    assert rel_l2(cuda.attend(q, sink, places), REFERENCE.attend(q, sink, places)) <= 1e-5


@pytest.mark.parametrize("broken", ["query", "codes", "rope"])
def test_nan_shows_in_its_row_only(broken, cuda):
    _, q, sink, cache = scene(name="nan")
    places = np.stack([np.arange(40), np.arange(40, 80), np.arange(80)[::2]]).astype(np.int32)
    expected = cuda.attend(q, sink, [(cache, places)])
    if broken == "query":
        q[1, 2, 3] = np.nan
    k = cuda.decode_keys(cache, i32([50]))
    k[0, 5 if broken == "codes" else 70] = np.inf
    if broken != "query":
        cuda.encode_keys(k, cache, i32([50]))
    found = cuda.attend(q, sink, [(cache, places)])
    heads = [2] if broken == "query" else [0, 1, 2, 3]
    assert np.isnan(found[1, heads]).all()
    same_bits(found[0], expected[0])


@pytest.mark.emulated
def test_caches_of_different_addresses():
    """Parts from two caches, of which one takes wide loads and the other cannot."""
    rng, q, sink, cache = scene(n=64)
    narrow = type(cache)(*(OTHERS["misaligned"].moved(a) for a in cache))
    places = [rng.integers(-1, 64, (3, n)).astype(np.int32) for n in (33, 40)]
    expected = PLAIN.attend(q, sink, [(cache, p) for p in places])
    same_bits(PLAIN.attend(q, sink, [(narrow, places[0]), (cache, places[1])]), expected)
    same_bits(PLAIN.attend(q, sink, [(cache, places[0]), (narrow, places[1])]), expected)


WRONG = {
    "three parts": lambda q, s, c: PLAIN.attend(q, s, [(c, np.zeros((3, 1), np.int32))] * 3),
    "keys of another size": lambda q, s, c: PLAIN.attend(q, s, [(PLAIN.key_cache(4, 192, 64), np.zeros((3, 1), np.int32))]),
    "places of other rows": lambda q, s, c: PLAIN.attend(q, s, [(c, np.zeros((2, 1), np.int32))]),
    "angles of other rows": lambda q, s, c: PLAIN.rotate(q, PLAIN.rope_angles(i32([1]), np.ones(32, np.float32))),
    "too many angles": lambda q, s, c: PLAIN.query(q, PLAIN.rope_angles(i32([1] * 3), np.ones(65, np.float32)), 1e-6),
    "too few places": lambda q, s, c: PLAIN.encode_keys(np.ascontiguousarray(q[:, 0]), c, i32([0])),
}  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_wrong_arrays_are_refused(call):
    _, q, sink, cache = scene()
    with pytest.raises(InputError, match="expected .* found"):
        call(q, sink, cache)


# ---------------------------------------------------------------------- these tests can fail
PLANTED = {  # file, what is broken → how
    "no barrier after the scores": ("attention.cu", "score_tile(s, count, scale);\n        __syncthreads();", "score_tile(s, count, scale);"),
    "no barrier before the next tile": ("attention.cu", "        }\n        __syncthreads();\n    }", "        }\n    }"),
    "counts of one warp": ("attention.cu", "if (w < warp) before += warps[w];", ""),
}


class Broken(EmulatedRows):
    """A backend on whose kernels something was changed."""

    def __init__(self, file: str, old: str, new: str):
        super().__init__()
        plain = self.launcher.compile

        def compile(source, defines=None):
            if source != file:
                return plain(source, defines)
            text = kernels.inline(file)
            assert old in text
            return self.launcher.compile_text(kernels.define_lines(defines) + text.replace(old, new))

        self.launcher.compile = compile


@pytest.mark.emulated
@pytest.mark.parametrize("change", PLANTED.values(), ids=PLANTED.keys())
def test_planted_mistakes_are_caught(change, monkeypatch):
    monkeypatch.setattr("dsv4.ops.cuda_rows.BLOCKS", 0)  # one block goes through all tiles of a row
    case, ops = make.attend(6, 4, 128, 64, (40, 65), 1), Broken(*change)
    wrong = 0
    for ops.launcher.order in (FORWARD, REVERSE):  # what a missing barrier spoils depends on who runs first
        try:
            wrong += bool(mistakes(replace(case, limit=1e-5), case(ops), case(REFERENCE)))
        except EmulationError:
            wrong += 1
    assert wrong
