"""Drafts against what an independent implementation drafted: ids, logits and confidences, stage by stage and whole."""

import dataclasses

import numpy as np
import pytest
from compare import rel_l2, rel_l2_rows
from ops_cases import NoQuantOps
from test_golden_e2e import CHECKPOINTS, golden, open_model, open_pool

from dsv4.dspark import Draft
from dsv4.rows import Rows
from dsv4.step import Step


def open_draft(model, **changes) -> Draft:
    return Draft(dataclasses.replace(model.config, **changes), model.weights, model.ops, model.comm)


def greedy(logits, position):
    return int(logits.argmax())


def run_drafts(model, draft, case):
    """Forced tokens; a draft wherever the golden has one → [Drafted]."""
    prompt, tokens = case["prompt"], case["tokens"]
    length = len(prompt)
    pool = open_pool(model, length + len(tokens), headroom=length)
    model.forward(Step(model.ops, pool, Rows.of(0, 0, prompt)), pool)
    consumed, primed, out = length, 0, []
    for p in case["draft_pos"]:
        if p >= consumed:
            model.forward(Step(model.ops, pool, Rows.of(0, p, [tokens[p - length]])), pool)
            consumed = p + 1
        draft.prime(pool, 0, max(primed, p + 1 - pool.window), p + 1)
        primed = p + 1
        out.append(draft.draft(pool, 0, p + 1, int(tokens[p - length + 1]), greedy))
    return out


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_mathematics_of_the_draft_with_the_quantisers_off(name, checkpoint_dir, golden_dir):
    model = open_model(checkpoint_dir(name), NoQuantOps())
    for length, case in golden(golden_dir, name, "noq").items():
        found = run_drafts(model, open_draft(model), case)
        assert np.array_equal([f.ids for f in found], case["draft_ids"][:, 1:]), length
        assert rel_l2(np.stack([f.confidence for f in found]), case["draft_conf"]) <= 1e-5, length
        for row, logits in zip(case["draft_logits_rows"], case["draft_logits"]):
            assert rel_l2_rows(found[row].logits, logits).max() <= 1e-5, (length, row)
