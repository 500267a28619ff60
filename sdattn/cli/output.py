"""Where a command's words go: to people in tables, to programs as one object of JSON."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import typer

from ..files.terminal import visible
from .messages import reason


class Output:
    """Where a command's words go.

    Attributes:
        as_json: one object goes to stdout in the place of tables.
        quiet: only that does, and what went wrong to stderr.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False):
        self.as_json, self.quiet = as_json, quiet
        self._document: dict[str, Any] = {}

    def answer(self, document: dict[str, Any]) -> None:
        """What the object of --json has."""
        self._document |= document

    def note(self, text: str) -> None:
        """A line on stderr of what goes on."""
        if not self.quiet:
            print(visible(text), file=sys.stderr)

    def print(self, shown: Any, width: int = 0) -> None:
        """A table of rich, or a plain line, on stdout; ``width`` letters are not broken, however
        narrow the terminal."""
        from .console import Console

        if not (self.as_json or self.quiet):
            console = Console()
            console.width = max(console.width, width)
            console.print(shown)

    def print_text(self, text: str) -> None:
        """Lines on stdout as they are, to be copied."""
        if not (self.as_json or self.quiet):
            print(visible(text), end="")

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Inside, nothing but the object of --json comes to stdout; of an error its message."""
        stdout = sys.stdout
        try:
            with redirect_stdout(sys.stderr) if self.as_json else nullcontext():
                yield
        except (typer.Exit, typer.BadParameter):
            raise
        except Exception as error:
            self.answer({"error": reason(error)})
            raise
        finally:
            if self.as_json and self._document:
                print(json.dumps(self._document, allow_nan=False), file=stdout, flush=True)
