"""``sdattn batch``: many prompts in one run that can be resumed."""

import os
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import InvalidValueError
from ..files.terminal import counted, say
from . import options
from .checks import Checks
from .output import Output

_LAUNCHED = {  # what launchers set: torchrun and accelerate launch, and Ray for its jobs
    "TORCHELASTIC_RUN_ID",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
}
_PARTS = ("image", "video", "overlays", "grid", "maps", "masks", "report")


def batch(
    output: Output,
    prompts: Annotated[
        str | None,
        typer.Argument(
            help="A .jsonl, .csv, .tsv, .txt, .json or .parquet file, also s3://BUCKET/FILE or "
            "hf://datasets/OWNER/NAME/FILE, a folder that datasets reads, or a folder or .tar of "
            "images with captions; - reads standard input."
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The run's folder, or s3://BUCKET/RUN.")
    ] = None,
    model: options.Model = "demo",
    seed: Annotated[
        int, typer.Option(help="Seed of the first prompt; each later line adds 1.")
    ] = 0,
    num_inference_steps: options.Steps = None,
    guidance_scale: options.Guidance = None,
    negative_prompt: options.Negative = None,
    width: options.Pixels = None,
    height: options.Pixels = None,
    num_frames: options.Frames = None,
    set_: options.Settings = None,
    preset: options.Preset = "default",
    refine: options.Refine = None,
    batch_size: Annotated[
        str,
        typer.Option(
            help="Items drawn together; auto finds the fastest number.",
            autocompletion=options.list_of("auto"),
        ),
    ] = "auto",
    format_: Annotated[
        Literal["folder", "webdataset", "parquet"],
        typer.Option(
            "--format",
            help="folder: one per item; webdataset: tar files of items; parquet: one row per item.",
        ),
    ] = "folder",
    shard_mb: Annotated[
        int, typer.Option(min=1, help="Size in MB of each tar or Parquet file.")
    ] = 256,
    save: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated, from {', '.join(_PARTS)} (default: all except masks).",
            autocompletion=options.list_of(*_PARTS),
        ),
    ] = None,
    part: Annotated[
        str, typer.Option(help="K/N: draw the K-th of N parts of the input, for job arrays.")
    ] = "1/1",
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop before the first image if a line is bad.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Continue another command's run: items that differ are deleted and drawn again.",
        ),
    ] = False,
    input_format: Annotated[
        Literal["jsonl", "json", "csv", "tsv", "txt", "parquet"] | None,
        typer.Option(
            help="Input format. Default: from the file extension; for stdin, from its first line."
        ),
    ] = None,
    prompt_column: Annotated[
        str | None,
        typer.Option(
            help="The column that holds the prompt. Default: prompt, Prompt, Prompts, caption or "
            "text, whichever exists."
        ),
    ] = None,
    keep_columns: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated columns to copy into the results; all: every column that is no "
            "option."
        ),
    ] = None,
    max_errors: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many failed items.")
    ] = None,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(help="local: this machine or accelerate launch; ray: a Ray cluster."),
    ] = "local",
    workers: Annotated[
        str | None,
        typer.Option(help="Ray workers, as N or MIN:MAX (default: one per GPU)."),
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    loading: options.Loading = None,
    status: Annotated[
        Path | None, typer.Option(help="Only print this run's progress.", metavar="RUN")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(help="Only read this run again and verify it.", metavar="RUN")
    ] = None,
) -> None:
    """Draw every prompt in a file and map each of its words. Run the same command again to draw
    only missing items. For many GPUs: accelerate launch --multi_gpu -m sdattn batch ...

    A JSON line or table row has a prompt and, optionally, id, seed, negative_prompt, words (maps
    for these only), width, height, num_frames, num_inference_steps, guidance_scale, or any other
    pipeline argument. Other columns of a table are ignored. If it has image, the path of a file,
    that image is explained, as by sdattn explain, with the prompt as its caption.

    Exit code: 0; 1 if anything failed or could not be read, but under a launcher only if something
    is left to draw; 2 usage; 130 and 143 after SIGINT and SIGTERM.

    Examples:
      sdattn batch prompts.jsonl --out RUN --model owner/name
      sdattn batch prompts.txt --out RUN --format webdataset --save image,maps
      sdattn batch PartiPrompts.tsv --out RUN --keep-columns Category,Challenge
      sdattn batch photos/ --out RUN --model owner/name --save image,maps,masks
      sdattn batch --status RUN
    """
    if (status or verify) and (prompts is not None or folder is not None or (status and verify)):
        raise typer.BadParameter("--status and --verify each take a run and nothing else.")
    if status:
        return _print_status(output, status)
    if verify:
        return _verify(output, verify)
    if prompts is None or folder is None:
        raise typer.BadParameter("Pass a file of prompts and --out RUN.")
    checks = Checks()
    given = options.pipeline_options(
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        negative_prompt=negative_prompt,
        width=width,
        height=height,
        num_frames=num_frames,
    )
    given |= checks.settings(set_)
    checks.refuse()
    from ..batch.input.request import Request
    from ..loading.options import LoadingOptions
    from ..maps.presets import preset_of

    request = Request(
        source=prompts,
        out=folder,
        model=model,
        options=given,
        seed=seed,
        batch_size=int(batch_size) if batch_size.isdecimal() else batch_size,
        preset=preset_of(preset, refine),
        format=format_,
        shard_bytes=shard_mb * 1_000_000,
        save=None if save is None else tuple(name.strip() for name in save.split(",")),
        part=_pair(part, "/", "--part", "not K/N with K from 1 to N"),
        strict=strict,
        force=force,
        input_format=input_format,
        prompt_column=prompt_column,
        keep_columns=_kept(keep_columns),
        max_errors=max_errors,
        device=device,
        dtype=dtype,
        loading=LoadingOptions(**(loading or {})),
        progress=not output.quiet,
        engine=engine,
        workers=None
        if workers is None
        else _pair(workers, ":", "--workers", "neither N nor MIN:MAX"),
    )
    _run(output, request)


