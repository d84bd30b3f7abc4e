"""The cost model: time is bytes over bandwidth, and a little per layer.

A forward of r rows reads, on every GPU at once,
    dense weights and keys, once, whatever r; of each layer the distinct(r) experts that its rows choose.
Experts that a GPU holds come from its memory; the others travel from host memory (or the disk) over PCIe while those
compute: the slower of the two counts. Without GPUs the processor reads all of it from host memory.

A round drafts a block and verifies n of it: E(p, n) = 1 + p + … + p^n tokens, if each is accepted with chance p once all
before it were, in draft + forward(1 + n). The best n is taken; n = 0 is plain decoding.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from typing import Any

from ..config import CONTEXT, RunConfig
from ..errors import CapacityError
from ..split import counts
from . import machine as facts
from .machine import GIB, PCIE, Machine
from .sizes import Sizes

CHUNK = RunConfig.chunk  # rows of a prefill forward: what rings keep head-room for
MILLI = 1e3


def predict(
    machine: Machine, sizes: Sizes, *, context: int = CONTEXT, sessions: int = 1, acceptance: float = 0.75
) -> dict[str, Any]:
    """The whole answer, of JSON types: machine, model, memory (bytes), milliseconds, tokens per second, bound, changes.

    sizes: of as many ranks as the machine has GPUs (1 without). acceptance: p above.
    Raises CapacityError where the model does not fit, saying what would.
    """
    memory = _memory(machine, sizes, context, sessions)
    speed = _speed(machine, sizes, memory, context, acceptance)
    return {
        "machine": {**machine.__dict__},
        "model": {
            "layers": sizes.config.num_hidden_layers, "experts": sizes.config.n_routed_experts, "bytes": sizes.total,
            "draft_stages": sizes.stages, "context": context, "sessions": sessions,
        },
        "memory": memory,
        **speed,
        "changes": _changes(machine, sizes, context, sessions, acceptance, speed),
        "assumed": {
            "gpu_share": facts.GPU_SHARE, "pcie_share": facts.PCIE_SHARE, "host_share": facts.HOST_SHARE,
            "layer_ms": facts.LAYER_MS, "acceptance": acceptance,
        },
    }  # fmt: skip


# ---------------------------------------------------------------------- memory
def _memory(machine: Machine, sizes: Sizes, context: int, sessions: int) -> dict[str, Any]:
    """Bytes of each GPU and of the host by part, and where the main model's experts lie, as shares."""
    state = sizes.state(context, sessions, CHUNK).state
    drafts = sizes.config.n_routed_experts * sizes.stages * sizes.expert
    fixed = {"dense weights": sizes.dense, "draft": sizes.draft + drafts, "state": state}
    everything = sizes.experts * sizes.expert
    if not machine.gpus:
        free = machine.ram * GIB - facts.HOST_RESERVE - sum(fixed.values())
        if free < 0:
            more = f"with no more, experts come from the disk; {_tenths(machine.ram * GIB - free + everything)} GiB hold all of them"
            raise _does_not_fit("host memory", machine.ram, free, sizes, context, sessions, more)
        held = min(free, everything)
        return {
            "gpu": None,
            "host": {**fixed, "experts": int(held), "free": int(free - held)},
            "experts": {"on_gpu": 0.0, "in_memory": held / everything, "on_disk": 1 - held / everything},
        }
    fixed["step's arrays"] = sizes.step(context, CHUNK)
    fixed["driver"] = int(facts.GPU_DRIVER)
    free = machine.gpu_memory * GIB - sum(fixed.values())
    if free < 0:
        raise _does_not_fit(
            "memory of a GPU", machine.gpu_memory, free, sizes, context, sessions,
            "more or larger GPUs would do, or --gpus 0, which computes on the processor",
        )  # fmt: skip
    cached = min(free, everything) / everything
    missing = (1 - cached) * sizes.total_experts
    room = max(0.0, machine.ram * GIB - facts.HOST_RESERVE)
    held = min(room, missing)
    on_disk = (missing - held) / sizes.total_experts
    return {
        "gpu": {**fixed, "experts": int(cached * everything), "free": int(free - cached * everything)},
        "host": {"experts": int(held), "free": int(room - held)},
        "experts": {"on_gpu": cached, "in_memory": 1 - cached - on_disk, "on_disk": on_disk},
    }


def _tenths(size: float) -> str:
    """Gibibytes, rounded up: what fits."""
    return f"{math.ceil(10 * size / GIB) / 10:.1f}"


def _does_not_fit(
    where: str, has: float, free: float, sizes: Sizes, context: int, sessions: int, more: str
) -> CapacityError:
    """free: bytes left, below 0. more: what helps where a shorter context does not."""

    def kept(length: int) -> int:
        return sizes.state(length, sessions, CHUNK).state + (sizes.step(length, CHUNK) if "GPU" in where else 0)

    fits = bisect_right(range(1, context), kept(context) + free, key=kept)
    hint = f"a --context of {fits} would fit" if fits else more
    return CapacityError(
        f"plan: {where}: expected at least {_tenths(has * GIB - free)} GiB for what is always there, found {has:g} GiB; {hint}"
    )


# ---------------------------------------------------------------------- time
def _forward(machine: Machine, sizes: Sizes, experts: dict[str, float], context: int, rows: int) -> dict[str, float]:
    """Milliseconds of a forward of the main model, by what takes them."""
    fixed = sizes.read + sizes.keys(context, rows)
    chosen = sizes.distinct(rows) * sizes.config.num_hidden_layers * sizes.expert
    return _parts(machine, experts, fixed, chosen, sizes.config.num_hidden_layers)


