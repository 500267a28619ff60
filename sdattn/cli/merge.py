"""``sdattn merge``: several batch runs in one folder."""

from pathlib import Path
from typing import Annotated

import typer

from ..files.terminal import say
from .output import Output

_MOST_NAMED = 100  # missing items named one by one


def merge(
    output: Output,
    runs: Annotated[list[Path], typer.Argument(help="Folders that sdattn batch made.")],
    out: Annotated[Path, typer.Option(help="Folder for the merged run.")],
    partial: Annotated[
        bool, typer.Option("--partial", help="Exit with 0 even if items are missing.")
    ] = False,
) -> None:
    """Bring several batch runs into one folder: the parts of an input, or of several machines.

    Exit code: 0; 1 if items of the input are missing from all runs; they are named.

    Examples:
      sdattn merge RUN-1 RUN-2 --out RUN
      sdattn merge parts/* --out RUN --partial
    """
    from ..batch.merging import merge_runs
    from ..files.addresses import path_of

    merged, out_path = merge_runs(runs, out), path_of(out)
    line = f"{out_path}/: {merged.items:,} of {merged.wanted:,} items, from {len(runs)} run(s)"
    output.print(line, len(line))
    output.answer({"folder": str(out_path), **vars(merged)})
    if merged.lacks:
        named = merged.missing[:_MOST_NAMED]
        more = merged.lacks - len(named)
        text = ", ".join(named) if named else "not known by name, since ids.txt is gone"
        text += f" and {more:,} more" if named and more > 0 else ""
        say(f"{merged.lacks:,} item(s) are missing: {text}")
    if merged.lacks and not partial:
        say(
            "merged everything that the runs have. Add the runs with the rest, run the batch's "
            "command again to draw it, or pass --partial to accept this"
        )
        raise typer.Exit(1)