def _run(output: Output, request: Any) -> None:
    from ..batch.run import run_batch
    from ..files.addresses import path_of
    from ..loading.quiet import quiet_libraries

    quiet_libraries(prompts=True)
    try:
        request.check()
    except InvalidValueError as error:
        raise typer.BadParameter(str(error)) from error
    # A wrong request is a usage error, exit code 2; a wrong input is 1.
    outcome = run_batch(request)
    if outcome is not None:  # the first process reports
        _print_outcome(output, outcome, path_of(request.out))
        # Under a launcher, for which any other code is a crash, 0 once all that can be drawn is.
        is_all = not outcome.stopped and outcome.whole + outcome.failed == outcome.items
        is_launched = not _LAUNCHED.isdisjoint(os.environ)
        raise typer.Exit(0 if is_all and is_launched else outcome.exit_code)


def _kept(text: str | None) -> Any:
    names = [name.strip() for name in (text or "").split(",")]
    return "all" if names == ["all"] else tuple(filter(None, names))


def _pair(text: str, between: str, option: str, why: str) -> tuple[int, int]:
    first, found, last = text.partition(between)
    last = first if option == "--workers" and not found else last
    if first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        return int(first), int(last)
    raise typer.BadParameter(f"{text!r} is {why}.", param_hint=option)


def _print_outcome(output: Output, outcome: Any, out: Any) -> None:
    from ..batch.storage.rows import rows_in
    from .printing import print_rows

    text = f"{out}/: {outcome.whole:,} of {counted(outcome.items, 'item')}"
    if outcome.before:
        text += f", {outcome.before:,} of them were there"
    if made := outcome.whole - outcome.before:
        text += f"; {made:,} made in {outcome.seconds:.1f} s, {made / outcome.seconds:.3g} a second"
    if outcome.failed:
        text += f"; {outcome.failed:,} failed"
    if outcome.bad_lines:
        text += f"; {counted(outcome.bad_lines, 'line')} could not be read"
    if outcome.failed or outcome.bad_lines:
        text += f", see {out / 'errors.jsonl'}"
    output.print(text, len(text))
    output.answer({"folder": str(out), **vars(outcome)})
    # Lines that could not be read were told before the first image.
    for row in islice(rows_in(out / "errors.jsonl"), min(outcome.failed, 3)):
        say(f"{row['id']} failed: {row.get('reason')}")
    if outcome.stopped:
        say(f"stopped early ({outcome.stopped}); the same command does the rest")
    elif (out / "index.html").is_file():
        print_rows(output, {"open": str(out / "index.html")})


def _print_status(output: Output, run: Path) -> None:
    from ..batch.reading import status
    from ..files.addresses import path_of

    now, run_at = status(run), path_of(run)
    whole = f"{counted(now.whole, 'item')} {'is' if now.whole == 1 else 'are'} whole"
    lines = [f"{run_at}/: {whole}, the input has {now.items:,}"]
    if now.failed:
        listed = run_at / "errors.jsonl"
        lines.append(f"{now.failed:,} failed, see {listed}; the same command tries them again")
    if now.bad_lines:
        lines.append(f"{counted(now.bad_lines, 'line')} of the input could not be read")
    lines.append(f"running: {now.running}" if now.running else "not running")
    for line in lines:
        output.print(line, len(line))
    output.answer({"folder": str(run_at), **vars(now)})


def _verify(output: Output, run: Path) -> None:
    from ..batch.reading import verify
    from ..files.addresses import path_of

    (number, problems), run_at = verify(run), path_of(run)
    for problem in problems:
        say(problem)
    line = f"{run_at}/: {counted(number, 'item')} read, {counted(len(problems), 'problem')}"
    output.print(line, len(line))
    output.answer({"folder": str(run_at), "items": number, "problems": problems})
    if problems:
        say(
            "delete the damaged items or shards, then run the batch's command again: it draws "
            "whatever is missing"
        )
        raise typer.Exit(1)
