"""``sdattn generate`` and ``info``: runs, and the models that draw them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from .options import (
    Ask,
    Device,
    Dtype,
    Guidance,
    Model,
    Negative,
    Pixels,
    Preset,
    Refine,
    Settings,
    Steps,
    given,
    load,
    preset_of,
    settings,
)
from .printing import Console, print_run


def generate(
    prompt: str,
    model: Model = "demo",
    seed: int = 0,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    width: Pixels = None,
    height: Pixels = None,
    set_: Settings = None,
    negative_maps: Annotated[
        bool, typer.Option("--negative-maps", help="Draw where the negative prompt's words went.")
    ] = False,
    preset: Preset = "default",
    refine: Refine = None,
    ask: Ask = None,
    causal: Annotated[
        bool,
        typer.Option(
            "--causal", help="Draw again without each word and show what changes, in causal/."
        ),
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(help="steps, heads or both with a comma: each by itself, for --figure."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; outputs/PROMPT-SEED by default.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace a run that is there already.")] = False,
) -> None:
    """Draw a picture from PROMPT and show where each of its words went."""
    from ..models.loading import images_a_prompt, load_pipeline
    from ..models.pipeline_call import checked_options
    from ..runs.folder import check_target, file_name
    from ..runs.generation import generate
    from ..runs.run import run_folders

    options = {**given(steps, guidance, negative, width, height), **settings(set_ or [])}
    chosen, watch = preset_of(preset, refine), _kept(keep)
    out = out or Path("outputs") / f"{file_name(prompt)}-{seed}"
    if options.get("num_images_per_prompt", 1) == 1:  # known before the model is loaded
        check_target(out, force=force)
    pipe = load(load_pipeline, model, device, dtype)
    options = checked_options(pipe, options)
    for folder in run_folders(out, images_a_prompt(pipe, options)):
        check_target(folder, force=force)
    if negative_maps:
        watch["branch"] = "both"
    run = generate(
        pipe,
        prompt,
        seed=seed,
        preset=chosen,
        ask=ask,
        causal=causal,
        capture_options=watch,
        **options,
    )
    print_run(run, run.save(out, force=force))


def info(
    model: Annotated[str, typer.Argument(help="As --model of generate.")] = "demo",
    device: Device = "cpu",
    dtype: Dtype = None,
) -> None:
    """List a model's attention layers, tell how much memory capture would hold, and what of sdattn
    does not apply to the model."""
    from ..hooks.keep import Keep
    from ..models.layers import TEXT_KINDS, find_denoiser, find_layers
    from ..models.loading import latent_size, load_pipeline, shortcomings
    from ..models.reading import read_prompts

    pipe = load(load_pipeline, model, device, dtype)
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
    default = Keep.of().nbytes(texts, latent, columns)
    full = Keep.of(steps="all", heads="all").nbytes(texts, latent, columns, passes=50)
    console.print(
        f"Capture of one image holds {default / 1e6:.1f} MB, however many steps; with every head "
        f"and step of 50 steps {full / 1e6:,.0f} MB."
    )
    for one in lacks:
        console.print(Text(f"- {one}"))


def _kept(keep: str | None) -> dict[str, str]:
    """The capture options of --keep."""
    names = [] if keep is None else [one.strip() for one in keep.split(",")]
    if unknown := [name for name in names if name not in ("steps", "heads")]:
        raise typer.BadParameter(f"{unknown[0]!r} is neither steps nor heads.", param_hint="--keep")
    return dict.fromkeys(names, "all")
