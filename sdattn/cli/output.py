"""Output of a command: tables for people, one JSON object for programs."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import typer

from ..errors import SdattnWarning
from ..files.terminal import say, visible
from .failures import exit_code, failure, reason
from .flags import spelled

TYPED = "sdattn.typed"  # the entry of typer's context with the command as it was typed


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
            raise typer.Exit(exit_code(error)) from error
        finally:
            if self.as_json and self._document:
                print(json.dumps(self._document, allow_nan=False), file=stdout, flush=True)
