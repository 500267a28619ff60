"""The command line: ``sdattn generate``, ``edit``, ``show`` and ``info``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

app = typer.Typer(
    help="Shows where each word of a prompt went in a Stable Diffusion image.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Option(help="demo, a diffusers folder, a .safetensors file, or a hub id.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps; the best there is by default.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, float16, bfloat16; by default what suits the device.")
]
Steps = Annotated[int | None, typer.Option(min=1, help="Denoising steps.")]
Guidance = Annotated[float | None, typer.Option(help="Guidance scale.")]
Negative = Annotated[str | None, typer.Option(help="Negative prompt.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="NAME=VALUE: any other option of the pipeline, true_cfg_scale=4 say."
    ),
]
Pixels = Annotated[int | None, typer.Option(min=1, help="In pixels.")]


def main() -> None:
    """Run the command line; exit code 0, 1 (failed, with the reason on stderr) or 2 (usage)."""
    warnings.showwarning = _show_warning
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        print(f"sdattn: {_reason(error)}", file=sys.stderr)
        sys.exit(1)


def _reason(error: Exception) -> str:
    """The message in one line; an error that is not ours to word comes with its type."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    text = " ".join(text.split())
    ours = isinstance(error, (OSError, ValueError, TypeError, KeyError, RuntimeError))
    return text if ours and text else f"{type(error).__name__}: {text}"


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if category.__module__.startswith("sdattn") or category is UserWarning:
        print(f"sdattn: warning: {message}", file=sys.stderr)


