"""``sdattn edit``: change a prompt and keep the image."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from . import options
from .checks import Checks, bytes_of
from .output import Output

_CALL = {
    "num_inference_steps": options.option(
        int,
        "--steps",
        min=1,
        help="Denoising steps (default: 20 for the demo, else the pipeline's, or 50 with --image).",
    ),
    "guidance_scale": options.option(
        float,
        "--guidance",
        help="Guidance scale (default: a demo's own, else the pipeline's, or with --image "
        "7.5, 1 for SD3).",
    ),
    **{name: options.CALL[name] for name in ("negative_prompt", "width", "height")},
}


def edit(
    output: Output,
    source: Annotated[str, typer.Argument(help="The prompt whose image is kept.")],
    targets: Annotated[list[str], typer.Argument(help="The edited prompt, or several.")],
    *,
    mode: Annotated[
        Literal["auto", "replace", "refine", "reweight"],
        typer.Option(help="Swap words, add or remove words, or reweight words."),
    ] = "auto",
    cross_replace_steps: Annotated[
        float | None,
        typer.Option(
            "--cross",
            min=0,
            max=1,
            help="Part of the run that takes the source's cross-attention (default: best measured "
            "for the model's family).",
        ),
    ] = None,
    self_replace_steps: Annotated[
        float | None,
        typer.Option("--self", min=0, max=1, help="The same for self-attention."),
    ] = None,
    blend: Annotated[
        list[str] | None, typer.Option(help="Change the image only where this WORD is.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option("--weight", help="WORD=FACTOR: more or less attention to a word."),
    ] = None,
    image: Annotated[
        Path | None, typer.Option(help="Edit this image, which SOURCE describes.")
    ] = None,
    null_text: Annotated[
        bool | None,
        typer.Option(help="Optimise the inversion of --image (default: on for UNets)."),
    ] = None,
    maps: options.Maps,
    seed: options.Seed = 0,
    call: Annotated[options.Given, options.Group(_CALL)],
    max_bytes: options.MaxMemory = None,
    loaded: options.Loaded,
    folder: Annotated[Path | None, options.folder_named("SOURCE-edit-SEED")] = None,
    force: options.Force = False,
) -> None:
    """Draw SOURCE and its edited versions from the same noise, and keep the layout.

    Examples:
      sdattn edit "a cat left of a pizza" "a dog left of a pizza"
      sdattn edit "a cat on a sofa" "a dog on a sofa" --model owner/name --blend cat
      sdattn edit "a cat on a sofa" "a cat on a sofa" --weight sofa=0.3 --image photo.jpg
    """
    from ..files.paths import check_apart, file_name
    from ..runs.targets import check_target

    if null_text is not None and image is None:
        raise typer.BadParameter("`null_text` needs `image`, whose inversion it is about.")
    checks = Checks()
    factors = dict(filter(None, (checks.run(_parsed_weight, text) for text in weights or ())))
    folder = folder or Path("outputs") / f"{file_name(source)}-edit-{seed}"
    given = dict(call)
    checks.of_call(loaded, [source, *targets], seed, given)
    allowed = checks.run(bytes_of, max_bytes)
    given_image = None
    if image:
        from ..files.images import open_image

        checks.run(check_apart, folder, image)
        given_image = checks.run(open_image, image)
    checks.run(check_target, folder, force=force, kind="edit")
    checks.refuse()
    pipe = options.load(loaded, output)
    from ..edit.editing import EditOptions, edit, plan_edit
    from .output import print_folder, save_run, table

    asked = EditOptions(mode, cross_replace_steps, self_replace_steps, blend or (), factors)
    if given_image is not None:
        plan_edit(pipe, source, targets, asked, given)  # refuse before the long part
        given["inversion"] = _invert(pipe, given_image, source, given, null_text)
    given |= {**maps, "max_bytes": allowed}
    run = edit(pipe, source, targets, seed=seed, **vars(asked), **given)
    save_run(output, run, folder, force=force)
    rows = []
    for heatmaps, words in zip(run.heatmaps, run.words, strict=True):
        rows.append((heatmaps.prompt.text, ", ".join(words)))
    output.print(table(("image", "words"), rows))
    psnr = run.settings.get("reconstruction_psnr")
    near = {} if psnr is None else {"reconstruction": f"{psnr:.1f} dB"}
    output.answer(print_folder(output, folder, mode=run.mode, **near))


def _parsed_weight(text: str) -> tuple[str, float]:
    word, equals, factor = text.rpartition("=")
    try:
        return word, float(factor if equals and word else "")
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not WORD=FACTOR, cat=2 for example.", param_hint="--weight"
        ) from None


def _invert(
    pipe: Any, image: Any, source: str, given: dict[str, Any], null_text: bool | None
) -> Any:
    """Take the options that an inversion fixes out of ``given``, and invert."""
    from ..edit import invert
    from ..models.demos import demo_of

    if fixed := {"width", "height", "negative_prompt"} & set(given):
        names = ", ".join(f"--{name.removesuffix('_prompt')}" for name in sorted(fixed))
        raise typer.BadParameter(f"{names}: not with --image, which fixes it.")
    demo = demo_of(pipe)
    settings: dict[str, Any] = {**demo.settings, **demo.inversion} if demo else {}
    for name in ("num_inference_steps", "guidance_scale"):
        if name in given:
            settings[name] = given.pop(name)
    return invert(pipe, image, source, null_text=null_text, **settings)
