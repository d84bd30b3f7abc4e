"""python -m dsv4 synth"""

from __future__ import annotations

from pathlib import Path

import click

from .cli_support import Bars, say


def _ratios(ctx, param, value: str | None) -> tuple[int, ...] | None:
    try:
        return None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"expected ratios separated by commas, such as 0,4,128; found {value!r}") from error


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--like",
    default="real",
    show_default=True,
    metavar="real|nano|CONFIG.json",
    help="The model whose sizes are used. real: the published model with all its 256 experts.",
)
@click.option("--layers", type=click.IntRange(min=1), metavar="N", help="Layers. Default: as many as the model has.")
@click.option("--experts", type=click.IntRange(min=1), metavar="N", help="Routed experts of every layer.")
@click.option(
    "--ratios",
    callback=_ratios,
    metavar="N,N,…",
    help="Compression ratio by layer, 0: window only. Repeated up to --layers; without that option the list gives the number.",
)
@click.option("--stages", type=click.IntRange(min=0), metavar="N", help="Draft stages; 0: no draft module.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The same seed gives the same bytes.")
@click.option("--force", is_flag=True, help="Replace the checkpoint in DIR: its index and shards are removed first.")
def synth(directory, like, layers, experts, ratios, stages, seed, force):
    """Write a random checkpoint in the real format.

    Of any size, for measurements without the real weights: single matrices have the model's sizes, and you choose how
    many layers and experts there are. It generates noise and has no tokenizer: give token ids. Expect 3.5 GB for a layer
    with all experts, 2.1 GB for embedding and head.

    \b
    Examples:
      python -m dsv4 synth /data/synth --ratios 0,4,128 --experts 16 --stages 0
      python -m dsv4 synth /tmp/small --like nano --layers 2
    """
    from .synth import Recipe, read_config, write

    recipe = Recipe.of(
        read_config(like), layers=layers, experts=experts, ratios=ratios, stages=stages, seed=seed
    )
    say(f"{directory}: {recipe.total_bytes() / 1e9:.2f} GB in {len(recipe.shards())} shards")
    with Bars() as bars:
        write(directory, recipe, force=force, progress=bars)
