"""Options of every command, and of every command that loads a model."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .options import one_of
from .output import TYPED, Output

Offload = Literal["model", "sequential", "group"]
LOADING: dict[str, Any] = {  # by their names in LoadingOptions
    "variant": Annotated[
        str | None,
        typer.Option(help="Variant of weight files, e.g. fp16 for model.fp16.safetensors."),
    ],
    "revision": Annotated[str | None, typer.Option(help="A branch, tag or commit on the hub.")],
    "lora": Annotated[
        list[str] | None,
        typer.Option(
            help="PATH or PATH:SCALE: a .safetensors file, a folder, a hub id; several "
            "times. Needs peft."
        ),
    ],
    "quantization": Annotated[
        str | None,
        typer.Option(
            "--quantize",
            help="8bit or 4bit, by bitsandbytes on a GPU; gguf:FILE for the denoiser.",
            autocompletion=one_of("8bit", "4bit", "gguf:"),
        ),
    ],
    "offload": Annotated[
        Offload | None,
        typer.Option(
            help="Keep weights in CPU memory until needed: whole models (model) or layer by layer."
        ),
    ],
    "scheduler": Annotated[
        str | None, typer.Option(help="Scheduler class of diffusers, e.g. EulerDiscreteScheduler.")
    ],
    "tokenizer": Annotated[
        Path | None, typer.Option(help="For a single file: its tokenizer's folder.")
    ],
    "config": Annotated[
        str | None,
        typer.Option(
            "--single-file-config",
            help="For a single file: its settings, from a diffusers folder or hub id.",
        ),
    ],
}
_COMMON: dict[str, Any] = {
    "json_": Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and warnings only.")],
}


def with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a typer command for a function: in place of its argument ``loading``, a dictionary, it
    has the loading options, and for ``output``, its first, the options of every command."""
    signature = inspect.signature(command)
    own = signature.parameters
    kinds = dict[str, tuple[Any, Any]]()
    for name, one in own.items():
        if name == "loading":
            kinds |= {option: (kind, None) for option, kind in LOADING.items()}
        elif name != "output":
            kinds[name] = one.annotation, one.default
    if "output" in own:
        kinds |= {name: (kind, False) for name, kind in _COMMON.items()}

    @functools.wraps(command)
    def run(
        context: typer.Context, *, json_: bool = False, quiet: bool = False, **given: Any
    ) -> None:
        if "loading" in own:
            loading = {name: given.pop(name) for name in LOADING}
            given["loading"] = {name: value for name, value in loading.items() if value}
        output = Output(as_json=json_, quiet=quiet, command=context.meta.get(TYPED))
        if "output" in own:
            given["output"] = output
        with output.answering(context.command):
            command(**given)

    kinds["context"] = typer.Context, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in kinds.items()
    ]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {name: kind for name, (kind, _) in kinds.items()}
    return run
