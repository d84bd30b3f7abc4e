"""Sequences side by side: how much more several give than one, and what many clients at once may expect."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..cli_support import console
from ..determinism import prompts
from ..engine import Engine
from ..generate import complete
from ..sampling import SamplingParams
from ..scheduler import Request, Scheduler
from . import machine
from .speculate import texts

COUNTS = (1, 2, 4, 8, 16)
SPECS = ("gate", "off")
WAVES = 4  # requests per sequence that runs until all of which are answered
BEHIND = 2  # such waves wait behind them: so many sequences run to the end, whichever are slow
RUNNING = 8  # sequences of the load test; the other clients wait
PREFIX_BYTES = 16 << 20
SECONDS = np.geomspace(1e-5, 1e4, 4501)  # bounds of the times that are counted together, half a percent apart


def throughput(engine: Engine, spec: str, running: int, tokens: int) -> dict:
    """So many sequences at all times, each followed by another, greedy, over four kinds of text → tokens of answers a second."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    kinds = list(prompts(engine).values())
    jobs = (WAVES + BEHIND) * running
    with Scheduler(engine, max_running=running, max_waiting=jobs, spec=spec) as scheduler:
        start = time.perf_counter()
        tickets = [scheduler.submit(Request(kinds[i % len(kinds)], params)) for i in range(jobs)]
        for ticket in tickets[: WAVES * running]:
            ticket.result()
        stats, seconds = scheduler.stats(), time.perf_counter() - start
    return {
        "name": "throughput", "spec": spec, "sequences": running, "seconds": seconds,
        "tokens_per_s": stats["generated_tokens"] / seconds, "rows_per_step": stats["rows"] / stats["steps"],
        "drafted": stats["drafted"], "accepted": stats["accepted"], "rounds": stats["rounds"],
        "skipped_rounds": stats["skipped_rounds"], "forward_share": stats["step_s"] / seconds,
        "draft_share": stats["draft_s"] / seconds,
    }  # fmt: skip


def throughputs(engine: Engine, counts: Sequence[int], tokens: int, repeats: int, progress: Callable | None) -> list[dict]:
    """Records "throughput" of every mode and number of sequences, of which 1 is one: the median of interleaved runs.

    ratio_to_one: the median of the ratios to one sequence within a round of runs, as the machine's speed moves between rounds.
    """
    runs = [(spec, running) for spec in SPECS for running in counts]
    for spec in SPECS:
        throughput(engine, spec, counts[-1], 8)  # warm-up
    found = {run: [] for run in runs}
    for repeat in range(repeats):
        for done, (spec, running) in enumerate(runs, 1):
            found[spec, running].append(throughput(engine, spec, running, tokens))
            if progress:
                progress("measure", repeat * len(runs) + done, repeats * len(runs))
    records = []
    for spec, running in runs:
        speeds = [run["tokens_per_s"] for run in found[spec, running]]
        record = found[spec, running][speeds.index(statistics.median_low(speeds))]
        ratios = [speed / run["tokens_per_s"] for speed, run in zip(speeds, found[spec, 1])]
        records.append({**record, "tokens": tokens, "ratio_to_one": statistics.median(ratios)})
    return records


# ---------------------------------------------------------------------- many clients
def jobs_of(engine: Engine) -> list[Request]:
    """Requests of mixed lengths and parameters, some with beginnings in common, none longer than the engine's context."""
    kinds, rng = list(prompts(engine).values()), np.random.default_rng(0)
    jobs = []
    for number in range(24):
        text = (kinds[number % 4] + kinds[number % 3]) * 4
        room = engine.max_context // 2
        prompt = text[: int(rng.integers(1, min(room, len(text))))]
        sampling = SamplingParams(
            temperature=(0, 1.0, 0.7)[number % 3], seed=number, max_tokens=int(rng.integers(1, min(room, 96))),
            ignore_eos=number % 2 == 0, top_p=(1, 0.9)[number % 2],
        )  # fmt: skip
        jobs.append(Request(prompt, sampling, ("gate", "gate", "always", "off")[number % 4]))
    return jobs


class Client(threading.Thread):
    """Asks for one job after another until the time is up; now and then it goes away in the middle of an answer."""

    def __init__(self, number: int, scheduler: Scheduler, jobs: list[Request], expected: list[list[int]], until: float):
        super().__init__(daemon=True)
        self.scheduler, self.jobs, self.expected, self.until = scheduler, jobs, expected, until
        self.rng = np.random.default_rng(number)
        self.answered = self.left = self.tokens = 0
        self.first_s = np.zeros(len(SECONDS), int)  # answers by the time to their first token: no more memory for more
        self.wrong: list[str] = []  # a line for everything that should not have been

    def run(self) -> None:
        while time.perf_counter() < self.until:
            number = int(self.rng.integers(len(self.jobs)))
            stay = len(self.expected[number])
            if self.rng.random() < 0.2:
                stay = int(self.rng.integers(0, stay + 1))
            try:
                self._ask(number, stay)
            except Exception as error:
                self.wrong.append(f"request {number}: {type(error).__name__}: {error}")

    def _ask(self, number: int, stay: int) -> None:
        start, found = time.perf_counter(), []
        with self.scheduler.submit(self.jobs[number]) as ticket:
            for piece in ticket:
                if not found:
                    self.first_s[np.searchsorted(SECONDS[:-1], time.perf_counter() - start)] += 1
                found.append(piece.token)
                if len(found) >= stay:
                    break
        expected = self.expected[number]
        self.answered, self.left = self.answered + (stay == len(expected)), self.left + (stay < len(expected))
        self.tokens += len(found)
        if found[:stay] != expected[:stay]:
            self.wrong.append(f"request {number}: expected {expected[:stay]}, found {found}")


