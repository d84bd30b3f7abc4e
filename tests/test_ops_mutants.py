"""The golden checks can fail: each wrong computation below is rejected by a wide margin."""

from dataclasses import replace

import numpy as np
import ops_golden as checks
import pytest
from ops_cases import read_tensors

from dsv4 import formats
from dsv4.config import ModelConfig
from dsv4.ops import Ring, Rope, reference
from dsv4.ops.reference import ReferenceOps, product, softplus

CAUGHT = 100 * checks.CLOSE  # the error of a float result, or the share of wrong values of an exact one
MUTANTS = []


def rejected_by(*by):
    """Register a wrong ReferenceOps with the checks that must reject it, each for itself."""

    def register(wrong):
        MUTANTS.extend(pytest.param(wrong, check, id=f"{wrong.__name__}-{check.__name__}") for check in by)
        return wrong

    return register


# ---------------------------------------------------------------------------------------------- quantisers
class WrongScale(ReferenceOps):
    """act_quant with another rule for the scale's exponent, or another rounding of x / s."""

    def exponent(self, amax):
        return formats.scale_exponent(amax, np.float32(1 / 448))

    def encode(self, scaled):
        return formats.e4m3_encode(scaled)

    def act_quant(self, x):
        x = x.reshape(len(x), -1, 128)
        s = np.ldexp(np.float32(1), self.exponent(np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-4))))
        return (formats.E4M3[self.encode(x / s)] * s).reshape(len(x), -1)


@rejected_by(checks.actq128)
class ExponentPlusOne(WrongScale):
    def exponent(self, amax):
        return super().exponent(amax) + 1


@rejected_by(checks.actq128, checks.linears)
class Floor(WrongScale):
    """The exponent rounded down: the largest values clamp."""

    def exponent(self, amax):
        return np.frexp(amax * np.float32(1 / 448))[1] - 1


@rejected_by(checks.actq128)
class FloorPlusOne(WrongScale):
    """Wrong for an exact power of two only."""

    def exponent(self, amax):
        return np.frexp(amax * np.float32(1 / 448))[1]


@rejected_by(checks.actq128)
class TiesAwayFromZero(WrongScale):
    def encode(self, scaled):
        return formats.e4m3_encode(scaled * np.float32(1 + 2**-20))


@rejected_by(checks.fp4_ties)
class Fp4TiesAwayFromZero(ReferenceOps):
    def encode_index(self, k, cache, where):
        super().encode_index(k * np.float32(1 + 2**-20), cache, where)


@rejected_by(checks.actq64)
class KeyBlockOf128(ReferenceOps):
    def encode_keys(self, k, cache, where):
        plain = cache.codes.shape[1]
        cache.codes[where], scale = formats.act_quant(k[:, :plain], 128)
        cache.scales[where] = np.repeat(scale, 2, axis=1)


@rejected_by(checks.bf16)
class TruncatedBf16(ReferenceOps):
    def encode_keys(self, k, cache, where):
        super().encode_keys(k, cache, where)
        cache.rope[where] = np.ascontiguousarray(k[:, cache.codes.shape[1] :]).view(np.uint32) >> 16


@rejected_by(checks.linears, checks.experts, checks.moe)
class NibblesSwapped(ReferenceOps):
    def matrix(self, fmt, weight, scale=None):
        return super().matrix(fmt, (weight << 4 | weight >> 4) if fmt == "fp4" else weight, scale)


@rejected_by(checks.hadamard, checks.fp4_ties)
class IndexNibblesSwapped(ReferenceOps):
    def encode_index(self, k, cache, where):
        super().encode_index(k, cache, where)
        cache.codes[where] = cache.codes[where] << 4 | cache.codes[where] >> 4


@rejected_by(checks.linears, checks.experts, checks.oproj)
class ScaleByteAsNumber(ReferenceOps):
    """Scale bytes taken as the numbers they spell, not as exponents."""

    def matrix(self, fmt, weight, scale=None):
        if fmt not in ("fp8", "fp4"):
            return super().matrix(fmt, weight, scale)
        ones = np.full_like(scale, 127)
        decode, block = (formats.decode_fp8, 128) if fmt == "fp8" else (formats.decode_fp4, 32)
        decoded = decode(weight, ones)
        rows = np.repeat(scale, 128 if fmt == "fp8" else 1, axis=0)[: len(decoded)]
        return super().matrix("f32", decoded * np.repeat(rows, block, axis=1)[:, : decoded.shape[1]].astype(np.float32))


# ---------------------------------------------------------------------------------------------- rotation
@rejected_by(checks.rope, checks.compressor)
class RopeOnTheFirstDims(ReferenceOps):
    def rotate(self, x, rope, inverse=False):
        r = 2 * rope.cos.shape[1]
        x[..., :r] = reference.rotate_pairs(x[..., :r], rope, inverse)
        return x


