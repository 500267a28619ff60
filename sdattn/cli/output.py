"""Output of a command: tables for people, one JSON object for programs, and the saved run."""

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import SdattnWarning
from ..files.terminal import say, two_digits, visible
from .failures import exit_code, failure, reason, save_drawn
from .flags import spelled

if TYPE_CHECKING:
    from rich.table import Table

    from ..maps.arrival import Arrival
    from ..maps.heatmap import Heatmap
    from ..runs.run import Run

TYPED = "sdattn.typed"  # the entry of typer's context with the command as it was typed

_OPENED = ("report.html", "index.html", "edit.html", "diff.html")  # the first that is there


class Output:
    """Output of a command.

    Attributes:
        as_json: True prints one JSON object to stdout instead of tables.
        quiet: True prints nothing else, except errors on stderr.
        command: the command as it was typed, for a shell.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, command: str | None = None):
        self.as_json = as_json
        self.quiet = quiet
        self.command = command
        self._document: dict[str, Any] = {}

    def answer(self, document: dict[str, Any]) -> None:
        self._document |= document

    def note(self, text: str) -> None:
        """Print a line about progress on stderr."""
        if not self.quiet:
            print(visible(text), file=sys.stderr)

    def print(self, shown: Any, width: int = 0) -> None:
        """Print a rich table or a plain line on stdout. Lines of up to ``width`` characters are
        never broken, even on a narrow terminal."""
        from .console import Console

        if not (self.as_json or self.quiet):
            console = Console()
            console.width = max(console.width, width)
            console.print(shown)

    @contextmanager
    def answering(self, command: Any) -> Iterator[None]:
        """Print what a command says while it runs: warnings and errors with its flags. Keep
        everything but the object of --json off stdout; on an error the object holds its message.

        Raises:
            typer.Exit: the command failed, and the reason was printed.
        """

        def warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
            if issubclass(category, SdattnWarning):
                say(f"warning: {spelled(str(message), command)}")
            elif category is UserWarning:
                say(f"warning: {message}")

        stdout = sys.stdout
        warnings.showwarning = warn
        try:
            with redirect_stdout(sys.stderr) if self.as_json else nullcontext():
                yield
        except typer.BadParameter as error:
            error.message = spelled(error.message, command)
            self.answer({"error": error.message})
            raise
        except typer.Exit:
            raise
        except Exception as error:
            self.answer({"error": reason(error, command)})
            print(failure(error, command), file=sys.stderr)
            if saved := save_drawn(error, Path("outputs")):
                self.answer({"images": saved})
                say(f"what was drawn before is in {', '.join(saved)}")
            raise typer.Exit(exit_code(error)) from error
        finally:
            if self.as_json and self._document:
                print(json.dumps(self._document, allow_nan=False), file=stdout, flush=True)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None
) -> "Table":
    """Return a table whose first column names each row's subject."""
    from rich.table import Table

    first, *others = columns
    made = Table(title=title, title_justify="left")
    made.add_column(first, style="cyan")
    for name in others:
        made.add_column(name)
    for row in rows:
        made.add_row(*row)
    return made


def save_run(output: Output, run: "Run", folder: Path, *, force: bool) -> list[Path]:
    """Write a run's folder, see `Run.save()`, with the command that was typed."""
    with_command = []
    for one in run:
        settings = replace(one.settings, command=output.command)
        with_command.append(replace(one, settings=settings))
    run.image_runs = with_command
    try:
        return run.save(folder, force=force)
    except Exception as error:
        vars(error)["images"] = run.videos or run.images  # see answering()
        raise


def print_run(output: Output, run: "Run", folders: list[Path]) -> None:
    """Print the words of each image, from its prompt and from any other requested text."""
    answers = []
    for image_run, folder in zip(run, folders, strict=True):
        further = {name: list(held.maps) for name, held in image_run.more.items()}
        words = {"prompt": image_run.heatmaps.occurrences(), **further}
        told = print_words(output, words)
        for one in image_run.settings.candidates or ():
            output.print(f"candidate: seed {one.seed}, score {one.score:.3f}")
        if image_run.heatmaps.judged():
            for word in image_run.missing():
                output.print(told_missing(word))
        answers.append({**print_folder(output, folder), "words": told})
    output.answer({"runs": answers})


def told_missing(word: "Arrival") -> str:
    """Return a line about a word that probably did not arrive."""
    lead = f"its peak is {two_digits(word.lead)} times the other words there"
    instead = "" if word.instead == word.word else f"; {word.instead!r} is higher"
    return f"{word.verdict}: {word.word!r}, {lead} (below {two_digits(word.below)}){instead}"


def print_words(
    output: Output, words: "Mapping[str, Sequence[Heatmap]]"
) -> dict[str, list[dict[str, Any]]]:
    """Print a table of each text's maps, titled with the text's name; return it for --json."""
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in words}
    for name, maps in words.items():
        rows = []
        title = None if name == "prompt" else name
        for heatmap in maps:
            low, high = map(float, heatmap.range)
            columns = [*map(int, heatmap.columns)]
            texts = ", ".join(map(str, columns)), two_digits(low), two_digits(high)
            rows.append((heatmap.label, *texts))
            numbers = {"tokens": columns, "lowest": low, "highest": high}
            told[name].append({"word": heatmap.label, **numbers})
        output.print(table(("word", "tokens", "lowest", "highest"), rows, title))
    return told


def print_folder(output: Output, folder: Path, **more: str) -> dict[str, Any]:
    """Print the file to open, the other files in the folder, and ``more``.

    Returns:
        entries for --json: the folder, the file to open, and the contents of ``run.json``.
    """
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    opened = next((name for name in _OPENED if name in names), None)
    others = ", ".join(name for name in names if name != opened)
    rows = {"open": str(folder / (opened or "")), **more, "other files": others}
    print_rows(output, rows)
    found = {"folder": str(folder), "open": rows["open"]}
    info = folder / "run.json"
    return {**found, "info": json.loads(info.read_bytes())} if info.is_file() else found


def print_rows(output: Output, rows: Mapping[str, str]) -> None:
    """Print names and values; the first value is the file to open, and is never broken."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    first = next(iter(rows.values()))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows.items():
        grid.add_row(name, text, style="bold" if text == first else None)
    output.print(grid, width=len(first) + max(map(len, rows)) + 4)
