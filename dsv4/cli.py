"""The command line: python -m dsv4 COMMAND. Run it with --help, or a command with --help."""

from __future__ import annotations

import errno
import json
import os
import sys
from functools import partial
from pathlib import Path

import click

from . import __version__
from .bench.cli import bench
from .cli_chat import chat
from .cli_gate import gate
from .cli_pack import pack
from .cli_plan import plan
from .cli_serve import serve
from .cli_spec import Recorder, determinism, spec_options
from .cli_support import (
    Bars, FiniteRange, as_rank, check_place, draw_options, engine_options, load_engine, printable, prompt_options,
    read_prompt, say,
)  # fmt: skip
from .cli_synth import synth
from .config import World
from .errors import Dsv4Error
from .parity import MARGIN

HELP = {"help_option_names": ["-h", "--help"]}
ENGINE_COMMANDS = ("bench", "chat", "determinism", "generate", "logits", "serve")  # which several ranks run together


@click.group(context_settings=HELP)
@click.version_option(__version__, prog_name="dsv4")
@click.pass_context
def cli(ctx):
    """Run DeepSeek-V4-Flash checkpoints in their published format.

    A model is a checkpoint directory, or "nano": a tiny model that comes with the package.

    \b
    First steps:
      python -m dsv4 generate --prompt "Once upon a time" --max-tokens 40
      python -m dsv4 chat
      python -m dsv4 serve
      python -m dsv4 inspect DIR
      python -m dsv4 COMMAND --help

    Settings that are not given as options may come from the environment: DSV4_BACKEND, DSV4_THREADS,
    DSV4_MAX_CONTEXT, DSV4_MAX_SESSIONS, DSV4_CHUNK, DSV4_DEBUG, DSV4_EXPERT_CACHE, DSV4_PACKED; DSV4_API_KEY (serve);
    DSV4_INIT_TIMEOUT (how many seconds ranks wait for each other at the start).

    Started by mpirun, the processes run one model together.
    """
    if World.from_env().rank and ctx.invoked_subcommand not in ENGINE_COMMANDS:
        ctx.exit()  # rank 0 does it


cli.add_command(bench)
cli.add_command(chat)
cli.add_command(determinism)
cli.add_command(gate)
cli.add_command(pack)
cli.add_command(plan)
cli.add_command(serve)
cli.add_command(synth)


@cli.command()
@prompt_options
@click.option("--max-tokens", type=int, default=128, show_default=True, metavar="N", help="End after this many new tokens.")
@draw_options
@click.option(
    "--top-k", type=int, default=0, show_default=True, metavar="K", help="Choose among the K most likely tokens; 0: all."
)
@click.option(
    "--min-p",
    type=float,
    default=0.0,
    show_default=True,
    metavar="P",
    help="Leave out tokens less likely than this times the most likely one; 0: none.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text (may be given several times).")
@click.option(
    "--stop-id", "stop_ids", multiple=True, type=int, metavar="ID", help="End at this token id (may be given several times)."
)
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end token.")
@click.option(
    "--logprobs",
    type=int,
    metavar="N",
    help="With --json: the log-probability of every token, and of the N ≤ 20 most likely ones at its place.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record at the end instead of the text.")
@spec_options
@engine_options
def generate(model, prompt, prompt_file, tokens, as_json, settings, spec, record_rounds, gate, **sampling):
    """Continue a prompt.

    The text appears as it is made (token ids, if the model has no tokenizer). A text prompt gets the model's begin
    token in front unless it already starts with it; names of special tokens, such as <think>, become those tokens.
    Token ids are taken as they are.

    \b
    Examples:
      python -m dsv4 generate --prompt "Once upon a time" --max-tokens 40 --temperature 0
      python -m dsv4 generate --model DIR --prompt-file story.txt --seed 7 --stop "The end"
      python -m dsv4 generate --tokens 0,63,549 --temperature 0 --json

    \b
    The JSON record: text, tokens, finish_reason ("stop" or "length"), usage {prompt_tokens, completion_tokens},
    timings {load_s, prefill_s, decode_s, prefill_tps, decode_tps}, speculation {mode, rounds, drafted, accepted,
    accept_rate, skipped_rounds, margin_skipped_rounds}; with --expert-cache also experts {hits, misses, prefetched,
    bytes_staged, stall_s}; with --logprobs also logprobs, a list of {token, logprob, top: [{token, logprob}]}. tokens
    includes the end token or stop id that ended it, text does not.
    """
    from .generate import complete
    from .sampling import SamplingParams

    if sampling["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json")
    params = SamplingParams(**sampling)
    check_place(record_rounds, "rounds")
    request = read_prompt(prompt, prompt_file, tokens)
    with Bars() as bars:
        engine, load_s = load_engine(model, {**settings, "max_sessions": 1, "gate": gate}, bars)
        recorder = Recorder("prompt", record_rounds, engine, f"{model}, --spec {spec}") if record_rounds else None
        printer = None if as_json else partial(_print_step, bars, engine.tokenizer is not None)
        try:
            result = complete(engine, request, params, bars, printer, spec, recorder)
        except KeyboardInterrupt:
            if not as_json:
                say("")
            if recorder:
                recorder.write()
            raise
    say(json.dumps(_record(result, load_s, engine.experts), ensure_ascii=False) if as_json else "")
    if recorder:
        recorder.write()


