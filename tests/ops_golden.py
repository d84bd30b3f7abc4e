"""Checks of the ops against golden/ops.safetensors: each takes (ops, golden tensors) and yields Comparisons."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from compare import rel_l2

from dsv4 import formats
from dsv4.config import Yarn
from dsv4.ops import KeyCache, Mix, Ring, Rope
from dsv4.parameters import HyperConnection
from dsv4.rope import rope_thetas

CLOSE = 1e-6  # rel_l2 of float results


class Comparison(NamedTuple):
    """error: rel_l2 of float results, the share of values that differ where results must be equal (limit 0)."""

    what: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.error <= self.limit  # false for NaN


def close(what, found, expected, limit=CLOSE) -> Comparison:
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    return Comparison(what, rel_l2(found, expected), limit)


def equal(what, found, expected) -> Comparison:
    """Equal values (of floats: −0 = 0)."""
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    return Comparison(what, float(np.mean(found != expected)), 0.0)


def stored(ops, g, name):
    """The FP8 or FP4 matrix `name` of the golden file."""
    weight, scale = g[name], g[f"{name}_scale"]
    fmt = "fp4" if 16 * scale.shape[1] == weight.shape[1] else "fp8"
    return ops.matrix(fmt, weight, scale)


def no_rotation(n, dims):
    return Rope(np.ones((n, dims // 2), np.float32), np.zeros((n, dims // 2), np.float32))


def places(n):
    return np.arange(n, dtype=np.int32)


# ---------------------------------------------------------------------------------------------- formats
def bf16(ops, g):
    x, bits = g["bf16.x"][None, :70], g["bf16.y"][None, :70]
    cache = ops.key_cache(1, 64 + 70, 70)
    ops.encode_keys(np.concatenate([np.zeros((1, 64), np.float32), x], 1), cache, places(1))
    yield equal("stored", ops.to_host(cache.rope), bits)
    expected = formats.bf16_decode(bits)
    yield equal("read back", ops.decode_keys(cache, places(1))[:, 64:], expected)
    yield equal("embedded", ops.embed(ops.table(bits), places(1), 1)[:, 0], expected)


def e4m3_table(ops, g):
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F] + [0, 0], np.uint8).reshape(1, 256)
    scales = np.array([[127, 0, 254 - 8, 120]], np.uint8)
    cache = KeyCache(codes, scales, np.zeros((1, 2), np.uint16))
    expected = g["table.e4m3"][codes] * np.repeat(g["table.e8m0"][scales], 64, axis=1)
    yield equal("keys", ops.decode_keys(cache, places(1))[:, :256], expected)


def actq128(ops, g):
    yield equal("decoded", ops.act_quant(g["actq128.x"]), g["actq128.deq"])


def actq64(ops, g):
    x = g["actq64.x"]
    n, dim = x.shape
    cache = ops.key_cache(n, dim + 64, 64)
    ops.encode_keys(np.concatenate([x, np.zeros((n, 64), np.float32)], 1), cache, places(n))
    yield equal("codes", ops.to_host(cache.codes), g["actq64.codes"])
    yield equal("scales", ops.to_host(cache.scales), g["actq64.scale_e8m0"])
    yield equal("decoded", ops.decode_keys(cache, places(n))[:, :dim], g["actq64.deq"])


def index_codes(ops, x):
    """What the index cache holds of x [n, Di]: packed codes, scales, and both decoded."""
    n, dim = x.shape
    cache = ops.index_cache(n, dim)
    ops.encode_index(x, cache, places(n))
    return ops.to_host(cache.codes), ops.to_host(cache.scales), ops.decode_index(cache, places(n))


def hadamard(ops, g):
    """The rotation shows through the FP4 rounding that follows it."""
    for n in (64, 128):
        x, y = g[f"hadamard{n}.x"], g[f"hadamard{n}.y"]
        packed, scale = formats.fp4_act_quant(y)
        expected = formats.fp4_act_dequant(packed, scale)
        query = ops.index_query(np.ascontiguousarray(x[None]), no_rotation(1, 64))
        yield close(f"query {n}", query[0], expected)
        for what, found, want in zip(("codes", "scales", "decoded"), index_codes(ops, x), (packed, scale, expected)):
            yield equal(f"key {what} {n}", found, want)


def fp4_ties(ops, g):
    """Exact midpoints between FP4 values: few enough bits that the rotation back and forth is exact."""
    middles = np.array([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0])
    x = np.ldexp(np.tile(middles, 4), np.array([[0], [-20], [30]])).astype(np.float32)
    packed, scale = formats.fp4_act_quant(x)
    for what, found, want in zip(("codes", "scales"), index_codes(ops, formats.hadamard(x)), (packed, scale)):
        yield equal(what, found, want)


# ---------------------------------------------------------------------------------------------- norms, rotation
def rmsnorm(ops, g):
    yield close("y", ops.rmsnorm(g["rmsnorm.x"], g["rmsnorm.w"], 1e-6), g["rmsnorm.y"])


def qnorm(ops, g):
    x = g["rmsnorm.x"]
    yield close("y", ops.query(x[:, None].copy(), no_rotation(len(x), 64), 1e-6)[:, 0], g["qnorm.y"])


YARNS = {"yarn_real": (160000, 65536, 16), "yarn_tiny": (160000, 64, 16), "yarn_d": (40000, 128, 8)}


def thetas(name, config):
    """θ of a golden's rotation: base, original length and factor."""
    if name == "plain":
        return rope_thetas(dataclasses.replace(config, rope_theta=10000, qk_rope_head_dim=64))[0]
    base, original, factor = YARNS[name]
    yarn = Yarn(factor, original, 32, 1)
    return rope_thetas(dataclasses.replace(config, compress_rope_theta=base, yarn=yarn, qk_rope_head_dim=64))[1]


