"""``sdattn generate``: an image, and where the words of its prompt went."""

import math
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .checks import Checks, bytes_of
from .output import Output

_KEPT = ("steps", "heads", "spots")
_MOST = 1000  # folders that are looked at before the run


def generate(
    output: Output,
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    *,
    seed: options.Seed = 0,
    call: options.Call,
    negative_maps: Annotated[
        bool, typer.Option("--negative-maps", help="Draw where the negative prompt's words went.")
    ] = False,
    maps: Annotated[options.Given, options.Group({**options.MAPS, "ask": options.ASK})],
    causal: Annotated[
        bool,
        typer.Option(
            "--causal", help="Draw again without each word and show what changes, in causal/."
        ),
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(
            help="steps,heads: every one of them, for --figure; spots: click one on the page.",
            autocompletion=options.list_of(*_KEPT),
        ),
    ] = None,
    candidates: Annotated[
        int,
        typer.Option(min=1, help="Try this many seeds and draw the one that shows the most words."),
    ] = 1,
    decide_at: Annotated[
        float | None,
        typer.Option(
            "--decide-at",
            min=0,
            max=1,
            help="Share of the steps by which candidates are judged; 1 draws all of them whole "
            "(default: 0.4, or 1 where a run cannot be stopped by then).",
        ),
    ] = None,
    at_once: Annotated[
        bool,
        typer.Option("--at-once", help="Try the candidates in one batch, in as much more memory."),
    ] = False,
    max_bytes: options.MaxMemory = None,
    loaded: options.Loaded,
    folder: Annotated[Path | None, options.folder_named("PROMPT-SEED")] = None,
    force: options.Force = False,
) -> None:
    """Draw an image from PROMPT and show where each of its words went.

    Examples:
      sdattn generate "a cat left of a pizza"
      sdattn generate "a cat, a dog and a car" --candidates 4
      sdattn generate "a cat on a sofa" --model owner/name --steps 30 --refine self
    """
    from ..files.paths import file_name
    from ..models.values import EACH, whole
    from ..runs.targets import check_target, run_folders

    if negative_maps and not call.get("negative_prompt"):
        raise typer.BadParameter("--negative-maps needs --negative.")
    checks = Checks()
    given = checks.call(call)
    kept = checks.run(_kept, keep) or {}
    spots = kept.pop("spots", None) is not None
    watch = {**kept, **({"branch": "both"} if negative_maps else {})}
    folder = folder or Path("outputs") / f"{file_name(prompt)}-{seed}"
    allowed = checks.run(bytes_of, max_bytes)
    checks.of_call(loaded, [prompt], seed, given)
    images = math.prod(whole(given.get(name)) or 1 for name in EACH)
    for one in run_folders(folder, min(images, _MOST)):
        checks.run(check_target, one, force=force)
    checks.refuse()
    pipe = options.load(loaded, output)
    from ..runs.generation import generate
    from .output import print_run, save_run

    run = generate(
        pipe,
        prompt,
        seed=seed,
        causal=causal,
        spots=spots,
        candidates=candidates,
        decide_at=decide_at,
        at_once=at_once,
        capture_options=watch,
        max_bytes=allowed,
        **maps,
        **given,
    )
    print_run(output, run, save_run(output, run, folder, force=force))


def _kept(keep: str | None) -> dict[str, str]:
    names = [] if keep is None else [name.strip() for name in keep.split(",")]
    if unknown := [name for name in names if name not in _KEPT]:
        text = f"{unknown[0]!r} is none of {', '.join(_KEPT)}."
        raise typer.BadParameter(text, param_hint="--keep")
    return dict.fromkeys(names, "all")
