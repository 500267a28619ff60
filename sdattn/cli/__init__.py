"""The command line: a module a command, see ``sdattn --help``.

What a command needs of torch and diffusers it imports when it runs, so that help, the version and
completion come at once.
"""

import sys
import warnings
from typing import Annotated, Any

import typer

from ..files.terminal import visible
from . import app, batch, diff, edit, explain, generate, info, merge, show

commands = typer.Typer(
    help="Shows where each word of a prompt went in a Stable Diffusion image.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
commands.command()(generate.generate)
commands.command()(explain.explain)
commands.command()(edit.edit)
commands.command()(batch.batch)
commands.command()(merge.merge)
commands.command()(show.show)
commands.command()(diff.diff)
commands.command()(info.info)
commands.command()(app.app)


def main() -> None:
    """Run the command line; exit code 0, 1 (failed, with the reason on stderr) or 2 (usage)."""
    warnings.showwarning = _show_warning
    try:
        commands()
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


@commands.callback(invoke_without_command=True)
def version_option(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from .. import __version__

        print(__version__)
        raise typer.Exit