def rope(ops, g):
    for name in ("plain", *YARNS):
        part = {key: g[f"rope.{name}.{key}"] for key in ("cos", "sin", "x", "fwd", "inv")}
        angles = ops.rope_angles(g["rope.pos"], ops.vector(thetas(name, g["config"])))
        yield close(f"{name} cos", angles.cos, part["cos"])
        yield close(f"{name} sin", angles.sin, part["sin"])
        yield close(f"{name} forward", ops.rotate(part["x"].copy(), angles), part["fwd"])
        yield close(f"{name} inverse", ops.rotate(part["x"].copy(), angles, inverse=True), part["inv"])


# ---------------------------------------------------------------------------------------------- hyper-connections
def connection(ops, g, name, iterations=20):
    fn = ops.matrix("f32", g[f"{name}.fn"])
    base, scale = ops.vector(g[f"{name}.base"]), ops.vector(g[f"{name}.scale"])
    return HyperConnection(fn, base, scale, 4, iterations, 1e-6, 1e-6)


def hc(ops, g):
    u, mix = ops.hc_pre(g["hc.x"], connection(ops, g, "hc"))
    yield close("input", u, g["hc.y"])
    yield close("post", mix.post, g["hc.post"])
    yield close("comb", mix.comb, g["hc.comb"])
    yield close("output", ops.hc_post(g["hc.sub"], g["hc.x"], mix), g["hc.post_y"])
    exact = Mix(g["hc.post"], g["hc.comb"])
    yield close("output from the golden's mix", ops.hc_post(g["hc.sub"], g["hc.x"], exact), g["hc.post_y"])


def hchead(ops, g):
    yield close("y", ops.hc_head(g["hc.x"], connection(ops, g, "hchead")), g["hchead.y"])


def sinkhorn(ops, g):
    """Given mixes, through a matrix that makes them: row (j, t) is 4 at stream j's place t, so its mean square is 1."""
    mixes = g["sinkhorn.mixes"]
    n, m, d = len(mixes), 4, 4
    h = np.zeros((m, n, m, d), np.float32)
    fn = np.zeros((mixes.shape[1], m, d), np.float32)
    for t in range(n):
        h[np.arange(m), t, np.arange(m), t] = 4
        fn[:, :, t] = mixes[t, :, None] / 4
    scale, base = ops.vector(g["hc.scale"]), ops.vector(g["hc.base"])
    w = HyperConnection(ops.matrix("f32", fn.reshape(len(fn), m * d)), base, scale, m, 20, 1e-6, 0.0)
    u, mix = ops.hc_pre(h.reshape(m * n, m, d), w)
    u = u.reshape(m, n, d)
    pre = np.stack([u[:, t, t] / 4 for t in range(n)])
    yield close("pre", pre, g["sinkhorn.pre"])
    for j in range(m):
        yield close(f"post, stream {j}", mix.post.reshape(m, n, m)[j], g["sinkhorn.post"])
        yield close(f"comb, stream {j}", mix.comb.reshape(m, n, m, m)[j], g["sinkhorn.comb"])


