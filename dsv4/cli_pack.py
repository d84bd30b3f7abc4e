"""python -m dsv4 pack"""

from __future__ import annotations

from pathlib import Path

import click

from .cli_support import Bars, say


@click.command()
@click.argument("source", metavar="SRC|nano")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks that will read it.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads that read. Default: OMP_NUM_THREADS, else all cores this process may use.")
@click.option("--check", is_flag=True, help="Write nothing; compare all of DST with its checksums and with SRC.")
def pack(source, target, ranks, threads, check):
    """Copy a checkpoint's routed experts into one file.

    From checkpoint SRC to file DST, each expert's bytes in one run, so that an expert, or a rank's part of it, is read in
    one piece; in a checkpoint a rank's part of w2 is a few bytes of every row. SRC is still needed for everything else.
    Scales are checked on the way. DST appears whole or not at all.

    \b
    Examples:
      python -m dsv4 pack /models/DeepSeek-V4-Flash /data/experts.bin --ranks 4
      mpirun -n 4 python -m dsv4 generate --model /models/DeepSeek-V4-Flash --packed /data/experts.bin …
    """
    from .config import default_threads
    from .engine import model_directory
    from .experts.packed import check_packed, pack

    with Bars() as bars:
        if check:
            count = check_packed(model_directory(source), target, ranks, bars)
        else:
            count = pack(model_directory(source), target, ranks, threads or default_threads(), bars)
    say(f"{target}: {count:,} bytes, {'as they were written' if check else f'for {ranks} rank(s)'}")
