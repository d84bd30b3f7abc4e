"""python -m dsv4 plan"""

from __future__ import annotations

import json
import math

import click

from .cli_support import say
from .config import CONTEXT, RunConfig
from .errors import ConfigError

MOST = 1e9  # GiB, GB/s: beyond any machine, and far from where sums overflow


def _number(ctx, param, value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise click.BadParameter(f"expected a number above 0; found {value}")
    if value > MOST:
        raise click.BadParameter(f"expected at most {MOST:g}; found {value}")
    return value


def _numbers(*options: tuple[str, float, str]):
    """Options for positive numbers: (name, default, help)."""

    def add(command):
        for name, default, text in reversed(options):
            command = click.option(name, type=float, default=default, show_default=True, callback=_number, help=text)(command)
        return command

    return add


@click.command()
@click.option("--gpus", default="0", show_default=True, metavar="COUNTxGIB", help="1, 2, 4 or 8 GPUs and the memory of each: 4x22; 0: none.")
@click.option("--pcie", type=int, default=4, show_default=True, metavar="GENERATION", help="PCIe generation of the GPUs, 3 to 6.")
@click.option("--lanes", type=int, default=16, show_default=True, help="PCIe lanes to each GPU.")
@_numbers(
    ("--ram", 256.0, "Host memory, GiB."),
    ("--bandwidth", 100.0, "Host memory bandwidth of all cores together, GB/s."),
    ("--gpu-bandwidth", 600.0, "Memory bandwidth of one GPU, GB/s."),
    ("--disk", 3.0, "Read bandwidth of the disk, GB/s."),
)
@click.option(
    "--context", type=click.IntRange(min=1), metavar="N",
    help=f"Positions of a session. Default: as many as the model can, up to {CONTEXT}.",
)  # fmt: skip
@click.option(
    "--sessions", type=click.IntRange(1, 1 << 20), default=1, show_default=True,
    help="Sessions open at once: room for their state. Speed is always that of one that runs alone.",
)  # fmt: skip
@click.option(
    "--acceptance", type=float, default=0.75, show_default=True,
    help="Chance that a drafted token is accepted if those before it were.",
)  # fmt: skip
@click.option(
    "--model", default="real", show_default=True, metavar="real|nano|DIR|CONFIG.json",
    help="The model whose sizes are used. real: the published model with all its 256 experts.",
)  # fmt: skip
@click.option("--experts", type=click.IntRange(1, 4096), metavar="N", help="Routed experts of a layer, if not the model's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def plan(gpus, model, experts, context, sessions, acceptance, as_json, **numbers):
    """Predict how fast a machine would run a model.

    Memory by part, tokens per second and what bounds them, from sizes and bandwidths alone, before anything is bought or
    loaded. A prediction, never a measurement; docs/hardware.md lists what it assumes.

    \b
    Examples:
      python -m dsv4 plan --gpus 4x22 --gpu-bandwidth 616 --pcie 3 --ram 256 --bandwidth 100
      python -m dsv4 plan --ram 192 --bandwidth 60 --context 100000 --json
    """
    from .planner import Machine, Sizes, parse_gpus, predict, render
    from .split import counts
    from .synth import Recipe, read_config

    RunConfig.from_env()  # a misspelt setting is an error here too
    if not 0 <= acceptance <= 1:
        raise click.BadParameter(f"expected a number within 0..1; found {acceptance}", param_hint="--acceptance")
    count, memory = parse_gpus(gpus)
    machine = Machine(count, memory, **numbers)
    recipe = Recipe.of(read_config(model), experts=experts)
    if count and count not in (fit := counts(recipe.config)):
        *fewer, most = map(str, fit)
        some = f"{', '.join(fewer)} or {most}" if fewer else most
        raise ConfigError(f"--gpus: expected {some} GPUs, over which this model can be divided; found {count}")
    context = RunConfig(max_context=context).context(recipe.config)
    sizes = Sizes.of(recipe.config, recipe.stages, max(1, count))
    found = predict(machine, sizes, context=context, sessions=sessions, acceptance=acceptance)
    say(json.dumps(found) if as_json else render(found))
