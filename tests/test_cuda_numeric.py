"""cuda/numeric.cuh: every code and byte, roundings at and around ties, scales, elementary functions; run on the CPU."""

import numpy as np
import pytest
from compare import same_bits
from cuda_ops import launch

from dsv4 import formats
from dsv4.ops.kernels import inline

PROBE = """
extern "C" __global__ void probe_NAME(const IN* in, OUT* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    u32 code = 0;
    if (i < n) { IN x = in[i]; out[i] = (EXPRESSION); }
    (void)code;
}
"""
PAIRS = """
extern "C" __global__ void probe_pairs(const u32* codes, u32* e4m3, u32* e2m1, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        e4m3_pairs(codes[2 * i], codes[2 * i + 1], e4m3 + 4 * i);
        e2m1_pairs(codes[2 * i], e2m1 + 4 * i);
    }
}
"""
EXPRESSIONS = {
    "bf16_value": ("u32", "float", "bf16_value(x)"),
    "e8m0_value": ("u32", "float", "e8m0_value(x)"),
    "e8m0_inverse": ("u32", "float", "e8m0_inverse(x)"),
    **{f"weight_scale_{i}": ("u32", "float", f"weight_scale(x, {i})") for i in range(4)},
    "e4m3_value": ("u32", "float", "e4m3_value(x)"),
    "e2m1_value": ("u32", "float", "e2m1_value(x)"),
    "fp16_value": ("u32", "float", "fp16_value(x)"),
    "fp16_bits": ("float", "u32", "fp16_bits(x)"),
    "bf16_bits": ("float", "u32", "bf16_bits(x)"),
    "e4m3_code": ("float", "u32", "(round_e4m3(x, &code), code)"),
    "e4m3_rounded": ("float", "float", "round_e4m3(x, &code)"),
    "e2m1_code": ("float", "u32", "(round_e2m1(x, &code), code)"),
    "e2m1_rounded": ("float", "float", "round_e2m1(x, &code)"),
    "e4m3_scale": ("float", "u32", "e4m3_scale(magnitude_bits(x))"),
    "e2m1_scale": ("float", "u32", "e2m1_scale(magnitude_bits(x))"),
    "exp": ("float", "float", "exp_value(x)"),
    "sigmoid": ("float", "float", "sigmoid(x)"),
    "softplus": ("float", "float", "softplus(x)"),
}