def _draft(machine: Machine, sizes: Sizes) -> float:
    """Milliseconds of drafting a block; its experts lie where the rest of the model does."""
    block = sizes.config.dspark.block_size
    chosen = sizes.distinct(block) * sizes.stages * sizes.expert
    here = {"on_gpu": 1.0, "in_memory": 0.0, "on_disk": 0.0} if machine.gpus else {"on_gpu": 0.0, "in_memory": 1.0, "on_disk": 0.0}
    return sum(_parts(machine, here, sizes.draft + sizes.head, chosen, sizes.stages).values())


def _parts(machine: Machine, experts: dict[str, float], fixed: float, chosen: float, layers: int) -> dict[str, float]:
    """Milliseconds by what takes them. fixed, chosen: bytes that one rank reads always, and of chosen experts."""
    ranks = max(1, machine.gpus)
    disk = chosen * ranks * experts["on_disk"] / (machine.disk * facts.GB)
    found = {"layers": layers * facts.LAYER_MS}
    if machine.gpus:
        away = chosen * (1 - experts["on_gpu"])
        found["gpu_memory"] = MILLI * (fixed + chosen * experts["on_gpu"]) / machine.device
        hidden = MILLI * chosen * experts["on_gpu"] / machine.device  # runs while the others travel
        roads = {"pcie": away / machine.link, "host_memory": away * ranks / machine.host, "disk": disk}
    else:
        hidden = 0.0
        found["host_memory"] = MILLI * fixed / machine.host
        roads = {"host_memory": chosen / machine.host, "disk": disk}
    road = max(roads, key=roads.__getitem__)
    found[road] = found.get(road, 0.0) + max(0.0, MILLI * roads[road] - hidden)
    return {part: ms for part, ms in found.items() if ms}


def _speed(machine: Machine, sizes: Sizes, memory: dict, context: int, acceptance: float) -> dict[str, Any]:
    """plain, speculation (None without a draft) and bound, the part that takes most of a plain step."""
    forward = lambda rows: _forward(machine, sizes, memory["experts"], context, rows)  # noqa: E731
    parts = forward(1)
    plain = sum(parts.values())
    found: dict[str, Any] = {
        "plain": {"ms": plain, "tok_s": MILLI / plain, "parts": parts},
        "speculation": None,
        "bound": max(parts, key=parts.__getitem__),
    }
    if sizes.stages:
        draft = _draft(machine, sizes)
        verify = [sum(forward(1 + n).values()) for n in range(1, sizes.config.dspark.block_size + 1)]
        rates = [MILLI / plain]
        rates += [MILLI * sum(acceptance**i for i in range(n + 1)) / (draft + ms) for n, ms in enumerate(verify, 1)]
        length = max(range(len(rates)), key=rates.__getitem__)
        found["speculation"] = {"draft_ms": draft, "verify_ms": verify, "length": length, "tok_s": rates[length]}
    return found


def best(speed: dict[str, Any]) -> float:
    """Tokens per second, with speculation where there is a draft."""
    return speed["speculation"]["tok_s"] if speed["speculation"] else speed["plain"]["tok_s"]


# ---------------------------------------------------------------------- advice
def _changes(
    machine: Machine, sizes: Sizes, context: int, sessions: int, acceptance: float, speed: dict
) -> list[dict[str, Any]]:
    """One change of the machine at a time: those that make it faster by a twentieth or more, the best first.

    plain_tok_s is without speculation, tok_s with it where it pays.
    """
    found = []
    for name, other in _variants(machine, counts(sizes.config)):
        try:
            theirs = Sizes.of(sizes.config, sizes.stages, max(1, other.gpus)) if other.gpus != machine.gpus else sizes
            memory = _memory(other, theirs, context, sessions)
        except CapacityError:
            continue
        changed = _speed(other, theirs, memory, context, acceptance)
        if best(changed) >= 1.05 * best(speed):
            found.append({"change": name, "plain_tok_s": changed["plain"]["tok_s"], "tok_s": best(changed)})
    return sorted(found, key=lambda one: -one["tok_s"])


def _variants(machine: Machine, counts: list[int]) -> list[tuple[str, Machine]]:
    """counts: of GPUs, over which the model can be divided."""
    found = [
        (f"host memory of {2 * machine.bandwidth:g} GB/s", replace(machine, bandwidth=2 * machine.bandwidth)),
        (f"{2 * machine.ram:g} GiB of host memory", replace(machine, ram=2 * machine.ram)),
        (f"a disk of {2 * machine.disk:g} GB/s", replace(machine, disk=2 * machine.disk)),
    ]
    if not machine.gpus:
        return found
    newer = next((generation for generation in sorted(PCIE) if generation > machine.pcie), None)
    if newer:
        found.append((f"PCIe {newer}", replace(machine, pcie=newer)))
    if machine.lanes < 16:
        found.append((f"{2 * machine.lanes} lanes to each GPU", replace(machine, lanes=2 * machine.lanes)))
    found.append((f"GPUs of {2 * machine.gpu_memory:g} GiB", replace(machine, gpu_memory=2 * machine.gpu_memory)))
    faster = replace(machine, gpu_bandwidth=2 * machine.gpu_bandwidth)
    found.append((f"GPUs whose memory reads {2 * machine.gpu_bandwidth:g} GB/s", faster))
    if 2 * machine.gpus in counts:
        found.append((f"{2 * machine.gpus} such GPUs", replace(machine, gpus=2 * machine.gpus)))
    return found
