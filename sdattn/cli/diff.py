"""``sdattn diff``: two runs side by side."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Force, Words, folder_named
from .output import Output


def diff(
    output: Output,
    run_a: Annotated[Path, typer.Argument(help="A run's folder, or a batch run's with --item.")],
    run_b: Annotated[Path, typer.Argument(help="The other one.")],
    words: Words = None,
    item: Annotated[
        list[str] | None,
        typer.Option(help="The id of an item of both batch runs; twice: of A, then of B."),
    ] = None,
    out: Annotated[Path | None, folder_named("A-vs-B")] = None,
    force: Force = False,
) -> None:
    """Show where two runs differ: the heatmaps of each word side by side and B - A. Of two prompts,
    two seeds, a model with and without a LoRA.

    Examples:
      sdattn diff outputs/a-cat-0 outputs/a-cat-1
      sdattn diff outputs/a-cat-0 outputs/a-dog-0 cat dog --out cat-or-dog
      sdattn diff RUN-1 RUN-2 --item 000001
    """
    from ..batch.reading import open_batch
    from ..files.paths import check_apart, file_name
    from ..runs.diff import diff
    from ..runs.folder import check_target

    if item and len(item) > 2:
        raise typer.BadParameter("Pass it once for both runs, or twice.", param_hint="--item")
    if out is not None:
        check_apart(out, run_a, run_b)
        check_target(out, force=force, kind="diff")
    if item:
        a, b = open_batch(run_a)[item[0]], open_batch(run_b)[item[-1]]
        names = f"{run_a.resolve().name}/{item[0]}", f"{run_b.resolve().name}/{item[-1]}"
        found = diff(a, b, words=words, names=names)
    else:
        found = diff(run_a, run_b, words=words)
    if out is None:
        out = Path("outputs") / "-vs-".join(file_name(name) for name in found.names)
        check_apart(out, run_a, run_b)
    found.save(out, force=force)
    _print(output, found, out)


def _print(output: Output, found: Any, out: Path) -> None:
    from .printing import print_folder, table

    settings = [("run", *found.names), ("prompt", *found.prompts)]
    settings += [(name, *pair) for name, pair in found.told_settings().items()]
    output.print(table(("", "A", "B"), settings))
    words = []
    for word in found.words:
        numbers = (word.mean_a, word.mean_b, word.correlation)
        texts = ["-" if number is None else f"{number:.2g}" for number in numbers]
        words.append((word.label, *texts, *_largest(word, found.image_a.size)))
    columns = ("word", "mean A", "mean B", "correlation", "largest B - A", "at x, y")
    output.print(table(columns, words))
    output.answer(print_folder(output, out))


def _largest(word: Any, size: tuple[int, int]) -> tuple[str, str]:
    """The largest difference, and the middle of its cell in pixels of A's picture."""
    if word.largest is None:
        return "-", "-"
    value, (row, col) = word.largest
    rows, cols = word.difference.shape
    x, y = (col + 0.5) * size[0] / cols, (row + 0.5) * size[1] / rows
    return f"{value:+.2g}", f"{x:.0f}, {y:.0f}"
