"""How a run came about: its settings, sittings, curve and what it made, for all to check.

begin_sitting(work, args)     settings kept, or compared with those of the run that is taken up
write_record(work, out)       training.json beside the weights
snapshot(work, seed)          the pipeline as the last checkpoint has it
digests(out)                  SHA-256 of each file of weights
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTokenizer

from .fit import FLAT
from .models import assemble, new_text_encoder, new_unet

RECORD = "training.json"
ANY_TIME = ("out", "work", "snapshot", "lean")  # options that do not change what is learnt
STAGES = ("vae", "decoder", "text", "unet", "refine", "mmdit", "motion")
PACKAGES = ("torch", "diffusers", "transformers", "tokenizers", "safetensors", "numpy")


def begin_sitting(
    work: Path, args: argparse.Namespace, any_time: tuple[str, ...] = ANY_TIME
) -> None:
    """Keep the settings of a new run in ``work``, and that somebody sat down to it. Options of
    ``any_time`` may change from one sitting to the next.

    The steps of a stage may still be changed while its learning rate has not begun to fall: what
    was done so far does not depend on them. The sitting then records what they were before.

    Raises:
        SystemExit: there is a run of other settings.
    """
    settings = {name: value for name, value in vars(args).items() if name not in any_time}
    settings["start"] = digests(args.start) if args.start else None
    kept = work / "run.json"
    run = json.loads(kept.read_text()) if kept.exists() else {"settings": settings, "sittings": []}
    done = steps_done(work)
    before = changed(run["settings"], settings)
    if not all(is_free(name, before[name], settings.get(name), done) for name in before):
        raise SystemExit(
            f"{work} holds a run with {run['settings']}, asked for {settings}. Pass the same "
            "options to take it up again, or another --work."
        )
    run["settings"] = settings
    if args.start and (before_it := args.start / RECORD).exists():
        run["start"] = json.loads(before_it.read_text())  # how that model came about
    run["sittings"].append(
        {
            "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "from": done,
            "settings_before": before,
            **{name: vars(args)[name] for name in any_time if name not in ANY_TIME},
            **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
            "commit": commit(),
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in PACKAGES},
        }
    )
    kept.write_text(json.dumps(run, indent=1) + "\n")


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The settings that differ, as they were before."""
    names = before.keys() | after.keys()
    return {name: before.get(name) for name in names if before.get(name) != after.get(name)}


def is_free(name: str, before: Any, after: Any, done: dict[str, int]) -> bool:
    """Whether a setting is the steps of a stage that could have had either number so far."""
    stage = name.removesuffix("_steps")
    if stage not in STAGES or not before or not after:
        return False
    return done.get(stage, 0) <= FLAT.get(stage, 0.0) * min(before, after)


def steps_done(work: Path) -> dict[str, int]:
    """The steps that each stage has behind it."""
    return {stage: kept["step"] for stage, kept in checkpoints(work).items()}


def checkpoints(work: Path) -> dict[str, Any]:
    """The checkpoint of each stage that has begun."""
    paths = {stage: work / f"{stage}.pt" for stage in STAGES}
    return {
        stage: torch.load(path, mmap=True, map_location="cpu")
        for stage, path in paths.items()
        if path.exists()
    }


def commit() -> str:
    """Of the script; "+" where files differ from it."""
    here = Path(__file__).parent
    git = ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, cwd=here, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def write_digests(out: Path) -> None:
    """Write anew into ``training.json`` what its folder holds."""
    told = json.loads((out / RECORD).read_text())
    (out / RECORD).write_text(json.dumps({**told, "sha256": digests(out)}, indent=1) + "\n")


def write_record(work: Path, out: Path) -> None:
    """Write ``training.json``: settings, sittings, time and curve of a run, and digests."""
    run = json.loads((work / "run.json").read_text())
    run["stages"] = {
        stage: {"steps": kept["step"], "seconds": round(kept["seconds"])}
        for stage, kept in checkpoints(work).items()
    }
    run["curve"] = curve(work)
    run["sha256"] = digests(out)
    (out / RECORD).write_text(json.dumps(run, indent=1) + "\n")


def curve(work: Path) -> dict[str, dict[str, dict[str, float]]]:
    """By stage and step the figures noted; of a step done twice the later ones."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for line in (work / "curve.jsonl").read_text().splitlines():
        row = json.loads(line)
        stage, step = row.pop("stage"), row.pop("step")
        found.setdefault(stage, {}).setdefault(str(step), {}).update(row)
    return found


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of each file of weights, by its path in the model's folder."""
    files = sorted(out.rglob("*.safetensors"))
    return {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def snapshot(
    work: Path, unet_of: Callable[[], UNet2DConditionModel] = new_unet
) -> StableDiffusionPipeline:
    """Return the pipeline of the last checkpoint, with the running means of its weights.

    Raises:
        SystemExit: the UNet's training has not begun.
    """
    held = checkpoints(work)
    last = held.get("refine", held.get("unet"))
    if last is None:
        raise SystemExit(f"{work} has no unet.pt yet; it has {', '.join(held) or 'nothing'}.")
    tokenizer = CLIPTokenizer.from_pretrained(work / "tokenizer")
    text, unet = new_text_encoder(tokenizer), unet_of()
    text.load_state_dict(
        last["mean"]["text"] if "text" in last["mean"] else held["text"]["state"]["text"]
    )
    unet.load_state_dict(last["mean"]["unet"])
    return assemble(AutoencoderKL.from_pretrained(work / "vae"), text, tokenizer, unet)
