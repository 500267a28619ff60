"""The command line: a function a command, see ``sdattn --help``."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any

import typer

from ..files.terminal import visible
from .batches import batch, merge
from .comparisons import diff
from .edits import edit
from .live import app as live
from .pictures import explain
from .runs import generate, info
from .shows import show

app = typer.Typer(
    help="Shows where each word of a prompt went in a Stable Diffusion image.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(explain)
app.command()(edit)
app.command()(batch)
app.command()(merge)
app.command()(show)
app.command()(diff)
app.command()(info)
app.command("app")(live)


def main() -> None:
    """Run the command line; exit code 0, 1 (failed, with the reason on stderr) or 2 (usage)."""
    warnings.showwarning = _show_warning
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        print(f"sdattn: {visible(_reason(error))}", file=sys.stderr)
        sys.exit(1)


def _reason(error: Exception) -> str:
    """The message in one line; an error that is not ours to word comes with its type."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    text = " ".join(text.split())
    ours = isinstance(error, (OSError, ValueError, TypeError, KeyError, RuntimeError))
    return text if ours and text else f"{type(error).__name__}: {text}"


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if category.__module__.startswith("sdattn") or category is UserWarning:
        print(f"sdattn: warning: {visible(str(message))}", file=sys.stderr)


@app.callback(invoke_without_command=True)
def version_option(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from .. import __version__

        print(__version__)
        raise typer.Exit
