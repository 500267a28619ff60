"""Options of every command that loads a model."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..runs.option_names import LOADING

Offload = Literal["model", "sequential", "group"]
_KINDS: dict[str, Any] = {
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
    "quantize": Annotated[
        str | None,
        typer.Option(
            help="8bit or 4bit, by bitsandbytes on a GPU; gguf:FILE for the denoiser.",
            autocompletion=lambda incomplete: [
                value for value in ("8bit", "4bit", "gguf:") if value.startswith(incomplete)
            ],
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
    "single_file_config": Annotated[
        str | None,
        typer.Option(help="For a single file: its settings, from a diffusers folder or hub id."),
    ],
}
_OPTIONS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
    for name, kind in _KINDS.items()
]


def with_loading_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the loading options in place of its argument ``loading``, a dictionary."""
    signature = inspect.signature(command)
    own = [*signature.parameters.values()]
    place = next((i for i, one in enumerate(own) if one.name == "loading"), None)
    if place is None:
        return command

    @functools.wraps(command)
    def run(*args: Any, **given: Any) -> None:
        typed = {name: given.pop(option.replace("-", "_")) for name, option in LOADING.items()}
        loading = {name: value for name, value in typed.items() if value}
        command(*args, **given, loading=loading)

    # All are passed by name but the Output, which the common options bring.
    before = [p if p.name == "output" else p.replace(kind=p.KEYWORD_ONLY) for p in own[:place]]
    behind = [p.replace(kind=p.KEYWORD_ONLY) for p in own[place + 1 :]]
    parameters = [*before, *_OPTIONS, *behind]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
