"""Options that several commands share, each defined once, and how their values are read."""

import gc
import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from .output import Output


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


Model = Annotated[
    str,
    typer.Option(
        help="demo, demo-mmdit, demo-video, a diffusers folder, a .safetensors file, or a hub id.",
        autocompletion=one_of("demo", "demo-mmdit", "demo-video"),
    ),
]
DEVICES = ("cpu", "cuda", "mps")
Device = Annotated[
    str | None,
    typer.Option(
        help="Device, e.g. cpu, cuda:1, mps (default: best available).",
        autocompletion=one_of(*DEVICES),
    ),
]
Dtype = Annotated[
    Literal["float32", "float16", "bfloat16", "fp32", "fp16", "bf16"] | None,
    typer.Option(
        help="Default: on CUDA bfloat16 for FLUX, Qwen-Image and Sana, float16 for others; float32 "
        "elsewhere."
    ),
]
Loading = dict[str, Any] | None  # of the options in cli/common_options.py
Seed = Annotated[int, typer.Option(help="Seed of the noise; each further image adds 1.")]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", min=1, help="Denoising steps (default: 20 for the demo, else the pipeline's)."
    ),
]
InvertedSteps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        min=1,
        help="Denoising steps (default: 20 for the demo, else the pipeline's, or 50 with --image).",
    ),
]
Guidance = Annotated[
    float | None,
    typer.Option("--guidance", help="Guidance scale (default: a demo's own, else the pipeline's)."),
]
InvertedGuidance = Annotated[
    float | None,
    typer.Option(
        "--guidance",
        help="Guidance scale (default: a demo's own, else the pipeline's, or with --image "
        "7.5, 1 for SD3).",
    ),
]
Negative = Annotated[str | None, typer.Option("--negative", help="Negative prompt.")]
Pixels = Annotated[int | None, typer.Option(min=1, help="In pixels (default: the model's).")]
Frames = Annotated[
    int | None,
    typer.Option("--frames", min=1, help="Frames of a video (default: the pipeline's)."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE: any other pipeline argument, e.g. true_cfg_scale=4."),
]
Preset = Annotated[
    Literal[
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
    ],
    typer.Option(help="How maps are made (default: best measured for the model's family)."),
]
Refine = Annotated[
    Literal["self"] | None,
    typer.Option(help="self: sharper maps, along the image's self-attention."),
]
Ask = Annotated[
    str | None,
    typer.Option(help="Another text, 'wheel, hat': where its words would go, in asked/."),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        help="Refuse a run whose maps would take more, e.g. 4GB, 500MB (default: none).",
    ),
]
MASK_THRESHOLD = "Share of a map's range that its mask is above, or otsu (default: 0.5)."
Words = Annotated[list[str] | None, typer.Argument(help="Words or phrases; all words by default.")]
Force = Annotated[bool, typer.Option(help="Replace earlier output of this command.")]


def folder_named(name: str) -> Any:
    """Return the option --out for a command that writes ``outputs/NAME`` by default."""
    return typer.Option("--out", "-o", help=f"Output folder (default: outputs/{name}).")


OF_PIPELINES = (  # options of the pipeline's call that have a flag
    "num_inference_steps",
    "guidance_scale",
    "negative_prompt",
    "width",
    "height",
    "num_frames",
)
_WITH_OPTION = {  # names that --set refuses: options of the commands and of generate()
    *("prompt", "pipe", "seed", "words", "capture_options", "preset", "refine", "ask", "causal"),
    *("spots", "max_bytes"),
    *OF_PIPELINES,
}


def pipeline_options(**options: float | str | None) -> dict[str, Any]:
    """Return the options of the pipeline's call that were given; --set has its own, `setting`."""
    return {name: value for name, value in options.items() if value is not None}


def setting(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE; the value is JSON if it parses as JSON, else text."""
    name, is_set, value = text.partition("=")
    if not is_set or not name.isidentifier():
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE.", param_hint="--set")
    if name in _WITH_OPTION:
        raise typer.BadParameter(f"Pass {name} by its own option or argument.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def names_of(text: str) -> tuple[str, ...]:
    """Read names with commas between."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def threshold_of(text: str | None) -> float | str | None:
    """Read a threshold of masks: a number, or a name."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def bytes_of(size: str | None) -> int | None:
    """Read --max-memory.

    >>> bytes_of("500 MB"), bytes_of("1.5GiB")
    (500000000, 1610612736)
    """
    if size is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT])(i?)B", size.strip(), re.IGNORECASE)
    number = 0
    if found:
        base = 1024 if found[3] else 1000
        number = round(float(found[1]) * base ** ("KMGT".index(found[2].upper()) + 1))
    if not number:
        raise typer.BadParameter(
            f"{size!r} is not a size such as 4GB, 500 MB or 1.5GiB.", param_hint="--max-memory"
        )
    return number


def load(
    model: str,
    device: str | None,
    dtype: str | None,
    loading: Loading = None,
    output: Output | None = None,
) -> Any:
    """Load the pipeline that --model, --device, --dtype and the loading options name, and describe
    it on stderr."""
    output = output or Output()
    output.note(f"loading {model} …")  # at once: the imports alone take seconds
    # Imports make very many objects, hardly one of them garbage. Frozen, they are not looked
    # through again, neither while the command runs nor when Python ends.
    gc.disable()
    try:
        from ..loading.pipelines import load_pipeline
        from ..loading.quiet import quiet_libraries

        quiet_libraries()
        pipe = load_pipeline(model, device=device, dtype=dtype, **(loading or {}))
    finally:
        gc.freeze()
        gc.enable()
    from ..loading.options import device_of, options_of

    name = str(pipe.dtype).removeprefix("torch.")
    how = options_of(pipe)
    output.note(
        f"{type(pipe).__name__} {model} on {device_of(pipe)} in {name}{f', {how}' if how else ''}"
    )
    if output.quiet:
        pipe.set_progress_bar_config(disable=True)
    return pipe
