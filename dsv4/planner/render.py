"""The planner's answer as text."""

from __future__ import annotations

from typing import Any

NAMES = {
    "pcie": "experts on their way over PCIe",
    "host_memory": "reading host memory",
    "disk": "reading experts from the disk",
    "gpu_memory": "reading GPU memory",
    "layers": "launches and exchanges between layers",
}


def render(plan: dict[str, Any]) -> str:
    """Sections: what is predicted, memory, time, what bounds it and what would change it."""
    return "\n\n".join("\n".join(section(plan)) for section in (_head, _memory, _time, _bound))


def _size(count: float) -> str:
    return f"{count / (1 << 30):8.2f} GiB"


def _head(plan: dict[str, Any]) -> list[str]:
    machine, model = plan["machine"], plan["model"]
    where = f"{machine['gpus']} GPU(s) of {machine['gpu_memory']:g} GiB, {machine['gpu_bandwidth']:g} GB/s, PCIe {machine['pcie']} x{machine['lanes']}"
    return [
        "A prediction from sizes and bandwidths, not a measurement.",
        (where if machine["gpus"] else "no GPU") + f"; host memory {machine['ram']:g} GiB at {machine['bandwidth']:g} GB/s",
        f"{model['layers']} layers of {model['experts']} experts, {model['bytes'] / 1e9:.1f} GB; "
        f"{model['sessions']} session(s) of {model['context']:,} positions",
    ]


def _memory(plan: dict[str, Any]) -> list[str]:
    lines, memory = [], plan["memory"]
    for title, key in (("Each GPU", "gpu"), ("Host", "host")):
        if memory[key]:
            lines += [title, *(f"  {part:<14}{_size(count)}" for part, count in memory[key].items())]
    experts = memory["experts"]
    places = [("on the GPUs", "on_gpu"), ("in host memory", "in_memory"), ("on the disk", "on_disk")]
    lines.append("Experts: " + ", ".join(f"{experts[key]:.0%} {name}" for name, key in places if experts[key] > 0))
    return lines


def _time(plan: dict[str, Any]) -> list[str]:
    plain, speculation = plan["plain"], plan["speculation"]
    lines = [f"Plain decoding: {plain['tok_s']:.1f} tok/s, {plain['ms']:.1f} ms a token"]
    lines += [f"  {NAMES[part]:<38}{ms:8.1f} ms" for part, ms in sorted(plain["parts"].items(), key=lambda item: -item[1])]
    if speculation:
        verify = ", ".join(f"{ms:.0f}" for ms in speculation["verify_ms"])
        lines.append(
            f"Speculation, {plan['assumed']['acceptance']:.0%} of drafted tokens accepted: {speculation['tok_s']:.1f} tok/s, "
            + (f"{speculation['length']} verified a round" if speculation["length"] else "drafting does not pay")
        )
        lines.append(f"  draft {speculation['draft_ms']:.1f} ms; verify by drafted tokens, 1 on: {verify} ms")
    if plan["model"]["sessions"] > 1:
        lines.append("The speeds are of one session that runs alone; what several get together is not predicted.")
    return lines


def _bound(plan: dict[str, Any]) -> list[str]:
    lines = [f"What bounds it: {NAMES[plan['bound']]}"]
    if not plan["changes"]:
        return [*lines, "No single change of the machine gives a twentieth more."]
    speculation = plan["speculation"]
    lines.append("What would change it, one thing at a time; tok/s" + (", plain and with speculation where it pays:" if speculation else ":"))
    for one in plan["changes"]:
        both = f" {one['tok_s']:8.1f}" if speculation else ""
        lines.append(f"  {one['change']:<42}{one['plain_tok_s']:8.1f}{both}")
    return lines
