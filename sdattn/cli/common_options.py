"""Options of every command."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .config import use
from .output import Output

_Config = Annotated[
    Path | None,
    typer.Option(
        callback=use,
        is_eager=True,  # its entries are the defaults of the others
        help="Default values: a .toml file with this command's options, or the run.json of a run "
        "to repeat.",
    ),
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and warnings only.")]
_KINDS = {"config": (_Config, None), "json_": (_Json, False), "quiet": (_Quiet, False)}
_SHARED = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
    for name, (kind, default) in _KINDS.items()
]


def with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a typer command for a function whose first argument is its :class:`Output`."""
    signature = inspect.signature(command)
    _, *own = signature.parameters.values()

    @functools.wraps(command)
    def run(*, config: Any = None, json_: bool = False, quiet: bool = False, **given: Any) -> None:
        output = Output(as_json=json_, quiet=quiet)
        with output.answering():
            command(output, **given)

    parameters = [*(p.replace(kind=p.KEYWORD_ONLY) for p in own), *_SHARED]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