def hc_epsilons(ops, g):
    """Closed form of one iteration with epsilons that show: f = √norm_eps everywhere, so mix_i = K · v_i / √2."""
    m, d, eps, norm_eps = 2, 2, 0.25, 0.01
    v = np.array([0.5, -1.0, 0.25, 2.0, 0, 0, 0, 0])  # pre, post; an even comb

    def made(v, sizes):
        fn = np.repeat((v * np.sqrt(2) / (m * d))[:, None], m * d, 1).astype(np.float32)
        ones, zeros = np.ones(sizes, np.float32), np.zeros(len(v), np.float32)
        return HyperConnection(ops.matrix("f32", fn), ops.vector(zeros), ops.vector(ones), m, 1, eps, norm_eps)

    h = np.full((1, m, d), np.sqrt(norm_eps), np.float32)
    sigmoid = 1 / (1 + np.exp(-v))
    expected = np.full((1, d), np.sqrt(norm_eps) * (sigmoid[:m].sum() + m * eps))
    u, mix = ops.hc_pre(h, made(v, 3))
    yield close("input", u, expected)
    yield close("post", mix.post, 2 * sigmoid[None, m : 2 * m])
    yield close("comb", mix.comb, np.full((1, m, m), (0.5 + eps) / (m * (0.5 + eps) + eps)))
    yield close("head", ops.hc_head(h, made(v[:m], 1)), expected)


# ---------------------------------------------------------------------------------------------- linears
def linears(ops, g):
    for name in ("fp8lin", "fp4lin"):
        w, x = stored(ops, g, f"{name}.w"), g[f"{name}.x"]
        yield close(f"{name} y", ops.linear(ops.act_quant(x), w), g[f"{name}.y"])
        yield close(f"{name} not quantised", ops.linear(x, w), g[f"{name}.y_noactq"])
        yield equal(f"{name} weights", ops.linear(np.eye(w.shape[1], dtype=np.float32), w).T, g[f"{name}.w_deq"])


def oproj(ops, g):
    o = g["oproj.o"]
    n, groups, _ = o.shape
    yield close("y", ops.grouped_linear(o.reshape(n, -1), stored(ops, g, "oproj.wo_a"), groups), g["oproj.y"])


def heads(ops, g):
    """The draft's heads: Markov bias along the tokens it drafts, and confidence."""
    w1, w2 = ops.table(g["markov.w1"]), ops.matrix("bf16", g["markov.w2"])
    ids, logits, markov = [g["markov.ids"][0]], [], []
    for base in g["markov.base_logits"]:
        markov.append(ops.embed(w1, np.array(ids[-1:], np.int32), 1)[0])
        logits.append(base + ops.to_host(ops.linear(markov[-1], w2))[0])
        ids.append(np.argmax(logits[-1]))
    yield close("logits", np.stack(logits), g["markov.logits"])
    yield equal("ids", np.array(ids), g["markov.ids"])
    x = np.concatenate([g["conf.hidden"], np.concatenate(markov)], axis=1)
    yield close("confidence", ops.linear(x, ops.matrix("bf16", g["conf.w"]))[:, 0], g["conf.y"])


# ---------------------------------------------------------------------------------------------- attention
def sattn(ops, g):
    """The golden's keys are float32, ours are not: each is spread over a longer key as three exact bf16 terms."""
    q, kv, idx = g["sattn.q"], g["sattn.kv"], g["sattn.idx"]
    terms, rest = [], kv
    for _ in range(3):
        terms.append(formats.bf16_decode(formats.bf16_encode(rest)))
        rest = rest - terms[-1]
    assert not rest.any()
    dim = kv.shape[1]
    cache = ops.key_cache(len(kv), 4 * dim, 3 * dim)
    ops.encode_keys(np.concatenate([0 * kv, *terms], axis=1), cache, places(len(kv)))
    wide = np.concatenate([0 * q, q, q, q], axis=2) * np.float32(2)  # (4 · dim)^-½ · 2 = dim^-½

    def attend(*parts):
        o = ops.attend(wide, ops.vector(g["sattn.sink"]), [(cache, np.ascontiguousarray(p)) for p in parts])
        return o.reshape(*q.shape[:2], 4, dim)[:, :, 1:].sum(axis=2)

    yield close("one part", attend(idx), g["sattn.o"])
    yield close("two parts", attend(idx[:, :9], idx[:, 9:]), g["sattn.o"])


