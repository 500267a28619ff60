"""The command line that makes a run again, from what the run tells of itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...maps.presets import PRESETS
from ..imagerun import ImageRun

_OPTIONS = {
    "num_inference_steps": "--steps",
    "guidance_scale": "--guidance",
    "negative_prompt": "--negative",
    "width": "--width",
    "height": "--height",
}


def command_of(run: ImageRun) -> str:
    """The command that makes a run's picture and maps again, one line for a shell.

    A picture of one's own is ``image.png``, so that the command works in the run's folder. A
    picture of several of one prompt is made alone.

    Raises:
        ValueError: no one command does, and why.
    """
    _check(run)
    info = run.info
    if "edited" in info:
        texts = ["edit", info["edited"]["prompt"], *info["edited"]["targets"]]
        flags = [*_edit(info)]
    elif "explained" in info:
        texts, flags = ["explain", "image.png", info["prompt"]], [*_explain(info), *_maps(run)]
    else:
        texts, flags = ["generate", info["prompt"]], [*_generate(run), *_maps(run)]
    flags += ["--model", info["model"], "--device", info["device"], "--dtype", info["dtype"]]
    if any(text.startswith("-") for text in texts):  # it would be read as an option
        texts, flags = texts[:1], [*flags, "--", *texts[1:]]
    return shlex.join(["sdattn", *texts, *flags])


def _check(run: ImageRun) -> None:
    info, preset = run.info, run.heatmaps.preset
    if not info.get("model"):
        raise ValueError("The pipeline was built in Python, so no name of a model is known.")
    table = PRESETS.get(preset.name)
    if table and "explained" in info:  # it reads the timesteps that were chosen
        table = replace(table, steps=preset.steps)
    if table != replace(preset, refine=None):
        raise ValueError(f"The preset {preset.name!r} was made in Python.")
    ours = {"latents"} if "explained" in info else set()
    left_out = sorted({*info.get("options_left_out", ())} - ours)
    if left_out and "edited" not in info:
        raise ValueError(f"Options were given that only Python can: {', '.join(left_out)}.")


def _generate(run: ImageRun) -> Iterator[str]:
    info = run.info
    yield from ("--seed", str(info["seed"]))
    yield from _said(info["options"])
    kept = [name for name in ("steps", "heads") if info["captured"][name] == "all"]
    if kept := [name for name in kept if name == "steps" or not run.heatmaps.preset.each_head]:
        yield from ("--keep", ",".join(kept))
    for name, flag in (("negative", "--negative-maps"), ("causal", "--causal")):
        if name in run.more:
            yield flag


def _said(options: Mapping[str, Any]) -> Iterator[str]:
    said = {name: value for name, value in options.items() if value is not None}
    for name, flag in _OPTIONS.items():
        if name in said:
            yield from (flag, str(said.pop(name)))
    for name in sorted(said.keys() - {"num_images_per_prompt"}):
        yield from ("--set", f"{name}={json.dumps(said[name], ensure_ascii=False)}")


def _maps(run: ImageRun) -> Iterator[str]:
    preset = run.heatmaps.preset
    if preset.name != "default":
        yield from ("--preset", preset.name)
    if preset.refine:
        yield from ("--refine", preset.refine)
    if "asked" in run.info:
        yield from ("--ask", run.info["asked"])


def _explain(info: Mapping[str, Any]) -> Iterator[str]:
    told = info["explained"]
    if told["way"] == "inversion":
        yield from ("--invert", "--steps", str(info["options"]["num_inference_steps"]))
    else:
        yield from ("--seed", str(info["seed"]))
        yield from ("--timesteps", ",".join(map(str, told["timesteps"])))


def _edit(info: Mapping[str, Any]) -> Iterator[str]:
    told = info["edited"]
    if "reconstruction_psnr" in told:
        raise ValueError("The picture was edited from one that the run does not hold.")
    parts = {"--cross": told["cross_replace_steps"], "--self": told["self_replace_steps"]}
    if not all(isinstance(part, (int, float)) for part in parts.values()):
        raise ValueError("The parts of the run that were taken over were given in Python.")
    yield from ("--seed", str(info["seed"]), "--mode", told["mode"])
    for flag, part in parts.items():
        yield from (flag, str(part))
    for word in dict.fromkeys(word for words in told["blend"] or () for word in words):
        yield from ("--blend", word)
    for word, factor in told["weights"].items():
        yield from ("--weight", f"{word}={factor}")
    yield from _said(info["options"])
