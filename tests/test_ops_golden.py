"""Every op of every backend against what an independent implementation computed."""

import ops_golden
import pytest
from ops_cases import read_tensors

from dsv4.config import ModelConfig
from dsv4.ops import open_ops


@pytest.fixture(scope="module")
def golden(golden_dir, nano_dir):
    """The tensors of ops.safetensors by name, and any valid config as "config" to derive rotations from."""
    return read_tensors(golden_dir / "ops.safetensors") | {"config": ModelConfig.load(nano_dir)}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request):
    return open_ops(request.param, threads=2)


@pytest.mark.parametrize("check", ops_golden.CHECKS, ids=lambda check: check.__name__)
def test_golden(check, ops, golden):
    comparisons = list(check(ops, golden))
    assert comparisons
    assert not [c for c in comparisons if not c.holds]
