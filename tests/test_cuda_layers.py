"""Whole layers of random weights on the CUDA backend, of the real model's size on a GPU, of nano's on the CPU."""

import numpy as np
import pytest
from compare import rel_l2_rows, same_bits

from dsv4.bench.layers import Slice
from dsv4.ops import open_ops
from dsv4.rows import Rows
from dsv4.step import Step
from dsv4.synth import read_config

ROWS = 6


@pytest.fixture(scope="module")
def size(device_ops):
    """(config, its experts, positions before)"""
    if device_ops.launcher.name == "emulated":
        return read_config("nano"), 12, 96
    config = read_config("real")
    return config, ROWS * config.num_experts_per_tok, 8192


def forward(part, first, tokens):
    rows = Rows.of(0, part.context - ROWS + first, tokens, "all")
    return part.model.forward(Step(part.ops, part.pool, rows), part.pool).logits


@pytest.mark.parametrize("kind", range(3), ids=["window only", "ratio 4", "the other ratio"])
def test_a_layer_of_each_kind(device_ops, size, kind):
    """Rows together and one by one have the same bits; the CPU backend's numbers are near."""
    config, experts, context = size
    ratio = sorted(set(config.compress_ratios))[kind]
    part, other = (Slice(config, (ratio,), experts, context, ops, ROWS) for ops in (device_ops, open_ops("cpu", threads=2)))
    together = forward(part, 0, np.arange(ROWS))
    assert np.isfinite(together).all()
    assert np.median(rel_l2_rows(together, forward(other, 0, np.arange(ROWS)))) <= 0.02
    for row in range(ROWS):
        same_bits(forward(part, row, [row])[0], together[row], f"row {row}")