@rejected_by(checks.rope, checks.compressor)
class RopeByHalves(ReferenceOps):
    """Pairs (i, i + R/2) in place of (2i, 2i + 1)."""

    def rotate(self, x, rope, inverse=False):
        r = 2 * rope.cos.shape[1]
        order = np.arange(r).reshape(2, -1).T.ravel()
        tail = x[..., -r:]
        tail[..., order] = reference.rotate_pairs(tail[..., order], rope, inverse)
        return x


@rejected_by(checks.rope)
class InverseRopeForward(ReferenceOps):
    def rotate(self, x, rope, inverse=False):
        return super().rotate(x, rope)


@rejected_by(checks.rope, checks.compressor)
class RopeBackward(ReferenceOps):
    def rope_angles(self, positions, theta):
        return Rope(*(a * b for a, b in zip(super().rope_angles(positions, theta), np.float32([1, -1]))))


@rejected_by(checks.rope)
class AnglesInFloat64(ReferenceOps):
    """The product position · θ not rounded to float32: far positions show it."""

    def rope_angles(self, positions, theta):
        angle = positions[:, None] * theta.astype(np.float64)
        return Rope(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))


# ---------------------------------------------------------------------------------------------- hyper-connections
@rejected_by(checks.hc, checks.sinkhorn)
class TransposedComb(ReferenceOps):
    def hc_split(self, *args):
        pre, post, comb = super().hc_split(*args)
        return pre, post, comb.transpose(0, 2, 1)


@rejected_by(checks.hc)
class TransposedUse(ReferenceOps):
    """comb is right, hc_post applies it the other way."""

    def hc_post(self, y, h, mix):
        return super().hc_post(y, h, mix._replace(comb=mix.comb.transpose(0, 2, 1)))


@rejected_by(checks.sinkhorn)
class FiveIterations(ReferenceOps):
    def hc_split(self, mix, scale, base, m, iterations, eps):
        return super().hc_split(mix, scale, base, m, 5, eps)


@rejected_by(checks.hc_epsilons)
class EpsilonsSwapped(ReferenceOps):
    @staticmethod
    def swapped(hc):
        return replace(hc, eps=hc.norm_eps, norm_eps=hc.eps)

    def hc_pre(self, h, hc):
        return super().hc_pre(h, self.swapped(hc))

    def hc_head(self, h, hc):
        return super().hc_head(h, self.swapped(hc))


@rejected_by(checks.hc)
class PostNotDoubled(ReferenceOps):
    def hc_split(self, *args):
        pre, post, comb = super().hc_split(*args)
        return pre, post / 2, comb


# ---------------------------------------------------------------------------------------------- attention
@rejected_by(checks.sattn)
class SinkLeftOut(ReferenceOps):
    def attend(self, q, sink, parts):
        return super().attend(q, np.full_like(sink, -np.inf), parts)


@rejected_by(checks.sattn)
class ScoresNotScaled(ReferenceOps):
    def attend(self, q, sink, parts):
        return super().attend(q * np.float32(q.shape[-1] ** 0.5), sink, parts)


@rejected_by(checks.sattn)
class AbsentKeyAttended(ReferenceOps):
    """−1 taken as the last place."""

    def attend(self, q, sink, parts):
        return super().attend(q, sink, [(cache, where % len(cache.codes)) for cache, where in parts])


