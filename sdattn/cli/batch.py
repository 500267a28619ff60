"""``sdattn batch``: many prompts, or photos, in one run that can be resumed."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import (
    AccessError,
    ExistsError,
    InvalidValueError,
    MissingFileError,
    access_error,
    size_text,
)
from ..files.terminal import counted, say
from . import options
from .checks import Checks, names_of, threshold_of
from .options import option
from .output import Output

if TYPE_CHECKING:
    from ..batch.request import Outcome, Request
    from ..files.addresses import AnyPath

_LAUNCHED = {  # what launchers set: torchrun and accelerate launch, and Ray for its jobs
    "TORCHELASTIC_RUN_ID",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
}
_PARTS = ("image", "video", "overlays", "grid", "maps", "masks", "report")

_CHOICE = {  # of each item's seed
    "candidates": option(
        int, min=1, help="Try this many seeds per item and draw the one that shows the most words."
    ),
    "decide_at": option(
        float, "--decide-at", min=0, max=1, help="Share of the steps by which they are judged."
    ),
}
_REQUEST = {  # by their names in Request
    "photos": option(
        str,
        metavar="SOURCE",
        help="Explain photos instead of drawing prompts: a folder or .tar of NAME.jpg with "
        "NAME.txt, a table with a column of images, or a data set.",
    ),
    "seed": option(int, default=0, help="Seed of the first prompt; each later line adds 1."),
    "batch_size": option(int, min=1, help="Items drawn together (default: 8 images or 1 video)."),
    "shard_items": option(
        int, min=1, help="Items in a shard, the unit of work (default: up to 100)."
    ),
    "limit": option(int, min=1, metavar="N", help="Draw only the shards of the first N items."),
    "format": option(
        Literal["folder", "webdataset"],
        default="folder",
        help="folder: one per item; webdataset: tar files of items.",
    ),
    "save": option(
        str,
        help=f"Comma-separated, from {', '.join(_PARTS)} (default: all except masks).",
        autocompletion=options.list_of(*_PARTS),
    ),
    "mask_words": option(
        str, "--words", help="Comma-separated words to make masks of (default: all)."
    ),
    "mask_threshold": option(str, help=options.MASK_THRESHOLD),
    "part": option(
        str, help="K/N: draw the K-th of N parts (default: what SLURM arrays and torchrun set)."
    ),
    "strict": option(
        bool, "--strict", default=False, help="Stop before the first image if a line is bad."
    ),
    "force": option(
        bool,
        "--force",
        default=False,
        help="Continue another command's run: shards that differ are drawn again.",
    ),
    "retry_failed": option(
        bool, "--retry-failed", default=False, help="Draw the items again that failed."
    ),
    "input_format": option(
        Literal["jsonl", "csv", "tsv", "txt", "parquet"],
        help="Input format. Default: from the file extension; for stdin, jsonl.",
    ),
    "prompt_column": option(
        str,
        help="The column that holds the prompt. Default: prompt, Prompt, Prompts, caption or "
        "text, whichever exists.",
    ),
    "keep_columns": option(
        str,
        help="Comma-separated columns to copy into the results; all: every column that is no "
        "option.",
    ),
    "max_errors": option(int, min=1, help="Stop after this many failed items."),
    "engine": option(
        Literal["local", "ray"],
        default="local",
        help="local: this machine; ray: a Ray cluster.",
    ),
    "workers": option(
        int, min=1, help="Processes at work (default: one per GPU; without a GPU one)."
    ),
}


def batch(
    output: Output,
    prompts: Annotated[
        str | None,
        typer.Argument(
            help="A .jsonl, .csv, .tsv, .txt or .parquet file, also s3://BUCKET/FILE or "
            "hf://datasets/OWNER/NAME, or a data set that save_to_disk() wrote; - reads standard "
            "input."
        ),
    ] = None,
    *,
    folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder, or s3://BUCKET/RUN.")
    ] = None,
    request: Annotated[options.Given, options.Group(_REQUEST)],
    choice: Annotated[options.Given, options.Group(_CHOICE)],
    call: options.Call,
    maps: options.Maps,
    loaded: options.Loaded,
    status: Annotated[
        Path | None, typer.Option(help="Only print this run's progress.", metavar="RUN")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(help="Only read this run again and verify it.", metavar="RUN")
    ] = None,
    summarize: Annotated[
        Path | None,
        typer.Option(
            help="Only write this run's metadata.jsonl, errors.jsonl and index.html, as far as it "
            "is.",
            metavar="RUN",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what would be drawn, and how long it would take."),
    ] = False,
) -> None:
    """Draw every prompt in a file and map each of its words. Run the same command again to draw
    only what is missing.

    A JSON line or table row has a prompt and, optionally, id, seed, negative_prompt, words (maps
    for these only), width, height, num_frames, num_inference_steps, guidance_scale, candidates,
    decide_at, or any other pipeline argument. Other columns of a table are ignored.

    Exit code: 0; 1 if anything failed or could not be read, but under a launcher only if something
    is left to draw; 2 for a wrong option or list; 130 and 143 after SIGINT and SIGTERM.

    Examples:
      sdattn batch prompts.jsonl --out RUN --model owner/name
      sdattn batch prompts.txt --out RUN --format webdataset --save image,maps
      sdattn batch PartiPrompts.tsv --out RUN --keep-columns Category,Challenge
      sdattn batch --photos photos/ --out RUN --model owner/name --save image,maps,masks
      sdattn batch --status RUN
    """
    asked = [run for run in (status, verify, summarize) if run]
    if asked and (
        prompts is not None or "photos" in request or folder is not None or len(asked) > 1
    ):
        raise typer.BadParameter(
            "--status, --verify and --summarize each take a run and nothing else."
        )
    if summarize:
        from ..batch.checking import summarize as write

        write(summarize)
    if run := status or summarize:
        return _print_status(output, run)
    if verify:
        return _verify(output, verify)
    if (prompts is None) == ("photos" not in request):
        raise typer.BadParameter("Pass a file of prompts, or --photos SOURCE.")
    if folder is None and not dry_run:
        raise typer.BadParameter("Pass --out RUN.")
    checks = Checks()
    given = checks.call(call) | choice
    checks.refuse()
    if "torch" not in sys.modules and not output.quiet:
        say(f"loading torch and diffusers, then the model {loaded.get('model', 'demo')}")
    from ..batch.request import Request
    from ..loading.options import LoadingOptions
    from ..maps.presets import preset_of

    fields = {name: _READ[name](text) if name in _READ else text for name, text in request.items()}
    loading = {name: loaded.pop(name) for name in options.LOADING if name in loaded}
    drawn = Request(
        source=prompts,
        out=folder or "dry-run",
        options=given,
        preset=preset_of(**maps),
        loading=LoadingOptions(**loading),
        progress=not output.quiet,
        **loaded,
        **fields,
    )
    from ..loading.quiet import quiet_libraries

    quiet_libraries(prompts=True, downloads=not (output.quiet or output.as_json))
    try:
        drawn.check()
    except InvalidValueError as error:
        raise typer.BadParameter(str(error)) from error
    if dry_run:
        return _print_forecast(output, drawn)
    _run(output, drawn)


def _run(output: Output, request: "Request") -> None:
    from ..batch.run import run_batch
    from ..files.addresses import path_of

    out = path_of(request.out)
    try:
        outcome = run_batch(request)
    except OSError as error:
        failed = access_error(error)
        if isinstance(failed, (MissingFileError, ExistsError)) or not _is_begun(out):
            raise
        raise AccessError(f"{failed} The same command does the rest.") from error
    _print_outcome(output, outcome, out, _noun(request))
    # Under a launcher, for which any other code is a crash, 0 once all that can be drawn is.
    is_all = not outcome.stopped and outcome.whole + outcome.failed == outcome.items
    is_launched = not _LAUNCHED.isdisjoint(os.environ)
    raise typer.Exit(0 if is_all and is_launched else outcome.exit_code)


def _is_begun(out: "AnyPath") -> bool:
    with suppress(OSError):
        return bool((out / "batch.json").exists())
    return False


def _part(text: str) -> tuple[int, int]:
    first, _, last = text.partition("/")
    if first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        return int(first), int(last)
    why = f"{text!r} is not K/N with K from 1 to N."
    raise typer.BadParameter(why, param_hint="--part")


_READ: dict[str, Callable[[str], Any]] = {  # how values in commas, and the like, are read
    "save": names_of,
    "mask_words": names_of,
    "mask_threshold": threshold_of,
    "part": _part,
    "keep_columns": lambda text: text if text == "all" else names_of(text),
}


def _print_forecast(output: Output, request: "Request") -> None:
    from ..batch.run import forecast

    found = forecast(request)
    lines = [f"{counted(found.items, 'item')} in {counted(found.shards, 'shard')}"]
    if found.bad_lines:
        lines[0] += f"; {counted(found.bad_lines, _noun(request))} could not be read"
    size = "" if found.nbytes is None else f", about {size_text(found.nbytes)}"
    lines.append(f"about {counted(found.files, 'file')}{size}")
    if found.seconds is not None:
        spent = timedelta(seconds=round(found.seconds))
        lines.append(f"about {spent} of drawing for one worker like this one")
    for line in lines:
        output.print(line, len(line))
    output.answer(found._asdict())


def _noun(request: "Request") -> str:
    return "line" if request.photos is None else "photo"


def _print_outcome(output: Output, outcome: "Outcome", out: "AnyPath", noun: str) -> None:
    from .output import print_rows

    text = f"{out}/: {outcome.whole:,} of {counted(outcome.items, 'item')}"
    if outcome.before:
        text += f", {outcome.before:,} of them were there"
    if made := outcome.whole - outcome.before:
        text += f"; {made:,} made in {outcome.seconds:.1f} s, {made / outcome.seconds:.3g} a second"
    is_told = outcome.failed and (out / "errors.jsonl").is_file()  # not by a part before the last
    if outcome.failed:
        text += f"; {outcome.failed:,} failed" + (
            f", see {out / 'errors.jsonl'}" if is_told else ""
        )
    if outcome.bad_lines:
        text += f"; {counted(outcome.bad_lines, noun)} could not be read, see "
        text += str(out / "bad_lines.jsonl")
    output.print(text, len(text))
    output.answer({"folder": str(out), **vars(outcome)})
    if is_told:
        with (out / "errors.jsonl").open("rb") as lines:
            for row in map(json.loads, islice(lines, 3)):
                say(f"{row['id']} failed: {row['failed']}")
    if outcome.stopped:
        say(f"stopped early ({outcome.stopped}); the same command does the rest")
    elif (out / "index.html").is_file():
        print_rows(output, {"open": str(out / "index.html")})


def _print_status(output: Output, run: Path) -> None:
    from ..batch.reading import status
    from ..files.addresses import path_of

    now = status(run)
    run_at = path_of(run)
    whole = f"{counted(now.whole, 'item')} {'is' if now.whole == 1 else 'are'} whole"
    lines = [
        f"{run_at}/: {whole}, the input has {now.items:,}",
        f"{now.done:,} of {counted(now.shards, 'shard')}, {size_text(now.nbytes)}",
        f"begun {datetime.fromtimestamp(now.began):%Y-%m-%d %H:%M}",
    ]
    if now.rate is not None and now.seconds_left is not None and now.done < now.shards:
        left = timedelta(seconds=round(now.seconds_left))
        lines.append(f"{now.rate:.3g} items/s lately, {left} left at that rate")
    if now.failed:
        lines.append(f"{now.failed:,} failed; the same command with --retry-failed tries again")
    if now.missing:
        lack = "lacks" if now.missing == 1 else "lack"
        lines.append(f"{counted(now.missing, 'item')} probably {lack} a word, see index.html")
    if now.bad_lines:
        lines.append(f"{now.bad_lines:,} more of the input could not be read")
    for line in lines:
        output.print(line, len(line))
    output.answer({"folder": str(run_at), **vars(now)})


def _verify(output: Output, run: Path) -> None:
    from ..batch.checking import verify
    from ..files.addresses import path_of

    number, problems = verify(run)
    run_at = path_of(run)
    for problem in problems:
        say(problem)
    line = f"{run_at}/: {counted(number, 'item')} read, {counted(len(problems), 'problem')}"
    output.print(line, len(line))
    output.answer({"folder": str(run_at), "items": number, "problems": problems})
    if problems:
        say(
            "delete the records of the damaged shards, shards/NNNNNN.jsonl, then run the batch's "
            "command again: it draws whatever has no record"
        )
        raise typer.Exit(1)