def percentiles(counts: np.ndarray) -> dict[str, float]:
    """Seconds that 50, 95 and 99% of the answers took at most, from counts by SECONDS; empty where there were none."""
    below = np.cumsum(counts)
    return {f"p{p}": float(SECONDS[np.searchsorted(below, below[-1] * p / 100)]) for p in (50, 95, 99) if below[-1]}


def load(engine: Engine, clients: int, seconds: float, progress: Callable | None = None) -> dict:
    """The record "load": so many clients for so long, every answer compared with the one that its request gets alone.

    memory_start_bytes is taken after a tenth of the time, when every part has run. `wrong` says what went wrong; stats,
    taken once all have left, what still runs or waits.
    """
    jobs = jobs_of(engine)
    expected = [complete(engine, job.tokens, job.sampling, spec="off").tokens for job in jobs]
    with Scheduler(
        engine, max_running=min(RUNNING, engine.pool.slots), max_waiting=2 * clients, prefix_bytes=PREFIX_BYTES
    ) as scheduler:
        start = time.perf_counter()
        crowd = [Client(number, scheduler, jobs, expected, start + seconds) for number in range(clients)]
        for client in crowd:
            client.start()
        memory = []
        for tenth in range(1, 11):
            time.sleep(max(0.0, start + tenth * seconds / 10 - time.perf_counter()))
            memory.append(machine.own_memory())
            if progress:
                progress("clients", tenth, 10)
        for client in crowd:
            client.join(60)
        taken = time.perf_counter() - start
        hung = sum(client.is_alive() for client in crowd)
        while (stats := scheduler.stats())["running"] + stats["waiting"] and time.perf_counter() < start + taken + 10:
            time.sleep(0.01)  # who left last
    return {
        "name": "load", "clients": clients, "seconds": taken, "answered": sum(c.answered for c in crowd),
        "left": sum(c.left for c in crowd), "failed": stats["failed"], "hung": hung,
        "wrong": [line for c in crowd for line in c.wrong], "tokens_per_s": sum(c.tokens for c in crowd) / taken,
        "first_token_s": percentiles(sum(client.first_s for client in crowd)),
        "memory_start_bytes": memory[0], "memory_end_bytes": memory[-1], "memory_bytes": memory,
        "free_slots": engine.pool.free_slots, "slots": engine.pool.slots, "stats": stats,
    }  # fmt: skip


def measure(
    model: str, settings: dict, counts: Sequence[int] | None, tokens: int, repeats: int, clients: int | None,
    seconds: float, progress: Callable | None = None,
) -> list[dict]:  # fmt: skip
    """Load a model and measure it, with the machine in every record: "load" where clients are given, else "throughput".

    Raises InputError where prompts and answers do not fit the context.
    """
    counts = sorted({1, *(counts or COUNTS)})
    sessions = RUNNING if clients else counts[-1]
    engine = Engine.load(model, progress=progress, max_sessions=sessions, **settings)
    if clients:
        records = [load(engine, clients, seconds, progress)]
    else:
        texts(engine, tokens)  # raises where they do not fit
        records = throughputs(engine, counts, tokens, repeats, progress)
    where = {"model": str(model), "threads": engine.run.threads, "chunk": engine.chunk, **machine.describe()}
    return [{**record, **where} for record in records]


def good(records: list[dict]) -> bool:
    """Did every request of a load test get what it should, and every slot come back?"""
    loads = [r for r in records if r["name"] == "load"]
    idle = all(r["stats"]["running"] == r["stats"]["waiting"] == 0 and r["free_slots"] == r["slots"] for r in loads)
    return idle and not any(r["wrong"] or r["failed"] or r["hung"] for r in loads)


def render(records: list[dict]) -> None:
    """Tables on standard output."""
    from rich.table import Table

    out, about = console(), records[0]
    out.print(f"{about['model']}: {about['threads']} threads, {about['cpu']}")
    for r in (r for r in records if r["name"] == "load"):
        first = ", ".join(f"{name} {1e3 * s:.0f}" for name, s in r["first_token_s"].items()) or "nobody had one"
        out.print(f"{r['clients']} clients for {r['seconds']:.0f} s: {r['answered']} answers, {r['left']} left early, "
                  f"{r['failed']} failed, {r['hung']} hung, {len(r['wrong'])} wrong")  # fmt: skip
        out.print(f"{r['tokens_per_s']:,.0f} tok/s; ms to the first token: {first}")
        if r["memory_start_bytes"] is not None:
            out.print("MB of memory of its own, by tenths: " + " ".join(f"{b / 1e6:.1f}" for b in r["memory_bytes"]))
        out.print(*r["wrong"][:5], sep="\n")
    table = Table("speculation", "sequences", "tok/s", "to one", "rows a step", "accepted", "skipped rounds")
    for r in (r for r in records if r["name"] == "throughput"):
        rate = f"{r['accepted'] / r['drafted']:.0%}" if r["drafted"] else "-"
        skipped = f"{r['skipped_rounds'] / r['rounds']:.0%}" if r["drafted"] else "-"
        ratio, rows = f"{r['ratio_to_one']:.2f}", f"{r['rows_per_step']:.1f}"
        table.add_row(r["spec"], str(r["sequences"]), f"{r['tokens_per_s']:,.0f}", ratio, rows, rate, skipped)
    if table.row_count:
        out.print(table)
