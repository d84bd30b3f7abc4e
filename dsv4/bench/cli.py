"""python -m dsv4 bench"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ..cli_support import Bars, FiniteRange, check_place, console, engine_options, given, model_option, say
from ..config import World
from ..files import replacing

BUSY = "dsv4.bench.busy"  # the key of a command's context


def _lengths(ctx, param, value: str | None) -> list[int] | None:
    try:
        return None if value is None else [int(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"expected numbers separated by commas, such as 1,2; found {value!r}") from error


@click.group(invoke_without_command=True)
@model_option
@click.option(
    "--contexts",
    callback=_lengths,
    metavar="N,N,…",
    help="Prompt and context lengths in tokens. Default: 128,512,2048,8000, as far as they fit.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Prefills per length.")
@click.option("--steps", type=click.IntRange(min=1), default=64, show_default=True, help="Decoded tokens per length.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of records instead of tables.")
@engine_options
@click.pass_context
def bench(ctx, model, contexts, repeats, steps, as_json, settings):
    """Measure speed and memory on this machine.

    Without a further command: loading, prefill and decoding (medians; the prompts are random token ids).

    \b
    Examples:
      python -m dsv4 bench
      python -m dsv4 bench --threads 1 --contexts 128,2048 --json
    """
    from .machine import busy

    ctx.meta[BUSY] = busy()  # before anything of ours runs
    if ctx.invoked_subcommand is not None:
        if wrong := given(ctx):
            raise click.UsageError(f"expected the options of `{ctx.invoked_subcommand}` after it, found {wrong[0]} before it")
        return
    from .engine import measure

    with Bars() as bars:
        records = measure(model, settings, contexts, repeats, steps, bars)
    if as_json:
        say(json.dumps(records, indent=1))
    else:
        _tables(records)


@bench.result_callback()
@click.pass_context
def _remark_of_the_machine(ctx, result, **options) -> None:
    if ctx.meta[BUSY] and World.from_env().rank == 0:
        print(f"dsv4: {ctx.meta[BUSY]}", file=sys.stderr)


@bench.command("speculate", short_help="What speculation costs and gains here.")
@model_option
@click.option("--tokens", type=click.IntRange(min=8), default=200, show_default=True, help="Tokens per text.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs per text and mode.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), metavar="FILE.png", help="Also draw the costs and the acceptance.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of records instead of tables.")
@engine_options
def speculate(model, tokens, repeats, picture, as_json, settings):
    """Measure what drafting and verifying cost here, and what speculation gains on four kinds of text.

    Plain, always the whole block, and gated, in turn on the same engine; then how well the confidence predicts acceptance.

    \b
    to plain    speed as a multiple of plain decoding's on the same text
    accepted    share of the drafted tokens that became part of the text
    skipped     rounds that verified no drafted token, or drafted none
    confidence  how sure the draft was of a token, as a logit
    n, matched  tokens whose outcome is known; the share that were right
    sigmoid     the share that their confidence promised: best if near matched

    \b
    Example:
      python -m dsv4 bench speculate --model nano
    """
    from .speculate import measure, open_pyplot, plot, render

    check_place(picture, "the picture")
    pyplot = open_pyplot() if picture else None
    with Bars() as bars:
        records = measure(model, settings, tokens, repeats, bars)
    if picture:
        plot(pyplot, records, picture)
    if as_json:
        say(json.dumps(records, indent=1))
    else:
        render(records)


def _counts(ctx, param, value: str | None) -> list[int] | None:
    found = _lengths(ctx, param, value)
    if found and min(found) < 1:
        raise click.BadParameter(f"expected numbers >= 1; found {value!r}")
    return found


@bench.command("serve", short_help="Several sequences side by side, or many clients.")
@model_option
@click.option("--sequences", callback=_counts, metavar="N,N,…", help="Sequences at once. Default: 1,2,4,8,16.")
@click.option("--tokens", type=click.IntRange(min=8), default=200, show_default=True, help="Tokens per answer.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each; the median counts.")
@click.option("--clients", type=click.IntRange(min=1), metavar="N", help="Run a load test with this many clients instead.")
@click.option("--seconds", type=FiniteRange(min=0.1), default=20, show_default=True, help="How long a load test takes.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of records instead of tables.")
@engine_options
@click.pass_context
def serve(ctx, model, sequences, tokens, repeats, clients, seconds, as_json, settings):
    """Measure how many more tokens several sequences side by side give than one, with speculation and without.

    With --clients: a load test of --seconds by many clients at once, some of which leave early. Every answer is compared
    with the one that its request gets alone. The exit status is 1 if an answer differs or fails, or a slot is not freed.

    \b
    Examples:
      python -m dsv4 bench serve --json
      python -m dsv4 bench serve --clients 16 --seconds 60
    """
    without = {"--seconds"} if clients is None else {"--sequences", "--tokens", "--repeats"}
    if wrong := [option for option in given(ctx) if option in without]:
        raise click.UsageError(f"{wrong[0]} has no meaning {'without' if clients is None else 'with'} --clients")
    from .serve import good, measure, render

    with Bars() as bars:
        records = measure(model, settings, sequences, tokens, repeats, clients, seconds, bars)
    if as_json:
        say(json.dumps(records, indent=1))
    else:
        render(records)
    if not good(records):
        ctx.exit(1)


def _kernel_options(threads: str = "1, and one per core"):
    """Options of the commands that measure kernels. threads: what they measure with by default."""

    def add(command):
        for option in (
            click.option("--json", "as_json", is_flag=True, help="Print a JSON list of records instead of a table."),
            click.option("--repeats", type=click.IntRange(min=1), metavar="N", help="How many calls are timed; their median counts."),
            click.option(
                "--threads", callback=_counts, metavar="N,N,…", help=f"Numbers of threads to measure with. Default: {threads}."
            ),
            click.option(
                "--like", default="real", show_default=True, metavar="real|nano|CONFIG.json", help="The model whose sizes are used."
            ),
        ):
            command = option(command)
        return command

    return add


def _measure_kernels(measure, like: str, repeats: int | None, as_json: bool, threads, experts: int | None = None) -> None:
    from ..synth import Recipe, read_config
    from . import machine

    config = Recipe.of(read_config(like), experts=experts).config
    with Bars() as bars:
        records = measure(config, threads, progress=bars, **({"repeats": repeats} if repeats else {}))
    where = {"like": like, **machine.describe()}
    if as_json:
        say(json.dumps([record | where for record in records], indent=1))
    else:
        _kernel_table(records, where)


@bench.command("experts", short_help="Routed experts and the indexer, beside memory bandwidth.")
@_kernel_options()
def experts_command(**options):
    """Measure routed experts and the indexer, cold in memory, beside the speed at which memory can be read.

    Weights are random and made in memory: no checkpoint is needed. First one row, with as many experts as a token
    chooses; then 6 rows, with the same experts and with different ones. Indexer: scoring the compressed entries of a
    context and choosing the best.

    \b
    Examples:
      python -m dsv4 bench experts
      python -m dsv4 bench experts --threads 1 --json

    \b
    JSON records: name, threads, rows, seconds (median), bytes (that must be read), gbs, bandwidth_gbs (measured in the
    same run), ratio (of the two); experts, to_one_row (seconds to those of one row); the machine. Indexer: entries,
    ns_per_entry, ops (multiply-adds of bytes), ops_rate (a second, measured from registers), ratio_ops (the longer of
    reading and multiplying at these speeds, to seconds).
    """
    from .experts import experts

    _measure_kernels(experts, **options)


@bench.command("staging", short_help="How fast experts are read from files.")
@_kernel_options()
def staging_command(**options):
    """Measure how fast experts are read into a staging buffer, from a checkpoint's shards and from a packed copy.

    The files are random, written to the temporary directory (about 1 GB) and still in the system's page cache when they
    are read. A rank of 4 reads a quarter of each expert: in a checkpoint a few bytes of every row of w2, in a packed copy
    one run.

    \b
    JSON records: as for `bench experts`; bytes of an expert's part, seconds to read it.
    """
    from .staging import staging

    _measure_kernels(staging, **options)


@bench.command("layer", short_help="A whole layer of every kind.")
@_kernel_options()
def layer_command(**options):
    """Measure a whole layer of every kind after 8,192 positions, and project the whole model from them.

    One row, then 6 rows with 6 to 36 different experts among them, beside the line base + slope · experts.

    \b
    JSON records: as for `bench experts`; line_seconds and to_line (measured to it); the record "whole model" has
    tokens_per_s and limit_tokens_per_s, at which its bytes could be read.
    """
    from .layers import layers

    _measure_kernels(layers, **options)


@bench.command("prefill", short_help="512 rows through a layer.")
@_kernel_options("one per core")
@click.option("--experts", type=click.IntRange(min=1), metavar="N", help="Routed experts of a layer. Default: the model's.")
def prefill_command(**options):
    """Measure 512 rows through a layer with all its experts, beside NumPy's float32 matrix product. Takes 4 GB.

    \b
    JSON records: as for `bench experts`, but ratio is gflops to matmul_gflops; rows_per_s.
    """
    from .layers import prefill

    _measure_kernels(prefill, **options)


@bench.command("cuda", short_help="The CUDA kernels, beside what the GPU can do.")
@click.option("--like", default="real", show_default=True, metavar="real|nano|CONFIG.json", help="The model whose sizes are used.")
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="Which GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of records instead of a table.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Also write the JSON there.")
def cuda_command(like, device, as_json, output):
    """Measure the CUDA kernels beside the card's copy bandwidth and matrix rate; needs a GPU with about 8 GB free.

    Linears, experts, attention, indexer, what runs between them, whole layers, forwards that verify drafts, and copies from
    pinned memory. Weights are random and made in memory. launch/gpu_check.sh also runs the tests on the device.

    \b
    JSON records: first the card; then name, rows, seconds, bytes and gbs or operations and tflops, ratio (to the card's copy
    bandwidth or its float16 matrix rate, measured in the same run), bar and met.
    """
    from ..ops import open_ops
    from ..synth import read_config
    from .cuda import measure, render

    check_place(output, "the JSON")
    config, ops = read_config(like), open_ops("cuda", device=device)
    with Bars() as bars:
        records = measure(ops, config, progress=bars)
    text = json.dumps(records, indent=1)
    if output:
        with replacing(output) as file:
            file.write(f"{text}\n".encode())
    if as_json:
        say(text)
    else:
        render(records)


def _kernel_table(records: list[dict], where: dict) -> None:
    from rich.table import Table

    out = console()
    spread = ", ".join(f"{count} on node {node}" for node, count in where["affinity"].items())
    out.print(f"{where['cpu']}, {where['cores']} cores ({spread}; memory nodes: {where['nodes']}); sizes: {where['like']}")
    table = Table("", "threads", "rows", "experts", "ms", "MB", "GB/s", "memory", "ratio", "", box=None)
    for column in table.columns[1:9]:
        column.justify = "right"
    for r in records:
        table.add_row(
            r["name"], str(r["threads"]), str(r["rows"]), str(r.get("experts", "")), f"{1e3 * r['seconds']:.2f}",
            f"{r['bytes'] / 1e6:.1f}", f"{r['gbs']:.1f}", f"{r['bandwidth_gbs']:.1f}", f"{r['ratio']:.2f}", _remark(r),
        )  # fmt: skip
    out.print(table)


def _remark(r: dict) -> str:
    """What only this kind of record says."""
    if "to_one_row" in r:
        return f"{r['to_one_row']:.2f} x one row"
    if "entries" in r:
        return f"{r['entries']:,} entries, {r['ns_per_entry']:.1f} ns each; of reading or multiplying: {r['ratio_ops']:.2f}"
    if "to_line" in r:
        return f"{r['to_line']:.2f} x line"
    if "tokens_per_s" in r:
        return f"{r['tokens_per_s']:.2f} tok/s; memory allows {r['limit_tokens_per_s']:.2f}"
    if "gflops" in r:
        return f"{r['gflops']:.0f} GFLOP/s; matrix product {r['matmul_gflops']:.0f}"
    return ""


def _placement(r: dict) -> str:
    """Where experts are, in a line."""
    if r["placement"] != "staged":
        return f"experts: {r['placement']}"
    found, mb = max(1, r["hits"] + r["misses"]), 1e-6
    return (f"experts: staged; planned {r['planned_cache_bytes'] * mb:.1f} MB resident, {r['planned_staging_bytes'] * mb:.1f} MB "
            f"of buffers; {r['hits'] / found:.0%} hits, {r['bytes_staged'] * mb:.0f} MB staged ({r['prefetched']} experts "
            f"ahead), waited {r['stall_s']:.2f} s")  # fmt: skip


def _tables(records: list[dict]) -> None:
    from rich.table import Table

    out = console()
    first = {record["name"]: record for record in reversed(records)}
    about, memory = first["load"], first["memory"]
    out.print(f"{about['model']}: backend {about['backend']} ({about['isa']}), {about['threads']} thread(s)")
    out.print(f"{about['cpu']}, {about['cores']} cores; Python {about['python']}, NumPy {about['numpy']}")
    own = f", {memory['own_peak_bytes'] / 1e6:.0f} MB without the mapped weights" if memory["own_peak_bytes"] else ""
    out.print(f"load {about['seconds']:.2f} s, peak memory {memory['peak_bytes'] / 1e6:.0f} MB{own} "
              f"(state planned: {memory['planned_state_bytes'] / 1e6:.0f} MB)")  # fmt: skip
    out.print(_placement(first["experts"]))
    table = Table("context", "prefill tok/s", "prefill s", "decode tok/s", "ms per token", "p90 ms")
    for column in table.columns:
        column.justify = "right"
    decoded = {record["tokens"]: record for record in records if record["name"] == "decode"}
    for record in (record for record in records if record["name"] == "prefill"):
        step = decoded[record["tokens"]]
        table.add_row(
            f"{record['tokens']:,}",
            f"{record['tokens_per_s']:,.0f}",
            f"{record['seconds']:.3f}",
            f"{step['tokens_per_s']:,.0f}",
            f"{1e3 * step['seconds']:.2f}",
            f"{1e3 * step['seconds_p90']:.2f}",
        )
    out.print(table)
    sent = first["exchange"]
    if sent["ranks"] > 1:
        out.print(f"{sent['ranks']} ranks; rank 0 holds {sent['weight_bytes'] / 1e6:.1f} MB of weights")
        for rank, (messages, count) in enumerate(zip(sent["messages_per_token"], sent["bytes_per_token"])):
            out.print(f"rank {rank} sends {messages:.1f} messages, {count / 1e3:.1f} kB per token")