def _print_step(bars: Bars, text: bool, step) -> None:
    bars.stop()
    shown = printable(step.text) if sys.stdout.isatty() else step.text
    say(shown if text else f"{step.token} ", end="")


def _record(result, load_s: float, experts: dict | None) -> dict:
    record = {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "usage": {"prompt_tokens": result.prompt_tokens, "completion_tokens": result.completion_tokens},
        "timings": {"load_s": load_s, **result.timings},
        "speculation": result.speculation,
    }
    if experts is not None:
        record["experts"] = experts
    return record if result.logprobs is None else {**record, "logprobs": result.logprobs}


@cli.command()
@click.argument("directory", metavar="DIR|nano")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--deep", is_flag=True, help="Also read all data and check every value (slow on a large checkpoint).")
def inspect(directory, as_json, deep):
    """Describe a checkpoint without running it.

    Layers, experts, draft stages, bytes by kind, what fits where. Without --deep only the headers are read, which takes
    seconds at any size.

    \b
    Examples:
      python -m dsv4 inspect nano
      python -m dsv4 inspect /models/DeepSeek-V4-Flash --json
    """
    from .config import RunConfig
    from .engine import model_directory
    from .inspection import describe, render

    RunConfig.from_env()  # a misspelt setting is an error here too
    report = describe(model_directory(directory), deep=deep)
    say(json.dumps(report, ensure_ascii=False) if as_json else render(report))


@cli.command()
@prompt_options
@click.option(
    "--topk", type=click.IntRange(min=1), default=5, show_default=True, metavar="K", help="Candidates per position."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE.safetensors",
    help="Write all logits: one tensor `logits`, float32 [tokens, vocabulary], a row per token.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record, which `parity` can compare.")
@engine_options
def logits(model, prompt, prompt_file, tokens, topk, out, as_json, settings):
    """Print the logits after every token of a prompt.

    They are the model's scores of the token that comes next, before they become probabilities. Shown are the best.

    \b
    Examples:
      python -m dsv4 logits --tokens 0,63,549 --topk 3
      python -m dsv4 logits --model DIR --prompt "Once upon" --topk 10 --json > a.json
      python -m dsv4 logits --tokens 1,2,3 --out logits.safetensors

    \b
    The JSON record: {"prompt": [ids], "topk": [[{"token", "logit"}, …], …]}: for each position of the prompt the K
    best candidates for the token after it, best first.
    """
    from .logits import record, render

    check_place(out, "logits")
    request = read_prompt(prompt, prompt_file, tokens)
    with Bars() as bars:
        engine, _ = load_engine(model, settings, bars)
        result = record(engine, request, topk, out, bars)
    if as_json:
        say(json.dumps(result))
    else:
        say(f"{out}: logits [{len(result['prompt'])}, {engine.config.vocab_size}]" if out else render(engine, result))


@cli.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--margin",
    type=FiniteRange(min=0),
    default=MARGIN,
    show_default=True,
    help="How close A's two best logits must be for another choice of B to count as a tie.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def parity(ctx, a, b, margin, as_json):
    """Compare two recordings of `logits --json`.

    Made by two backends, say, or two engines. Every position is argmax_agree (same best token), near_tie (another one, but A
    itself was nearly undecided) or diverged. The exit status is 0 if nothing diverged, else 1. A recording may also hold
    one flat list of candidates, {"prompt": …, "topk": [{"token", "logit"}, …]}: then the last position alone is compared.

    \b
    Example:
      python -m dsv4 parity a.json b.json --margin 0.3
    """
    from .parity import compare, render

    report = compare(a, b, margin)
    say(json.dumps(report.as_dict()) if as_json else render(report))
    ctx.exit(1 if report.count("diverged") else 0)


def main(arguments: list[str] | None = None) -> int:
    """Run a command → its exit status: 2 for what the user can correct (one line on stderr), 130 after Ctrl-C."""
    if sys.stdout is None or sys.stdout.closed:
        print("dsv4: error: standard output: expected it open, found it closed", file=sys.stderr)
        return 2
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows "?" instead of failing
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    return as_rank(lambda: _run(arguments), meets=bool(arguments) and arguments[0] in ENGINE_COMMANDS)


def _run(arguments: list[str]) -> int:
    try:
        with cli.make_context("python -m dsv4", arguments) as context:
            cli.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: nothing to flush at exit
        return 141
    except Dsv4Error as error:
        print(f"dsv4: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"dsv4: error: standard output: expected to write to it, found: {error.strerror}", file=sys.stderr)
        return 2
