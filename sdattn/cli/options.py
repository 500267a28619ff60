"""Options that several commands share, each defined once. A command's function takes those that
belong together as one dictionary, by their names in the library: an argument annotated with a
:class:`Group`."""

import functools
import gc
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from .output import TYPED, Output

Offload = Literal["model", "sequential", "group"]
Given = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Options by their parameters' names: each its type, as typer reads it, and its default."""

    options: Mapping[str, tuple[Any, Any]]


def option(kind: Any, *flags: str, default: Any = None, **told: Any) -> tuple[Any, Any]:
    """Return an option for a group; ``told`` is what :func:`typer.Option` takes. Without a default
    it is None, which a group leaves out."""
    kind = kind if default is not None else kind | None
    return Annotated[kind, typer.Option(*flags, **told)], default


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Return a completion function for an option that takes other values too."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def list_of(*names: str) -> Callable[[str], list[str]]:
    """Return a completion function for comma-separated names."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        free = [name for name in names if name not in before.split(",")]
        return [f"{before}{comma}{name}" for name in free if name.startswith(last)]

    return complete


# The model

DEVICES = ("cpu", "cuda", "mps")
DTYPE = option(
    Literal["float32", "float16", "bfloat16", "fp32", "fp16", "bf16"],
    help="Default: on CUDA bfloat16 for FLUX, Qwen-Image and Sana, float16 for others; float32 "
    "elsewhere.",
)
DEVICE = option(
    str,
    help="Device, e.g. cpu, cuda:1, mps (default: best available).",
    autocompletion=one_of(*DEVICES),
)
LOADING = {  # by their names in LoadingOptions
    "variant": option(str, help="Variant of weight files, e.g. fp16 for model.fp16.safetensors."),
    "revision": option(str, help="A branch, tag or commit on the hub."),
    "lora": option(
        list[str],
        help="PATH or PATH:SCALE: a .safetensors file, a folder, a hub id; several times. Needs "
        "peft.",
    ),
    "quantization": option(
        str,
        "--quantize",
        help="8bit or 4bit, by bitsandbytes on a GPU; gguf:FILE for the denoiser.",
        autocompletion=one_of("8bit", "4bit", "gguf:"),
    ),
    "offload": option(
        Offload,
        help="Keep weights in CPU memory until needed: whole models (model) or layer by layer.",
    ),
    "scheduler": option(str, help="Scheduler class of diffusers, e.g. EulerDiscreteScheduler."),
    "tokenizer": option(Path, help="For a single file: its tokenizer's folder."),
    "config": option(
        str,
        "--single-file-config",
        help="For a single file: its settings, from a diffusers folder or hub id.",
    ),
}
MODEL = {  # by their names in load_pipeline()
    "model": option(
        str,
        "--model",
        "-m",
        default="demo",
        help="demo, demo-mmdit, demo-video, a diffusers folder, a .safetensors file, a hub id or a "
        "page's address there.",
        autocompletion=one_of("demo", "demo-mmdit", "demo-video"),
    ),
    "device": DEVICE,
    "dtype": DTYPE,
    **LOADING,
}
Loaded = Annotated[Given, Group(MODEL)]


def load(loaded: Mapping[str, Any], output: Output | None = None) -> Any:
    """Load the pipeline that a command's options name, and describe it on stderr."""
    output = output or Output()
    model = loaded["model"]
    output.note(f"loading {model} …")  # at once: the imports alone take seconds
    # Imports make very many objects, hardly one of them garbage. Frozen, they are not looked
    # through again, neither while the command runs nor when Python ends.
    gc.disable()
    try:
        from ..loading.pipelines import load_pipeline
        from ..loading.quiet import quiet_libraries

        quiet_libraries(downloads=not (output.quiet or output.as_json))
        pipe = load_pipeline(**loaded)
    finally:
        gc.freeze()
        gc.enable()
    from ..loading.options import options_of
    from ..models.facts import PipelineFacts

    name = str(pipe.dtype).removeprefix("torch.")
    how = options_of(pipe)
    output.note(
        f"{type(pipe).__name__} {model} on {PipelineFacts(pipe).device} in {name}"
        f"{f', {how}' if how else ''}"
    )
    if output.quiet:
        pipe.set_progress_bar_config(disable=True)
    return pipe


