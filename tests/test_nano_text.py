"""The embedded model's greedy text against an independent implementation's (golden/nano_continuations.json)."""

import pytest

import dsv4
from dsv4.generate import complete
from dsv4.sampling import SamplingParams

NEAR_TIE = 0.3  # logits; below it another legal order of the same sums may choose the other token


@pytest.fixture(scope="module")
def engine():
    return dsv4.Engine.load("nano")


@pytest.mark.parametrize("kind", ["repeat", "code", "math", "prose"])
def test_greedy_text_leaves_the_golden_only_at_near_ties(engine, continuations, kind):
    for golden in continuations[kind]:
        assert engine.tokenizer.encode_prompt(golden["prompt"]) == golden["prompt_ids"]
        expected = golden["greedy_ids"]
        params = SamplingParams(temperature=0, max_tokens=len(expected), ignore_eos=True, logprobs=20)
        result = complete(engine, golden["prompt"], params)
        assert result.text == engine.tokenizer.decode(result.tokens)
        same = next((i for i, pair in enumerate(zip(result.tokens, expected)) if pair[0] != pair[1]), len(expected))
        if same == len(expected):
            continue
        ours = {entry["token"]: entry["logprob"] for entry in result.logprobs[same]["top"]}
        assert ours[result.tokens[same]] - ours[expected[same]] < NEAR_TIE
        assert golden["min_margin"] < NEAR_TIE
