"""The command line: one module per command, see ``sdattn --help``.

Commands import torch and diffusers only when they run, so that help, the version and completion
come at once. `options` holds options of several commands, in groups, and the options of all
commands; `checks` reads values and refuses what needs no model. `output` prints results, `failures`
errors; `flags` spells the options in the library's messages as a command has them. To add a
command, add a module and name it here. Its options have the library's names, so that errors about
them name the flags that were typed.
"""

import atexit
import gc
import re
import shlex
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import did_you_mean
from . import app, batch, diff, edit, explain, generate, info, show
from .failures import exit_code, failure
from .options import CALL, with_options
from .output import TYPED

# Panels of a command's help, in order. An option in none is the command's own and comes first.
_PANELS = {
    "Image": ("seed", "candidates", "decide_at", "at_once", *CALL),
    "Heatmaps": ("preset", "refine", "ask", "causal", "keep", "negative_maps"),
    "Output": ("folder", "force", "json_", "quiet"),
    "Model": ("model", "device", "dtype", "lora", "scheduler"),
    "Advanced": (
        "set_",
        "max_bytes",
        "variant",
        "revision",
        "quantization",
        "offload",
        "tokenizer",
        "config",
        "help",
    ),
}
_PLACES = dict[str, str]()
for _panel, _names in _PANELS.items():
    _PLACES |= dict.fromkeys(_names, _panel)


class _Literal:
    """Command whose help is shown as written: paragraphs are filled, brackets are no markup of
    rich."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for described in (self, *getattr(self, "params", ())):
            if text := getattr(described, "help", None):
                described.help = _literal(text)


def _literal(text: str) -> str:
    parts = text.split("\n\n")
    filled = (part if part.startswith("Examples:") else " ".join(part.split()) for part in parts)
    return re.sub(r"\[(?=[a-z#/@])", r"\[", "\n\n".join(filled))


class _Command(_Literal, TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if param.param_type_name == "option":
                param.rich_help_panel = _PLACES.get(param.name)
        order = [None, *_PANELS]
        return sorted(params, key=lambda param: order.index(_PLACES.get(param.name)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[TYPED] = shlex.join(["sdattn", ctx.info_name, *args])
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _with_nearest(_with_value(error))
            raise
        except Exception as error:
            _advise(error, ctx)
            raise


def _advise(error: Any, ctx: Any) -> None:
    """Say what an unknown option, or a surplus argument, may have meant."""
    if "unexpected extra argument" in str(getattr(error, "message", "")):
        error.message += ". Put a prompt, or a name, of several words in quotes."
    asked = str(getattr(error, "option_name", ""))
    in_python = asked.strip("-").replace("-", "_")
    if flags := [one.opts[0] for one in ctx.command.params if one.name == in_python]:
        error.possibilities = flags
        return
    group = ctx.parent.command.commands if ctx.parent else {}
    owners = [name for name, one in group.items() if asked in _options(one)]
    if owners and asked.startswith("--"):
        error.possibilities = None
        named = ", ".join(f"`sdattn {name}`" for name in owners)
        error.message += f" ({named} {'has' if len(owners) == 1 else 'have'} {asked})"


def _with_value(error: Any) -> str:
    """Return typer's message; new typers pass on pydantic's, which lacks the value."""
    said = str(error.message).removeprefix("Value error, ")
    for problem in getattr(error.__cause__, "errors", list)():
        said = said.replace("Input", repr(problem["input"]), 1).partition(", unable")[0]
    return said


def _with_nearest(message: str) -> str:
    """Add the nearest choice to typer's message for an invalid value of an option.

    >>> _with_nearest("'damm' is not one of 'default', 'daam'.")
    "'damm' is not one of 'default', 'daam'. Did you mean 'daam'?"
    """
    given, is_choice, choices = message.partition(" is not one of ")
    asked = re.findall(r"'([^']*)'$", given)
    known = re.findall(r"'([^']*)'", choices)
    return message + (did_you_mean(asked[0], known) if is_choice and asked else "")


def _options(command: Any) -> set[str]:
    names = set[str]()
    for param in command.params:
        names.update(param.opts, param.secondary_opts)
    return names


class _Group(_Literal, TyperGroup):
    pass


commands = typer.Typer(
    cls=_Group,
    help="Shows where each word of a prompt went in a Stable Diffusion image.",
    no_args_is_help=True,
    rich_markup_mode="rich",  # the default of new versions of typer
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    *(generate.generate, explain.explain, edit.edit, batch.batch),
    *(show.show, diff.diff, info.info, app.app),
):
    commands.command(cls=_Command)(with_options(command))


def main() -> None:
    """Run the command line; exit code 0, 1 (the run failed) or 2 (a wrong value or option)."""
    # Importing diffusers makes very many objects, none of them garbage: commands start sooner if
    # Python collects less often.
    often, *older = gc.get_threshold()
    gc.set_threshold(max(often, 10_000), *older)
    atexit.register(gc.freeze)  # Python looks through all objects before it ends: 1.5 s for torch's
    try:
        commands()
    except Exception as error:
        print(failure(error), file=sys.stderr)
        sys.exit(exit_code(error))


@commands.callback(invoke_without_command=True)
def version_option(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from ..files.version import __version__

        print(__version__)
        raise typer.Exit