# The image

Seed = Annotated[int, typer.Option(help="Seed of the noise; each further image adds 1.")]
CALL = {  # by their names in the pipelines' calls
    "num_inference_steps": option(
        int,
        "--steps",
        min=1,
        help="Denoising steps (default: 20 for the demo, else the pipeline's).",
    ),
    "guidance_scale": option(
        float,
        "--guidance",
        help="Guidance scale (default: a demo's own, else the pipeline's).",
    ),
    "negative_prompt": option(str, "--negative", help="Negative prompt."),
    "width": option(int, min=1, help="In pixels (default: the model's)."),
    "height": option(int, min=1, help="In pixels (default: the model's)."),
    "num_frames": option(
        int, "--frames", min=1, help="Frames of a video (default: the pipeline's)."
    ),
}
SET = option(
    list[str], "--set", help="NAME=VALUE: any other pipeline argument, e.g. true_cfg_scale=4."
)
Call = Annotated[Given, Group({**CALL, "set_": SET})]

# The heatmaps

Preset = Literal[
    "default",
    "daam",
    "p2p",
    "attend-and-excite",
    "ovam",
    "sum",
    "output",
    "seg4diff",
    "rescaled",
    "joint",
    "columns",
]
MAPS = {  # by their names in generate()
    "preset": option(
        Preset,
        default="default",
        help="How maps are made (default: best measured for the model's family).",
    ),
    "refine": option(Literal["self"], help="self: sharper maps, along the image's self-attention."),
}
Maps = Annotated[Given, Group(MAPS)]
ASK = option(str, help="Another text, 'wheel, hat': where its words would go, in asked/.")
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        help="Refuse a run whose maps would take more, e.g. 4GB, 500MB (default: none).",
    ),
]
MASK_THRESHOLD = "Share of a map's range that its mask is above, or otsu (default: 0.5)."
Words = Annotated[list[str] | None, typer.Argument(help="Words or phrases; all words by default.")]

# What is written

Force = Annotated[bool, typer.Option(help="Replace earlier output of this command.")]


def folder_named(name: str) -> Any:
    """Return the option --out for a command that writes ``outputs/NAME`` by default."""
    return typer.Option("--out", "-o", help=f"Output folder (default: outputs/{name}).")


_PRINTED = {
    "json_": option(
        bool,
        "--json",
        default=False,
        help="Print one JSON object on stdout and nothing else there.",
    ),
    "quiet": option(bool, "--quiet", "-q", default=False, help="Print errors and warnings only."),
}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a typer command for a function: in place of an argument for a group it has the group's
    options, and for ``output``, its first, the options of every command."""
    signature = inspect.signature(command)
    groups: dict[str, Mapping[str, tuple[Any, Any]]] = {}
    kinds: dict[str, tuple[Any, Any]] = {}
    for name, one in signature.parameters.items():
        held = [each for each in get_args(one.annotation) if isinstance(each, Group)]
        if held:
            groups[name] = held[0].options
            kinds |= held[0].options
        elif name != "output":
            kinds[name] = one.annotation, one.default
    prints = "output" in signature.parameters
    if prints:
        kinds |= _PRINTED

    @functools.wraps(command)
    def run(
        context: typer.Context, *, json_: bool = False, quiet: bool = False, **given: Any
    ) -> None:
        for name, options in groups.items():
            typed = {option: given.pop(option) for option in options}
            given[name] = {key: value for key, value in typed.items() if value not in (None, [])}
        output = Output(as_json=json_, quiet=quiet, command=context.meta.get(TYPED))
        if prints:
            given["output"] = output
        with output.answering(context.command):
            command(**given)

    kinds["context"] = typer.Context, inspect.Parameter.empty
    parameters = []
    for name, (kind, default) in kinds.items():
        option = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        parameters.append(option.replace(default=default, annotation=kind))
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {name: kind for name, (kind, _) in kinds.items()}
    return run
