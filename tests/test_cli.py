"""The command line on the embedded model: what each option does, errors, streaming, interruption."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

import dsv4
from dsv4.cli import _print_step, cli, main
from dsv4.cli_support import Bars
from dsv4.config import VARIABLES

PROMPT = "Once upon a time"


@pytest.fixture
def run(capfd):
    """run("generate", …) → (exit status, stdout, stderr) of the command in this process."""

    def call(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, *capfd.readouterr()

    return call


@pytest.fixture
def generate(run):
    """The JSON record of a generate command; greedy and short unless told otherwise."""

    def call(*options, prompt=("--prompt", PROMPT)):
        defaults = {"--temperature": "0", "--max-tokens": "12"}
        given = [x for name, value in defaults.items() if name not in options for x in (name, value)]
        status, out, err = run("generate", *prompt, "--json", *given, *options)
        assert (status, err) == (0, ""), err
        return json.loads(out)

    return call


def python(*arguments, **options):
    command = [sys.executable, "-m", "dsv4", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def refused(result, *parts):
    """One line on stderr with all parts, status 2, nothing on stdout."""
    status, out, err = result
    assert status == 2 and out == "" and err.startswith("dsv4: error: ") and err.count("\n") == 1, err
    for part in parts:
        assert part in err
    return True


# ------------------------------------------------------------------------------------------------ generate
def test_text_comes_out_twice_the_same(run, generate):
    greedy = ("generate", "--prompt", PROMPT, "--max-tokens", 12, "--temperature", 0)
    first, second = run(*greedy), run(*greedy)
    assert first == second == (0, generate()["text"] + "\n", "")
    assert generate()["text"].startswith(", ")


def test_the_record(generate):
    record = generate()
    assert list(record) == ["text", "tokens", "finish_reason", "usage", "timings", "speculation"]
    assert record["usage"] == {"prompt_tokens": 11, "completion_tokens": 12} and len(record["tokens"]) == 12
    assert list(record["timings"]) == ["load_s", "prefill_s", "decode_s", "prefill_tps", "decode_tps"]
    assert all(value > 0 for value in record["timings"].values())
    assert record["finish_reason"] == "length"


def test_the_prompt_can_be_text_file_input_or_ids(generate, tmp_path, monkeypatch):
    expected = generate()["tokens"]
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    assert generate(prompt=("--prompt-file", str(file)))["tokens"] == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    assert generate(prompt=("--prompt-file", "-"))["tokens"] == expected
    ids = dsv4.Engine.load("nano").tokenizer.encode_prompt(PROMPT)
    assert generate(prompt=("--tokens", ",".join(map(str, ids))))["tokens"] == expected
    bare = generate(prompt=("--tokens", ",".join(map(str, ids[1:]))))
    assert bare["usage"]["prompt_tokens"] == len(ids) - 1  # ids get no begin token


def test_max_tokens_cuts(generate):
    long = generate()["tokens"]
    assert all(generate("--max-tokens", n)["tokens"] == long[:n] for n in (1, 5))


def test_options_that_leave_one_choice_are_greedy(generate):
    greedy = generate()["tokens"]
    for option in (("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1), ("--temperature", 0, "--seed", 9)):
        assert generate("--temperature", 1.5, "--seed", 4, *option)["tokens"] == greedy


@pytest.mark.parametrize(
    "option", [("--seed", 8), ("--temperature", 4), ("--top-k", 2), ("--top-p", 0.5), ("--min-p", 0.9)]
)
def test_options_that_change_the_draw(generate, option):
    base = ("--temperature", 2, "--seed", 4, "--max-tokens", 30)
    plain = generate(*base)["tokens"]
    assert generate(*base)["tokens"] == plain
    assert generate(*base, *option)["tokens"] != plain


def test_without_options_sampling_is_as_the_model_asks(run):
    outputs = {run("generate", "--tokens", "0", "--max-tokens", 30)[1] for _ in range(3)}
    assert len(outputs) > 1  # temperature 1, a new seed each time


def test_stops(generate):
    plain = generate()
    token = plain["tokens"][4]
    first = plain["tokens"].index(token)
    by_id = generate("--stop-id", 639, "--stop-id", token)
    assert by_id["tokens"] == plain["tokens"][: first + 1] and by_id["finish_reason"] == "stop"
    word = plain["text"].split()[2]
    by_text = generate("--stop", "no such text", "--stop", word)
    assert by_text["text"] == plain["text"][: plain["text"].index(word)] and by_text["finish_reason"] == "stop"


def test_the_end_token(generate, nano_dir, tmp_path):
    """The embedded model with another end token: one that it says."""
    plain = generate()
    end = plain["tokens"][4]
    for file in nano_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = json.loads((nano_dir / "config.json").read_text()) | {"eos_token_id": end}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ended = generate("--model", str(tmp_path))
    assert ended["tokens"] == plain["tokens"][: plain["tokens"].index(end) + 1] and ended["finish_reason"] == "stop"
    assert plain["text"].startswith(ended["text"]) and ended["usage"]["completion_tokens"] == len(ended["tokens"])
    beyond = generate("--model", str(tmp_path), "--ignore-eos")
    assert (beyond["tokens"], beyond["finish_reason"]) == (plain["tokens"], "length")


def test_logprobs(generate, run):
    record = generate("--logprobs", 2)
    assert [entry["token"] for entry in record["logprobs"]] == record["tokens"] == generate()["tokens"]
    for entry in record["logprobs"]:
        assert len(entry["top"]) == 2 and entry["top"][0] == {"token": entry["token"], "logprob": entry["logprob"]}
    status, _, err = run("generate", "--prompt", PROMPT, "--logprobs", 2)
    assert status == 2 and "--logprobs needs --json" in err


def test_settings_of_the_machine_do_not_change_the_tokens(generate, monkeypatch):
    expected = generate()["tokens"]
    for option in (("--threads", 1), ("--threads", 2), ("--chunk", 3), ("--max-context", 100), ("--debug",)):
        assert generate(*option)["tokens"] == expected
    monkeypatch.setenv("DSV4_CHUNK", "2")
    assert generate()["tokens"] == expected


def test_max_context_by_option_beats_the_environment(generate, run, monkeypatch):
    cut = generate("--max-context", 15)
    assert cut["finish_reason"] == "length" and cut["usage"] == {"prompt_tokens": 11, "completion_tokens": 4}
    monkeypatch.setenv("DSV4_MAX_CONTEXT", "11")
    assert refused(run("generate", "--prompt", PROMPT), "prompt: expected at most 10 tokens", "found 11")
    assert generate("--max-context", 15)["tokens"] == cut["tokens"]
    monkeypatch.setenv("DSV4_MAX_CONTEXT", "lots")
    refused(run("generate", "--prompt", PROMPT), "DSV4_MAX_CONTEXT", "lots")


def test_another_backend_can_be_named(generate):
    assert generate("--backend", "reference", "--max-tokens", 3)["usage"]["completion_tokens"] == 3


def test_ids_where_there_is_no_tokenizer(run, tiny_root):
    arguments = (
        "generate",
        "--model",
        tiny_root / "tiny-m",
        "--tokens",
        "5,6,7",
        "--max-tokens",
        4,
        "--temperature",
        0,
    )
    status, out, _ = run(*arguments)
    record = json.loads(run(*arguments, "--json")[1])
    assert status == 0 and out == "".join(f"{token} " for token in record["tokens"]) + "\n"
    assert record["text"] == ""
    refused(run("generate", "--model", tiny_root / "tiny-m", "--prompt", "x"), "no tokenizer.json")


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--tokens", "1,2,640"], ["0..639", "640"]),
        (["--tokens", ""], ["expected at least one token"]),
        (["--prompt", ""], ["expected at least one token"]),
        (["--prompt-file", "/no/such/file"], ["/no/such/file", "No such file"]),
        (["--prompt", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["--prompt", "x", "--top-p", "0"], ["top_p", "0"]),
        (["--prompt", "x", "--max-tokens", "0"], ["max_tokens", "0"]),
        (["--prompt", "x", "--stop", ""], ["stop: expected non-empty"]),
        (["--prompt", "x", "--stop-id", "640"], ["stop_ids", "640"]),
        (["--prompt", "x", "--json", "--logprobs", "21"], ["logprobs", "21"]),
        (["--prompt", "x", "--backend", "abacus"], ["backend", "abacus"]),
        (["--prompt", "x", "--max-context", "9000"], ["max_context", "8192", "9000"]),
        (["--prompt", "x", "--threads", "0"], ["threads", "0"]),
        (["--prompt", "x", "--model", "/no/such/model"], ["/no/such/model"]),
    ],
)
def test_what_the_user_can_mend_is_one_line(run, arguments, parts):
    refused(run("generate", *arguments), *parts)


def test_a_prompt_file_must_be_utf8(run, tmp_path):
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    refused(run("generate", "--prompt-file", tmp_path / "prompt"), "expected UTF-8 text; found byte 0xff at 2")


def test_a_failure_prints_no_record(run, monkeypatch):
    """Also an error in the middle: nothing of the record appears."""
    from dsv4.session import Session

    forward = Session.forward

    def poisoned(session, *arguments):
        output = forward(session, *arguments)
        if session.position > 13:
            output.logits[:, 7] = np.nan
        return output

    monkeypatch.setattr(Session, "forward", poisoned)
    refused(run("generate", "--prompt", PROMPT, "--json"), "expected finite numbers", "at token 7")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--prompt", "x", "--temprature", "0"],
        ["generate"],
        ["generate", "--prompt", "x", "--tokens", "1"],
        ["generate", "--tokens", "1,b"],
        ["generate", "--prompt", "x", "--seed", "x"],
        ["generate", "stray"],
        ["inspect"],
        ["logits", "--tokens", "1", "--topk", "0"],
        ["parity", "a"],
        ["parity", "a", "b", "--margin", "-1"],
        ["bench", "--contexts", "5,x"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_refused(arguments):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2 and "Usage:" in result.output
    assert main(arguments) == 2


@pytest.mark.parametrize("command", ["generate", "inspect", "logits", "parity", "bench"])
def test_every_command_explains_itself(command):
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0 and "Example" in result.output and f"python -m dsv4 {command}" in result.output


def test_the_overview_names_every_setting():
    text = CliRunner().invoke(cli, ["--help"]).output
    assert all(name in text for name in VARIABLES)


@pytest.mark.parametrize("group", [(), ("bench",), ("gate",)])
def test_no_summary_is_cut(group):
    commands = CliRunner().invoke(cli, [*group, "--help"]).output.partition("Commands:")[2]
    assert commands and "..." not in commands


# ------------------------------------------------------------------------------------------------ as a process
def test_version():
    out, err = python("--version").communicate()
    assert (out.decode(), err) == (f"dsv4, version {dsv4.__version__}\n", b"")


ENDLESS = ("generate", "--prompt", PROMPT, "--max-tokens", 8000, "--ignore-eos", "--temperature", 0)


def test_text_streams_and_ctrl_c_keeps_it():
    process = python(*ENDLESS)
    begun = os.read(process.stdout.fileno(), 10_000)
    assert 0 < len(begun) < 100  # what there was then, not a filled buffer
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in err and err.strip() == b""
    assert (begun + rest).decode().startswith(",") and rest.endswith(b"\n")


def test_a_reader_that_goes_away_is_no_error():
    process = python(*ENDLESS)
    process.stdout.read(20)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=30) == 141


def test_letters_the_terminal_lacks_do_not_stop_the_text():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = python("logits", "--tokens", "0,3", "--topk", 1, env=environment)
    out, err = process.communicate()
    assert process.returncode == 0 and err == b"" and b"<?User?>" in out


def test_progress_shows_on_a_terminal_only():
    arguments = ("generate", "--prompt", PROMPT, "--max-tokens", 5, "--temperature", 0)
    plain, err = python(*arguments).communicate()
    assert err == b""
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dsv4", *map(str, arguments)], stdout=subprocess.PIPE, stderr=side
    )
    os.close(side)
    out, shown = process.stdout.read(), b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how a closed terminal ends on Linux
            part = b""
        if not part:
            break
        shown += part
    os.close(terminal)
    assert process.wait() == 0 and out == plain and b"load" in shown and b"prefill" in shown


def test_importing_the_package_stays_light():
    code = (
        "import sys, dsv4, dsv4.sampling, dsv4.generate, dsv4.tokenizer, dsv4.engine\n"
        "print([m for m in ('click', 'rich', 'tokenizers', 'safetensors', 'dsv4._cpu') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# ------------------------------------------------------------------------------------------------ other commands
def test_inspect(run, nano_dir):
    status, out, _ = run("inspect", "nano")
    assert status == 0 and "draft" in out
    report = json.loads(run("inspect", nano_dir, "--json")[1])
    assert report["experts"]["routed"] == 8
    assert json.loads(run("inspect", "nano", "--deep", "--json")[1])["checked"] != report["checked"]
    refused(run("inspect", "/no/such/model"), "/no/such/model")


@pytest.fixture
def tokens():
    return np.random.default_rng(1).integers(0, 640, 23).tolist()


def test_logits_of_every_token(run, tmp_path, tokens):
    out = tmp_path / "logits.safetensors"
    ids = ",".join(map(str, tokens))
    status, text, _ = run("logits", "--tokens", ids, "--out", out, "--chunk", 11)
    assert status == 0 and "[23, 640]" in text and os.listdir(tmp_path) == [out.name]
    saved = load_file(out)
    with dsv4.Engine.load("nano").session() as session:
        expected = session.forward(tokens, "all").logits
    assert list(saved) == ["logits"] and saved["logits"].dtype == np.float32
    np.testing.assert_array_equal(saved["logits"].view(np.uint32), expected.view(np.uint32))

    record = json.loads(run("logits", "--tokens", ids, "--topk", 3, "--json")[1])
    assert record["prompt"] == tokens and len(record["topk"]) == 23
    for row, best in zip(expected, record["topk"]):
        order = np.argsort(-row, kind="stable")[:3]
        assert best == [{"token": int(i), "logit": float(row[i])} for i in order]


def test_logits_for_people(run):
    out = run("logits", "--prompt", "Once", "--topk", 2)[1].splitlines()
    assert len(out) == 1 + len(dsv4.Engine.load("nano").tokenizer.encode("Once")) and "→" in out[0]


def test_logits_that_cannot_be_written_leave_the_old_file(run, tmp_path, monkeypatch):
    place = tmp_path / "no" / "x"
    refused(run("logits", "--model", "/nowhere", "--tokens", "1", "--out", place), f"{place}: expected a place to write logits to")
    old = tmp_path / "x"
    old.write_text("old")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused(run("logits", "--tokens", "1", "--out", old), "No space left on device")
    assert old.read_text() == "old" and os.listdir(tmp_path) == ["x"]


def test_logits_up_to_the_context_and_no_further(run):
    status, out, _ = run("logits", "--tokens", "1,2,3", "--max-context", 3, "--json")
    assert status == 0 and len(json.loads(out)["topk"]) == 3
    refused(run("logits", "--tokens", "1,2,3,4", "--max-context", 3), "at most 3", "found 4")


def test_recordings_compare(run, tmp_path, tokens):
    ids = ",".join(map(str, tokens))
    for name, chunk in (("a", 4), ("b", 23)):
        (tmp_path / name).write_text(run("logits", "--tokens", ids, "--topk", 5, "--json", "--chunk", chunk)[1])
    status, out, _ = run("parity", tmp_path / "a", tmp_path / "b", "--json")
    report = json.loads(out)
    assert status == 0 and report["argmax_agree"] == 23 and report["max_difference"] == 0


def test_bench_measures(run):
    options = ("--contexts", "16,40", "--repeats", 1, "--steps", 2)
    status, out, _ = run("bench", *options, "--json")
    records = json.loads(out)
    assert status == 0
    found = [(record["name"], record.get("tokens")) for record in records]
    assert found == [("load", None), *[(n, t) for t in (16, 40) for n in ("prefill", "decode")],
                     ("exchange", None), ("memory", None), ("experts", None)]  # fmt: skip
    for record in records:
        assert {"model", "backend", "threads", "cpu", "cores", "isa", "python", "numpy"} <= record.keys()
        assert record["name"] in ("exchange", "memory", "experts") or record["seconds"] > 0
        assert "tokens" not in record or record["tokens_per_s"] > 0
    assert records[-2]["peak_bytes"] > 1e7 and records[-1]["placement"]
    status, table, _ = run("bench", *options)
    assert status == 0 and "decode tok/s" in table and "40" in table
    refused(run("bench", "--contexts", "8191", "--steps", 2), "contexts: expected 1 to 8190", "8191")
    refused(run("bench", "--steps", 60, "--max-context", 60), "steps: expected at most 59", "found 60")
    status, out, _ = run("bench", "--repeats", 1, "--steps", 1, "--max-context", 60, "--json")  # shorter than any default
    assert status == 0 and [r["tokens"] for r in json.loads(out) if r["name"] == "prefill"] == [59]


def test_rounds_are_recorded_and_replayed(run, generate, tmp_path):
    path = tmp_path / "rounds.json"
    record = generate("--spec", "always", "--record-rounds", path, "--max-tokens", "30")["speculation"]
    found = json.loads(path.read_text())
    rounds = found["prompts"]["prompt"]
    assert (len(rounds), sum(one["k"] for one in rounds)) == (record["rounds"], record["drafted"])
    assert found["block_size"] == 5 and all(one["margin"] >= 0 and one["verify_ms"] > 0 for one in rounds if one["k"])
    status, out, _ = run("gate", "replay", path, "--rule", "always", "--json")
    assert status == 0 and json.loads(out)["lengths"]["prompt"] == [one["k"] for one in rounds]
    nowhere = ("--model", "/nowhere", "--record-rounds", tmp_path / "no" / "where")  # told before anything is loaded
    assert refused(run("generate", "--prompt", "x", *nowhere), "expected a place to write")
    assert refused(run("generate", "--prompt", "x", "--record-rounds", "x" * 300), "expected a place to write")
    generate("--max-tokens", "1", "--record-rounds", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_spec_changes_the_counters_and_nothing_else(generate):
    off, always, gate = (generate("--spec", spec, "--max-tokens", "40") for spec in ("off", "always", "gate"))
    assert off["text"] == always["text"] == gate["text"] and off["tokens"] == always["tokens"] == gate["tokens"]
    assert [r["speculation"]["mode"] for r in (off, always, gate)] == ["off", "always", "gate"]
    assert off["speculation"]["drafted"] == 0 < always["speculation"]["accepted"]


def test_determinism(run):
    status, out, _ = run("determinism", "--max-tokens", "25", "--json")
    report = json.loads(out)
    assert status == 0 and report["identical"] and len(report["cells"]) == 16
    status, out, _ = run("determinism", "--max-tokens", "10")
    assert status == 0 and "every token and every logit the same" in out
    status, out, err = run("determinism", "--max-context", "20")
    assert status == 2 and not out and "expected a context above" in err and "found 20; load with" in err


def test_determinism_would_show_a_difference(run, monkeypatch):
    from dsv4 import determinism

    real = determinism.run

    def wrong(engine, prompt, spec, n):
        tokens, logits = real(engine, prompt, spec, n)
        if spec == "always":
            logits[7, 3] += 1e-3
        return tokens, logits

    monkeypatch.setattr(determinism, "run", wrong)
    status, out, _ = run("determinism", "--max-tokens", "10")
    assert status == 1 and "DIFFERENT" in out and "always/plain: first at token 7" in out


def test_output_that_cannot_be_written():
    for redirect, message in ((">&-", "found it closed"), (">/dev/full", "No space left")):
        command = f"exec {sys.executable} -m dsv4 generate --prompt x --max-tokens 3 --temperature 0 {redirect}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_terminal_is_shown_control_characters_and_a_file_gets_them(monkeypatch, capsys):
    step = SimpleNamespace(text="a\x1b[2J\n", token=1)
    _print_step(Bars(), True, step)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _print_step(Bars(), True, step)
    assert capsys.readouterr().out == "a\x1b[2J\na\\x1b[2J\n"


@pytest.mark.parametrize("line", [("serve", "--timeout", "nan"), ("serve", "--drain", "inf"), ("bench", "serve", "--seconds", "nan"),
                                  ("parity", "a", "b", "--margin", "nan")])  # fmt: skip
def test_no_number_is_no_bound(run, line):
    status, _, err = run(*line)
    assert status == 2 and "is not a finite number" in err