@pytest.fixture(scope="module")
def probe(device_ops):
    """probe(name, inputs): what the function of numeric.cuh gives for each."""
    text = inline("numeric.cuh") + PAIRS
    for name, (given, made, expression) in EXPRESSIONS.items():
        one = PROBE.replace("NAME", name).replace("EXPRESSION", expression)
        text += one.replace("IN*", f"{given}*").replace("IN x", f"{given} x").replace("OUT*", f"{made}*")
    launcher = device_ops.launcher
    module = launcher.compile_text(text)

    def run(name, x):
        given, made, _ = EXPRESSIONS[name]
        types = {"u32": np.uint32, "float": np.float32}
        x, y = np.ascontiguousarray(x, types[given]), np.full(np.shape(x), -1, np.int32).view(types[made])
        launch(launcher, module.kernel(f"probe_{name}"), (-(-x.size // 256),), (256,), (x, y, np.int32(x.size)))
        return y

    run.pairs = lambda *args: launch(launcher, module.kernel("probe_pairs"), (len(args[0]) // 256,), (256,), args)
    return run


def same_numbers(found, expected):
    """Equal bits, and NaN where NaN is expected."""
    nan = np.isnan(expected)
    assert (np.isnan(found) == nan).all()
    same_bits(found[~nan], expected[~nan])


def samples() -> np.ndarray:
    """Both signs of every binade, ties and their neighbours for a few mantissa bits, zeros, the ends."""
    fractions = 1 + np.arange(0, 4096) / 4096
    x = np.outer(np.exp2(np.arange(-30, 20.0)), fractions).astype(np.float32).ravel()
    near = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])
    return np.concatenate([near, -near, np.float32([0, -0.0, 1e-45, 448, 449, 6, 7, 3e38])])


def test_decoding_is_exact(probe):
    byte, half = np.arange(256), np.arange(65536)
    same_numbers(probe("e4m3_value", byte), formats.E4M3)
    same_numbers(probe("e8m0_value", byte), formats.E8M0)
    same_numbers(probe("e8m0_inverse", byte[1:254]), (1 / formats.E8M0[1:254]).astype(np.float32))
    same_bits(probe("e2m1_value", byte[:16]), formats.E2M1)
    same_numbers(probe("bf16_value", half), formats.bf16_decode(half.astype(np.uint16)))
    same_numbers(probe("fp16_value", half), half.astype(np.uint16).view(np.float16).astype(np.float32))


@pytest.mark.parametrize("place", range(4))
def test_scales_of_weights(probe, place):
    """Four bytes in a word, each by itself; 0 is 2^-127, and 255, which no loaded weight has, still shows."""
    byte = np.arange(256, dtype=np.uint32)
    for others in (0, 0xFFFFFFFF, 0x5AC381A7):
        words = others & ~(0xFF << 8 * place) | byte << np.uint32(8 * place)
        found = probe(f"weight_scale_{place}", words)
        same_bits(found[:255], formats.E8M0[:255])
        assert not np.isfinite(found[255])


def test_pairs_of_codes(probe):
    """Every pair of bytes: pair i holds codes i and i + 4 of eight, as fp16, a power of two too small."""
    low, high = np.meshgrid(np.arange(256, dtype=np.uint32), np.arange(256, dtype=np.uint32))
    codes = np.stack([low.ravel() * 0x01010101, high.ravel() * 0x01010101], axis=1).astype(np.uint32)
    codes[:, 0] ^= np.arange(len(codes), dtype=np.uint32) * 0x9E3779B9  # all places differ
    e4m3, e2m1 = np.zeros((len(codes), 4), np.uint32), np.zeros((len(codes), 4), np.uint32)
    probe.pairs(codes, e4m3, e2m1, np.int32(len(codes)))

    def ordered(values):
        return np.stack([values[:, :4], values[:, 4:]], axis=-1)

    found = e4m3.view(np.float16).astype(np.float32).reshape(-1, 4, 2) * np.float32(2.0**8)
    same_numbers(found, ordered(formats.E4M3[codes.view(np.uint8)]))
    words = np.ascontiguousarray(codes[:, :1])
    found = e2m1.view(np.float16).astype(np.float32).reshape(-1, 4, 2) * np.float32(2.0**14)
    same_bits(found, ordered(formats.E2M1[formats.e2m1_unpack(words.view(np.uint8))]))


def test_rounding(probe):
    x = samples()
    same_bits(probe("bf16_bits", x).astype(np.uint16), formats.bf16_encode(x))
    inside = x[np.abs(x) < 65520]
    same_bits(probe("fp16_bits", inside).astype(np.uint16), inside.astype(np.float16).view(np.uint16))
    same_bits(probe("e4m3_code", x).astype(np.uint8), formats.e4m3_encode(x))
    same_bits(probe("e4m3_rounded", x), formats.E4M3[formats.e4m3_encode(x)])
    same_bits(probe("e2m1_code", x).astype(np.uint8), formats.e2m1_encode(x))
    same_bits(probe("e2m1_rounded", x), formats.E2M1[formats.e2m1_encode(x)])
    assert np.isnan(formats.bf16_decode(probe("bf16_bits", np.float32([np.nan, -np.nan])).astype(np.uint16))).all()
    assert np.isnan(probe("fp16_value", probe("fp16_bits", np.float32([np.nan])))).all()


def test_scales(probe):
    amax = np.abs(samples())
    amax = np.concatenate([amax, np.exp2(np.arange(-149, 128.0)).astype(np.float32), np.float32([np.inf, np.nan, 3.4e38])])
    for name, smallest, largest in (("e4m3_scale", 1e-4, 448), ("e2m1_scale", 6 * 2.0**-126, 6)):
        raised = np.maximum(amax, np.float32(smallest))
        expected = formats.scale_exponent(raised, np.float32(1 / largest)) + 127
        same_bits(probe(name, amax), expected.astype(np.uint32))


def test_functions(probe):
    x = np.concatenate([np.linspace(-110, 95, 200_001), np.linspace(-1, 1, 50_001), [0, 20, 20.000002, -1e30, 1e30, -149]])
    x = x.astype(np.float32)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        expected = {
            "exp": np.exp(wide),
            "sigmoid": 1 / (1 + np.exp(-wide)),
            "softplus": np.where(wide > 20, wide, np.log1p(np.exp(np.minimum(wide, 20)))),
        }
        for name, limit in (("exp", 1.1), ("sigmoid", 2.5), ("softplus", 0.51)):
            found, rounded = probe(name, x), expected[name].astype(np.float32)
            finite = np.isfinite(rounded)
            assert (found[~finite] == rounded[~finite]).all(), name
            steps = np.maximum(np.spacing(np.abs(rounded[finite])), 2.0**-149)
            off = np.abs(found[finite] - expected[name][finite]) / steps
            assert off.max() <= limit, (name, off.max(), x[finite][off.argmax()])
    for name in expected:
        assert np.isnan(probe(name, np.float32([np.nan]))).all(), name