@rejected_by(checks.oproj)
class GroupsShifted(ReferenceOps):
    def grouped_linear(self, o, w, groups):
        return super().grouped_linear(np.roll(o, o.shape[1] // groups, axis=1), w, groups)


# ---------------------------------------------------------------------------------------------- compressor, indexer
@rejected_by(checks.compressor)
class OverlapHalvesSwapped(ReferenceOps):
    def compress_pool(self, ring, slots, entries, ratio, capacity):
        if ratio == 4:
            ring = Ring(*(np.roll(a, a.shape[1] // 2, axis=1) for a in ring))
        return super().compress_pool(ring, slots, entries, ratio, capacity)


@rejected_by(checks.compressor)
class ApeOffByOne(ReferenceOps):
    def compress_store(self, kv, gate, ape, positions, ring, where):
        super().compress_store(kv, gate, ape, positions + 1, ring, where)


@rejected_by(checks.compressor)
class MeanPooling(ReferenceOps):
    def compress_pool(self, ring, slots, entries, ratio, capacity):
        return super().compress_pool(Ring(ring.kv, 0 * ring.gate), slots, entries, ratio, capacity)


@rejected_by(checks.compressor)
class BlockBeforeTheFirst(ReferenceOps):
    """Entry 0 pools the ring's zeros as if there were rows before position 0."""

    def compress_pool(self, ring, slots, entries, ratio, capacity):
        later = np.where(entries == 0, entries + capacity, entries)  # the same places, when capacity divides the step
        return super().compress_pool(ring, slots, later, ratio, capacity)


@rejected_by(checks.hadamard, checks.compressor)
class HadamardNotScaled(ReferenceOps):
    def index_query(self, q, rope):
        return super().index_query(q * np.float32(q.shape[-1] ** 0.5), rope)

    def encode_index(self, k, cache, where):
        super().encode_index(k * np.float32(k.shape[-1] ** 0.5), cache, where)


@rejected_by(checks.hadamard)
class HadamardLeftOut(ReferenceOps):
    def index_query(self, q, rope):
        return super().index_query(formats.hadamard(q), rope)


class HighestOfEquals(ReferenceOps):
    """Ties go to the higher number."""

    def index_select(self, q, w, cache, slots, visible, pages, page_entries, k):
        chosen = np.full((len(q), k), -1, np.int32)
        for t, n in enumerate(visible):
            j = np.arange(n)
            where = pages[slots[t], j // page_entries] * page_entries + j % page_entries
            scores = self.index_scores(q[t], w[t], self.decode_index(cache, where))
            chosen[t, : min(n, k)] = np.sort(n - 1 - np.argsort(-scores[::-1], kind="stable")[:k])
        return chosen

    def gate(self, x, w, bias, fixed, tokens, k, scale):
        score = self.gate_scores(x, w) + bias
        best = np.argsort(-score[:, ::-1], axis=1, kind="stable")[:, :k]
        return np.sort(score.shape[1] - 1 - best, axis=1).astype(np.int32), best


rejected_by(checks.index, checks.gate_ties)(HighestOfEquals)


@rejected_by(checks.index)
class NegativeScoresKept(ReferenceOps):
    """No relu."""

    def index_scores(self, q, w, k):
        return (k @ q.T * w).sum(axis=1)


# ---------------------------------------------------------------------------------------------- experts
@rejected_by(checks.gate)
class BiasInWeights(ReferenceOps):
    def gate(self, x, w, bias, fixed, tokens, k, scale):
        ids, weights = super().gate(x, w, bias, fixed, tokens, k, scale)
        if bias is not None:
            chosen = np.take_along_axis(self.gate_scores(x, w) + bias, ids, 1)
            weights = chosen / chosen.sum(axis=1, keepdims=True) * scale
        return ids, weights


@rejected_by(checks.gate)
class BiasForgotten(ReferenceOps):
    def gate(self, x, w, bias, *rest):
        return super().gate(x, w, None, *rest)


@rejected_by(checks.gate)
class NoSquareRoot(ReferenceOps):
    def gate_scores(self, x, w):
        return softplus(product(x, w.decoded)[:, 0]).astype(np.float32)


@rejected_by(checks.experts, checks.moe)
class GateNotClamped(ReferenceOps):
    def swiglu(self, g, u, weight, limit):
        return super().swiglu(g, np.clip(u, -limit, limit), weight, 0)


@rejected_by(checks.experts, checks.moe)
class UpNotClamped(ReferenceOps):
    def swiglu(self, g, u, weight, limit):
        return super().swiglu(np.minimum(g, limit), u, weight, 0)


@rejected_by(checks.experts, checks.moe)
class GateClampedBelow(ReferenceOps):
    def swiglu(self, g, u, weight, limit):
        return super().swiglu(np.maximum(g, -limit), u, weight, limit)


@rejected_by(checks.moe)
class WeightAfterW2(ReferenceOps):
    """The routing weight outside w2's quantisation."""

    def moe(self, x, ids, weights, bank, limit, slices):
        return super().moe(x, ids, np.ones_like(weights), bank, limit, slices) * weights


@rejected_by(checks.moe)
class ExpertSwapped(ReferenceOps):
    def moe(self, x, ids, *rest):
        return super().moe(x, ids - 1, *rest)


@rejected_by(checks.moe)
class InnerNotQuantised(ReferenceOps):
    def moe(self, x, ids, weights, bank, limit, slices):
        w1, w2, w3 = bank.experts[1]
        xq = self.act_quant(x)
        return self.linear(self.swiglu(self.linear(xq, w1), self.linear(xq, w3), weights[:, 0], limit), w2)


# ---------------------------------------------------------------------------------------------- norms
@rejected_by(checks.rmsnorm, checks.compressor)
class NormByMean(ReferenceOps):
    """Divided by the deviation from the mean."""

    def rmsnorm(self, x, w, eps):
        return super().rmsnorm(x - x.mean(axis=-1, keepdims=True), w, eps)


@pytest.fixture(scope="module")
def golden(golden_dir, nano_dir):
    return read_tensors(golden_dir / "ops.safetensors") | {"config": ModelConfig.load(nano_dir)}


@pytest.mark.parametrize("wrong, check", MUTANTS)
def test_wrong_computation_is_rejected(wrong, check, golden):
    comparisons = list(check(wrong(), golden))
    worst = max(comparisons, key=lambda c: c.error)
    assert worst.error > CAUGHT, worst


@pytest.mark.parametrize("change", [1, 2])
def test_wrong_theta_is_rejected(change, golden, monkeypatch):
    """θ that is an ulp or two off, as from float64 rounded once: far positions show it."""
    right, factor = checks.thetas, np.float32(1 + change * 2**-23)
    monkeypatch.setattr(checks, "thetas", lambda *args: right(*args) * factor)
    assert max(c.error for c in checks.rope(ReferenceOps(), golden)) > CAUGHT