@app.callback(invoke_without_command=True)
def version_option(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from . import __version__

        print(__version__)
        raise typer.Exit


@app.command()
def generate(
    prompt: str,
    model: Model = "demo",
    seed: int = 0,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    width: Pixels = None,
    height: Pixels = None,
    settings: Settings = None,
    negative_maps: Annotated[
        bool, typer.Option("--negative-maps", help="Draw where the negative prompt's words went.")
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; outputs/PROMPT-SEED by default.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace a run that is there already.")] = False,
) -> None:
    """Draw a picture from PROMPT and show where each of its words went."""
    from .files import check_target, file_name
    from .pipelines import images_a_prompt, load_pipeline
    from .runs import generate, run_folders

    options = {**_given(steps, guidance, negative, width, height), **_settings(settings or [])}
    out = out or Path("outputs") / f"{file_name(prompt)}-{seed}"
    if options.get("num_images_per_prompt", 1) == 1:  # known before the model is loaded
        check_target(out, force=force)
    pipe = _load(load_pipeline, model, device, dtype)
    for folder in run_folders(out, images_a_prompt(pipe, options)):
        check_target(folder, force=force)
    watch = {"branch": "both"} if negative_maps else {}
    run = generate(pipe, prompt, seed=seed, capture_options=watch, **options)
    for folder, heatmaps in zip(run.save(out, force=force), run.heatmaps, strict=True):
        _print_words(heatmaps, folder)


def _given(
    steps: int | None,
    guidance: float | None,
    negative: str | None,
    width: int | None,
    height: int | None,
) -> dict[str, Any]:
    """The pipeline's options that were given."""
    given = {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "negative_prompt": negative,
        "width": width,
        "height": height,
    }
    return {name: value for name, value in given.items() if value is not None}


_OWN = {"prompt", "pipe", "seed", "words", "capture_options", "num_inference_steps", "width"}
_OWN |= {"guidance_scale", "negative_prompt", "height"}


def _settings(texts: list[str]) -> dict[str, Any]:
    """NAME=VALUE, the value as JSON where it is that, else as text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, is_set, value = text.partition("=")
        if not is_set or not name.isidentifier():
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE.", param_hint="--set")
        if name in _OWN:
            raise typer.BadParameter(f"{name} has an option or argument of its own.")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


@app.command()
def edit(
    source: Annotated[str, typer.Argument(help="The prompt whose picture is kept.")],
    targets: Annotated[list[str], typer.Argument(help="The edited prompt, or several.")],
    mode: Annotated[str, typer.Option(help="auto, replace, refine or reweight.")] = "auto",
    cross: Annotated[
        float, typer.Option(help="Part of the run that takes the source's cross-attention.")
    ] = 0.8,
    self_: Annotated[
        float, typer.Option("--self", help="Part that takes its self-attention.")
    ] = 0.4,
    blend: Annotated[
        list[str] | None, typer.Option(help="Change the picture only where this WORD is.")
    ] = None,
    weight: Annotated[
        list[str] | None, typer.Option(help="WORD=FACTOR: heed a word more or less.")
    ] = None,
    image: Annotated[
        Path | None, typer.Option(help="Edit this picture, which SOURCE describes.")
    ] = None,
    null_text: Annotated[
        bool, typer.Option(help="Optimise the way back to the picture of --image.")
    ] = True,
    model: Model = "demo",
    seed: int = 0,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    width: Pixels = None,
    height: Pixels = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder; outputs/SOURCE-edit-SEED by default.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace an edit that is there already.")] = False,
) -> None:
    """Draw SOURCE and its edited versions from the same noise, and keep the layout."""
    from .edit import edit, prepare
    from .files import check_target, file_name
    from .pipelines import load_pipeline

    weights = dict(_parsed_weight(one) for one in weight or ())
    out = out or Path("outputs") / f"{file_name(source)}-edit-{seed}"
    check_target(out, force=force)
    picture = _open(image) if image else None
    pipe = _load(load_pipeline, model, device, dtype)
    options = _given(steps, guidance, negative, width, height)
    if picture is not None:
        settings = (mode, cross, self_, blend or (), weights, None)
        prepare(pipe, source, targets, *settings, options)  # refuse before the long part
        options["inversion"] = _invert(pipe, picture, source, options, null_text)
    run = edit(
        pipe,
        source,
        targets,
        seed=seed,
        mode=mode,  # type: ignore[arg-type]
        cross_replace_steps=cross,
        self_replace_steps=self_,
        blend=blend or (),
        weights=weights,
        **options,
    )
    run.save(out, force=force)
    table = Table("image", "words", title_justify="left")
    for heatmaps, words in zip(run.heatmaps, run.words, strict=True):
        table.add_row(Text(heatmaps.prompt.text), Text(", ".join(words)))
    console = Console()
    console.print(table)
    if image:
        console.print(f"reconstruction: {run.settings['reconstruction_psnr']:.1f} dB")
    parts = sorted(f"{path.name}/" for path in out.iterdir() if path.is_dir())
    console.print(Text(f"{out}/ ({run.mode}): edit.png, run.json, {', '.join(parts)}"))


def _parsed_weight(text: str) -> tuple[str, float]:
    word, equals, factor = text.rpartition("=")
    try:
        return word, float(factor if equals and word else "")
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not WORD=FACTOR, circle=2 for example.", param_hint="--weight"
        ) from None


def _open(path: Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            image.load()
            return image
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is no picture that can be read.") from error


def _invert(pipe: Any, picture: Any, source: str, options: dict[str, Any], null_text: bool) -> Any:
    """Take out of ``options`` what an inversion fixes, and invert."""
    from .edit import invert
    from .pipelines import DEMO_INVERSION, DEMO_SETTINGS, is_demo

    if fixed := {"width", "height", "negative_prompt"} & set(options):
        names = ", ".join(f"--{name.removesuffix('_prompt')}" for name in sorted(fixed))
        raise typer.BadParameter(f"{names}: with --image the picture decides.")
    settings: dict[str, Any] = {**DEMO_SETTINGS, **DEMO_INVERSION} if is_demo(pipe) else {}
    for name in ("num_inference_steps", "guidance_scale"):
        if name in options:
            settings[name] = options.pop(name)
    return invert(pipe, picture, source, null_text=null_text, **settings)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    words: Annotated[
        list[str] | None, typer.Argument(help="Words or phrases; all words by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to draw; into the run's folder by default.")
    ] = None,
) -> None:
    """Draw the heatmaps of a saved run again, without the model."""
    from .files import draw, load_run

    saved = load_run(run)
    maps = saved.heatmaps.occurrences()
    if words:
        maps = [one for word in words for one in saved.heatmaps.find(word)]
    folder = out or run
    folder.mkdir(parents=True, exist_ok=True)
    draw(folder, saved.image, maps, saved.heatmaps.prompt.text)
    _print_words(saved.heatmaps, folder, maps)


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="As --model of generate.")] = "demo",
    device: Device = "cpu",
    dtype: Dtype = None,
) -> None:
    """List a model's attention layers, tell how much memory capture would hold, and what of sdattn
    does not apply to the model."""
    from .layers import TEXT_KINDS, find_denoiser, find_layers
    from .maps import expected_bytes
    from .pipelines import latent_size, load_pipeline, shortcomings
    from .prompts import read_prompts

    pipe = _load(load_pipeline, model, device, dtype)
    latent = latent_size(pipe)
    found = find_layers(find_denoiser(pipe).model)
    table = Table(title=f"{type(pipe).__name__} {model}")
    table.add_column("layer", overflow="fold")  # names are to be copied
    for column in ("place", "kind", "grid", "heads"):
        table.add_column(column)
    for layer in found:
        rows, cols = layer.grid(latent)
        table.add_row(layer.name, layer.place, layer.kind, f"{rows}x{cols}", str(layer.heads))
    console = Console()
    console.print(table)
    lacks = shortcomings(pipe)
    for name, part in pipe.components.items():
        if name.startswith("tokenizer") and part is not None:
            console.print(f"{name}: {type(part).__name__}")
    try:
        columns = len(read_prompts(pipe, "a")[0].tokens)
    except (TypeError, ValueError):
        columns = 1
        console.print("How many token columns it makes of a prompt is not known; for one of them:")
    else:
        console.print(f"{columns} token columns")
    texts = [layer for layer in found if layer.kind in TEXT_KINDS]
    default = expected_bytes(texts, latent, columns)
    full = expected_bytes(texts, latent, columns, passes=50, steps="all", heads="all")
    console.print(
        f"Capture of one image holds {default / 1e6:.1f} MB, however many steps; with every head "
        f"and step of 50 steps {full / 1e6:,.0f} MB."
    )
    for one in lacks:
        console.print(Text(f"- {one}"))


def _load(load_pipeline: Any, model: str, device: str | None, dtype: str | None) -> Any:
    import torch
    from diffusers.utils import logging
    from transformers.utils import logging as transformers_logging

    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype is not None and dtype not in known:
        raise typer.BadParameter(f"{dtype} is not one of {', '.join(known)}.", param_hint="--dtype")
    logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # it warns of parts that are not used here
    transformers_logging.disable_progress_bar()
    pipe = load_pipeline(model, device=device, dtype=known.get(dtype or ""))
    name = str(pipe.dtype).removeprefix("torch.")
    print(f"{type(pipe).__name__} {model} on {pipe.device} in {name}", file=sys.stderr)
    return pipe


def _print_words(heatmaps: Any, folder: Path, maps: list[Any] | None = None) -> None:
    table = Table("word", "tokens", "lowest", "highest", title_justify="left")
    for one in heatmaps.occurrences() if maps is None else maps:
        low, high = one.range
        columns = ", ".join(map(str, one.columns))
        table.add_row(Text(one.label), columns, f"{low:.2g}", f"{high:.2g}")
    console = Console()
    console.print(table)
    console.print(Text(f"{folder}/: image.png, grid.png, heatmaps/, maps.safetensors, run.json"))
