"""What commands print of runs: tables of words, and the files that were written."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rich.console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ..files.terminal import visible


class Console(rich.console.Console):
    """A console that prints nothing that the terminal would obey, but its own styles."""

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*args, **kwargs):
            yield Segment(text if control else visible(text), style, control)


def print_run(run: Any, folders: list[Path]) -> None:
    """The words of each image, of its prompt and of whatever else was asked for."""
    parts = {"negative": run.negative_heatmaps, "asked": run.asked_heatmaps}
    for i, folder in enumerate(folders):
        print_words(run.heatmaps[i].occurrences())
        for name, maps in parts.items():
            if maps:
                print_words(maps[i].occurrences(), name)
        if run.causal_heatmaps:
            print_words(run.causal_heatmaps[i], "causal")
        print_folder(folder)


def print_words(maps: list[Any], title: str | None = None) -> None:
    table = Table("word", "tokens", "lowest", "highest", title=title, title_justify="left")
    for heatmap in maps:
        low, high = heatmap.range
        columns = ", ".join(map(str, heatmap.columns))
        table.add_row(Text(heatmap.label), columns, f"{low:.2g}", f"{high:.2g}")
    Console().print(table)


def print_folder(folder: Path) -> None:
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    Console().print(Text(f"{folder}/: {', '.join(names)}"))