# ---------------------------------------------------------------------------------------------- compressor
def compressed(ops, g, name, chunk):
    """All entries of golden `name`, `chunk` rows a forward: (as pooled, as stored). The rings wrap; slot 1 of 2."""
    x = g[f"{name}.x"]
    ratio = len(g[f"{name}.ape"])
    ape, norm = ops.vector(g[f"{name}.ape"]), ops.vector(g[f"{name}.norm"])
    wkv, wgate = ops.matrix("bf16", g[f"{name}.wkv"]), ops.matrix("bf16", g[f"{name}.wgate"])
    capacity = 2 * ratio + chunk
    ring = Ring(*(ops.zeros((2 * capacity, wkv.shape[0]), np.float32) for _ in range(2)))
    index, dim = name.endswith("i"), len(g[f"{name}.norm"])
    cache = ops.index_cache(len(x), dim) if index else ops.key_cache(len(x), dim, 64)
    encode, decode = (ops.encode_index, ops.decode_index) if index else (ops.encode_keys, ops.decode_keys)
    theta, pooled = ops.vector(thetas("yarn_tiny", g["config"])), []
    for start in range(0, len(x), chunk):
        rows = np.ascontiguousarray(x[start : start + chunk])
        positions = np.arange(start, start + len(rows), dtype=np.int32)
        where = np.int32(capacity) + positions % np.int32(capacity)
        ops.compress_store(ops.linear(rows, wkv), ops.linear(rows, wgate), ape, positions, ring, where)
        done = np.arange(start // ratio, (start + len(rows)) // ratio, dtype=np.int32)
        e = ops.rmsnorm(ops.compress_pool(ring, np.ones_like(done), done, ratio, capacity), norm, 1e-6)
        e = ops.rotate(e[:, None], ops.rope_angles(done * np.int32(ratio), theta))[:, 0]
        encode(e, cache, done)
        pooled.append(ops.to_host(e))
    return np.concatenate(pooled), ops.to_host(decode(cache, places(len(x) // ratio)))


def compressor(ops, g):
    for name in ("comp4", "comp4i", "comp16", "comp128"):
        n = len(g[f"{name}.x"])
        at_once = compressed(ops, g, name, n)
        found = formats.hadamard(at_once[0]) if name == "comp4i" else at_once[0]
        yield close(f"{name} not quantised", found, g[f"{name}.kv_noactq"])
        yield close(f"{name} stored", at_once[1], g[f"{name}.kv"])
        for chunk in (1, 7):
            for what, found, expected in zip(("pooled", "stored"), compressed(ops, g, name, chunk), at_once):
                yield equal(f"{name} {what}, {chunk} rows at a time", found, expected)


# ---------------------------------------------------------------------------------------------- indexer
def select(ops, q, w, keys, k, visible=None):
    """index_select over keys [n, Di] that FP4 holds exactly, in pages of 8 entries that lie in reverse."""
    n, dim = keys.shape
    pages = -(-n // 8)
    cache = ops.index_cache(8 * pages, dim)
    table = np.arange(pages - 1, -1, -1, dtype=np.int32)[None]
    where = table[0, places(n) // 8] * np.int32(8) + places(n) % np.int32(8)
    cache.codes[where], cache.scales[where] = formats.fp4_act_quant(keys)
    t = len(q)
    visible = np.full(t, n, np.int32) if visible is None else visible
    return ops.to_host(ops.index_select(q, w, cache, np.zeros(t, np.int32), visible, ops.table(table), 8, k))


def ranked(scores, k):
    """The rule by sorting pairs: larger score first, then lower entry; ascending."""
    order = [sorted(range(len(s)), key=lambda j: (-s[j], j))[:k] for s in scores]
    return np.sort(np.array(order, np.int32), axis=1)


def index(ops, g):
    q, w, keys, scores = (g[f"index.{name}"] for name in ("q", "w", "k", "score"))
    yield equal("top 8", select(ops, q, w, keys, 8), np.sort(g["index.top8"], axis=1))
    for k in range(1, len(keys)):
        yield equal(f"top {k}", select(ops, q, w, keys, k), ranked(scores, k))
    twice = np.tile(keys, (2, 1))
    for k in (1, 7, 8, 31):
        yield equal(f"every key twice, top {k}", select(ops, q, w, twice, k), ranked(np.tile(scores, (1, 2)), k))
    for what, weight in (("+0", w), ("−0", -np.abs(w))):
        dead = select(ops, -np.abs(q), weight, np.abs(keys), 8)
        yield equal(f"all heads dead, {what}", dead, np.tile(places(8), (len(q), 1)))


# ---------------------------------------------------------------------------------------------- experts
def gate_by(ops, g, w, bias, k, fixed=None, tokens=None, scale=1.5):
    x = g["gate.x"]
    tokens = np.zeros(len(x), np.int32) if tokens is None else tokens
    ids, weights = ops.gate(x, ops.matrix("bf16", w), bias, fixed, tokens, k, scale)
    return ops.to_host(ids), ops.to_host(weights)


def by_id(ids, weights):
    """A golden's choice, which lists the largest first, in ascending id."""
    order = np.argsort(ids, axis=1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)


def gate(ops, g):
    w, scores, bias = g["gate.w"], g["gate.scores"], ops.vector(g["gate.bias"])
    ids, weights = gate_by(ops, g, w, bias, 4)
    expected = by_id(g["gate.ids"], g["gate.weights"])
    yield equal("ids", ids, expected[0])
    yield close("weights", weights, expected[1])
    everyone = ops.table(np.arange(16, dtype=np.int64)[None])
    shares = gate_by(ops, g, w, None, 16, fixed=everyone, scale=1.0)[1]
    yield close("scores", shares * scores.sum(axis=1, keepdims=True), scores)
    table, tokens = ops.table(g["gatehash.tid2eid"]), g["gatehash.tokens"]
    ids, weights = gate_by(ops, g, w, None, 4, table, tokens)
    expected = by_id(g["gatehash.ids"], g["gatehash.weights"])
    yield equal("ids by token", ids, expected[0])
    yield close("weights by token", weights, expected[1])


def gate_ties(ops, g):
    """Experts 8..15 are 0..7 again: of two equals the lower id is chosen."""
    ids, _ = gate_by(ops, g, np.tile(g["gate.w"][:8], (2, 1)), ops.vector(np.tile(g["gate.bias"][:8], 2)), 3)
    score = g["gate.scores"][:, :8] + g["gate.bias"][:8]
    yield equal("ids", ids, ranked(np.tile(score, (1, 2)), 3))


def expert(ops, g, name, quantise):
    w1, w2, w3 = (stored(ops, g, f"{name}.{part}") for part in ("w1", "w2", "w3"))
    x = quantise(g[f"{name}.x"])
    h = ops.swiglu(ops.linear(x, w1), ops.linear(x, w3), g[f"{name}.route_w"], float(g[f"{name}.limit"][0]))
    return h, ops.linear(quantise(h), w2)


def experts(ops, g):
    for name in ("expert4", "expert8"):
        h, y = expert(ops, g, name, ops.act_quant)
        yield close(f"{name} h", h, g[f"{name}.h"])
        yield close(f"{name} y", y, g[f"{name}.y"])
        yield close(f"{name} not quantised", expert(ops, g, name, lambda x: x)[1], g[f"{name}.y_noactq"])


def moe(ops, g):
    """expert4 as number 1 of three, beside a shared expert that is zero."""
    w1, w2, w3 = (stored(ops, g, f"expert4.{part}") for part in ("w1", "w2", "w3"))
    blocks = {w.shape: tuple(-(-size // 128) for size in w.shape) for w in (w1, w2)}
    codes = {shape: (np.zeros(shape, np.uint8), np.full(n, 127, np.uint8)) for shape, n in blocks.items()}
    zero = {shape: ops.matrix("fp8", *code) for shape, code in codes.items()}
    bank = ops.bank([(w3, w2, w1), (w1, w2, w3), (w3, w2, w3)], tuple(zero[w.shape] for w in (w1, w2, w3)))
    x, limit = g["expert4.x"], float(g["expert4.limit"][0])
    y = ops.moe(x, np.ones((len(x), 1), np.int32), g["expert4.route_w"][:, None], bank, limit, 1)
    yield close("y", y, g["expert4.y"])


CHECKS = [
    bf16, e4m3_table, actq128, actq64, hadamard, fp4_ties, rmsnorm, qnorm, rope, hc, hchead, sinkhorn, hc_epsilons,
    linears, oproj, heads, sattn, compressor, index, gate, gate_ties, experts, moe,
]  # fmt: skip
