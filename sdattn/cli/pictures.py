"""``sdattn explain``: a picture of one's own, and where the words for it go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Ask, Device, Dtype, Model, Preset, Refine, Steps, load, open_picture, preset_of
from .printing import Console, print_run


def explain(
    image: Annotated[Path, typer.Argument(help="The picture's file.")],
    prompt: Annotated[str, typer.Argument(help="What the picture shows.")],
    invert: Annotated[
        bool, typer.Option("--invert", help="Find the noise behind the picture; slower.")
    ] = False,
    timesteps: Annotated[
        str | None, typer.Option(help="Where to look, as 100,300: 1 shows nearly the picture.")
    ] = None,
    model: Model = "demo",
    seed: int = 0,
    steps: Steps = None,
    preset: Preset = "default",
    refine: Refine = None,
    ask: Ask = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; outputs/IMAGE-explained-SEED by default.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace a run that is there already.")] = False,
) -> None:
    """Show where each word of PROMPT goes in the picture IMAGE."""
    from ..models.loading import load_pipeline
    from ..runs.explaining import explain
    from ..runs.folder import check_apart, check_target, file_name

    if steps is not None and not invert:
        raise typer.BadParameter("The timesteps are the steps, unless with --invert.")
    if timesteps is not None and invert:
        raise typer.BadParameter("An inversion goes through its own; choose --steps.")
    places = None if timesteps is None else _parsed(timesteps)
    options: dict[str, Any] = {} if steps is None else {"num_inference_steps": steps}
    out = out or Path("outputs") / f"{file_name(image.stem)}-explained-{seed}"
    watch: dict[str, Any] = {"preset": preset_of(preset, refine), "ask": ask}
    picture = open_picture(image)
    check_apart(out, image)
    check_target(out, force=force)
    pipe = load(load_pipeline, model, device, dtype)
    way: dict[str, Any] = {"timesteps": places, "invert": invert}
    run = explain(pipe, picture, prompt, seed=seed, **way, **watch, **options)
    print_run(run, run.save(out, force=force))
    explained = run[0].settings.explained
    if explained and (psnr := explained.reconstruction_psnr) is not None:
        Console().print(f"reconstruction: {psnr:.1f} dB")


def _parsed(timesteps: str) -> list[int]:
    try:
        return [int(one) for one in timesteps.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{timesteps!r} is not a list of whole numbers, 100,300 for example.",
            param_hint="--timesteps",
        ) from None
