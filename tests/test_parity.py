"""parity: verdicts of two recordings, what counts as one, and how it ends."""

import json

import pytest

from dsv4.cli import main
from dsv4.errors import InputError
from dsv4.parity import compare


def row(*pairs):
    return [{"token": token, "logit": logit} for token, logit in pairs]


A = {"prompt": [5, 6, 7], "topk": [row((1, 5.0), (2, 4.0)), row((3, 2.0), (4, 1.9)), row((8, 1.0), (9, 0.5))]}


@pytest.fixture
def files(tmp_path):
    def write(**named):
        for name, content in named.items():
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return [tmp_path / name for name in named]

    return write


def verdicts(report):
    return [r.verdict for r in report.rows]


def test_a_recording_agrees_with_itself(files):
    report = compare(*files(a=A, b=A))
    assert verdicts(report) == ["argmax_agree"] * 3 and report.max_difference == 0


def test_the_three_verdicts(files):
    b = {"prompt": [5, 6, 7], "topk": [row((1, 5.5), (2, 4.0)), row((4, 2.0), (3, 1.9)), row((9, 1.0), (8, 0.9))]}
    report = compare(*files(a=A, b=b))
    assert verdicts(report) == ["argmax_agree", "near_tie", "diverged"]
    assert [r.margin for r in report.rows] == pytest.approx([1.0, 0.1, 0.5])
    assert report.max_difference == pytest.approx(0.5)
    assert report.as_dict()["disagreements"][1] == {"position": 2, "a": 8, "b": 9, "margin": 0.5, "verdict": "diverged"}


def test_the_margin_is_as_own_and_exclusive(files):
    a = {"prompt": [5], "topk": row((1, 2.0), (2, 1.5))}
    b = {"prompt": [5], "topk": row((2, 9.0), (1, 1.0))}
    paths = files(a=a, b=b)
    assert verdicts(compare(*paths, margin=0.5)) == ["diverged"]
    assert verdicts(compare(*paths, margin=0.51)) == ["near_tie"]
    assert verdicts(compare(*reversed(paths), margin=0.51)) == ["diverged"]  # B itself was sure by 8


def test_order_in_the_file_does_not_matter_and_ties_go_to_the_lower_id(files):
    a = {"prompt": [5], "topk": row((9, 1.0), (4, 2.0), (3, 2.0))}
    b = {"prompt": [5], "topk": row((3, 2.0), (4, 2.0))}
    assert [(r.a, r.b) for r in compare(*files(a=a, b=b)).rows] == [(3, 3)]


def test_a_flat_list_is_the_last_position(files):
    flat = {"prompt": [5, 6, 7], "topk": A["topk"][-1]}
    for pair in ((A, flat), (flat, A), (flat, flat)):
        report = compare(*files(a=pair[0], b=pair[1]))
        assert [(r.position, r.verdict) for r in report.rows] == [(2, "argmax_agree")]


def test_a_lone_candidate_is_never_a_tie(files):
    a, b = {"prompt": [5], "topk": row((1, 2.0))}, {"prompt": [5], "topk": row((2, 2.0))}
    assert verdicts(compare(*files(a=a, b=b), margin=1e9)) == ["diverged"]


@pytest.mark.parametrize(
    "bad, message",
    [
        ("{", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ([A], 'keys "prompt" and "topk"'),
        ({"prompt": [5]}, 'keys "prompt" and "topk"'),
        ({**A, "prompt": [5, 6, 8]}, "expected the prompt of"),
        ({**A, "topk": A["topk"][:2]}, "topk: expected 3 positions, one per prompt token; found 2"),
        ({**A, "topk": []}, "expected a list of candidates"),
        ({**A, "topk": [[], [], []]}, r"topk\[0\]: expected at least one candidate"),
        ({**A, "topk": [row((1, 2.0), (1, 3.0))] * 3}, "each token once"),
        ({**A, "topk": [A["topk"][0], "x", A["topk"][2]]}, r"topk\[1\]: expected"),
        ({**A, "topk": row(("a", 1.0))}, r'topk\[0\]: expected {"token": id'),
        ({**A, "topk": row((1, float("nan")))}, r'topk\[0\]: expected {"token": id'),
    ],
)
def test_what_is_no_recording_is_named(files, bad, message):
    with pytest.raises(InputError, match=message):
        compare(*files(a=A, b=bad))


def test_exit_status_and_output(files, capsys):
    b = {"prompt": [5, 6, 7], "topk": [A["topk"][0], row((4, 2.0), (3, 1.9)), A["topk"][2]]}
    a, b = map(str, files(a=A, b=b))
    assert main(["parity", a, b]) == 0
    assert "near_tie  1" in capsys.readouterr().out
    assert main(["parity", a, b, "--margin", "0.05", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["argmax_agree"], record["near_tie"], record["diverged"]) == (2, 0, 1)
    assert main(["parity", a, a + ".missing"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dsv4: error: ") and error.count("\n") == 1
