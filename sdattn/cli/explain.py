"""``sdattn explain``: heatmaps for an existing image."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options
from .checks import Checks, bytes_of
from .output import Output


def explain(
    output: Output,
    image: Annotated[Path, typer.Argument(help="The image's file.")],
    prompt: Annotated[str, typer.Argument(help="What the image shows.")],
    *,
    invert: Annotated[
        bool,
        typer.Option("--invert", help="Find the noise behind the image; slower; UNets only."),
    ] = False,
    timesteps: Annotated[
        str | None, typer.Option(help="Timesteps to look at, e.g. 100,300; 1 is almost the image.")
    ] = None,
    seed: options.Seed = 0,
    num_inference_steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, help="Steps with --invert (default: 20 for the demo, else 50)."
        ),
    ] = None,
    maps: Annotated[options.Given, options.Group({**options.MAPS, "ask": options.ASK})],
    max_bytes: options.MaxMemory = None,
    loaded: options.Loaded,
    folder: Annotated[Path | None, options.folder_named("IMAGE-explained-SEED")] = None,
    force: options.Force = False,
) -> None:
    """Show where each word of PROMPT went in an existing image.

    Examples:
      sdattn explain photo.jpg "a cat on a sofa" --model owner/name
      sdattn explain photo.jpg "a cat on a sofa" --model owner/name --invert --steps 30
    """
    from ..files.images import open_image
    from ..files.paths import check_apart, file_name
    from ..runs.targets import check_target

    if num_inference_steps is not None and not invert:
        raise typer.BadParameter("--steps needs --invert; otherwise choose --timesteps.")
    if timesteps is not None and invert:
        raise typer.BadParameter("--invert chooses its own timesteps; pass --steps.")
    if os.path.isfile(prompt) and not os.path.isfile(image):
        asked = f"sdattn explain {shlex.quote(prompt)} {shlex.quote(str(image))}"
        raise typer.BadParameter(f"The image and its prompt are swapped. Type: {asked}")
    checks = Checks()
    way: dict[str, Any] = {"timesteps": checks.run(_parsed, timesteps), "invert": invert}
    if num_inference_steps is not None:
        way["num_inference_steps"] = num_inference_steps
    allowed = checks.run(bytes_of, max_bytes)
    folder = folder or Path("outputs") / f"{file_name(image.stem)}-explained-{seed}"
    checks.of_call(loaded, [prompt], seed, {})
    opened = checks.run(open_image, image)
    checks.run(check_apart, folder, image)
    checks.run(check_target, folder, force=force)
    checks.refuse()
    assert opened is not None  # or refused
    pipe = options.load(loaded, output)
    from ..runs.explaining import explain
    from .output import print_rows, print_run, save_run

    run = explain(pipe, opened, prompt, seed=seed, max_bytes=allowed, **way, **maps)
    print_run(output, run, save_run(output, run, folder, force=force))
    explained = run[0].settings.explained
    seen = run[0].image.size
    whole = opened.size
    if seen != whole:
        part = f"the middle {seen[0]}x{seen[1]} of {whole[0]}x{whole[1]} pixels"
        print_rows(output, {"seen": part})
    if explained and (psnr := explained.reconstruction_psnr) is not None:
        near = f"{psnr:.1f} dB (PSNR of what the model makes of the image)"
        print_rows(output, {"reconstruction": near})


def _parsed(timesteps: str | None) -> list[int] | None:
    try:
        return None if timesteps is None else [int(number) for number in timesteps.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{timesteps!r} is not a list of whole numbers, 100,300 for example.",
            param_hint="--timesteps",
        ) from None
