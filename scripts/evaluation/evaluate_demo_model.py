"""Measure the demo model on prompts it never saw: are the images right, and the heatmaps?

Images are read by ``scene_checker``, which knows nothing of the model; its own accuracy
is measured first. Heatmaps are compared with the objects that the checker found.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import sdattn
from sdattn import Heatmaps

from ..scenes.shapes import Scene, random_scene
from ..training.autoencoder import vae_psnr
from .images import own_settings
from .knockouts import stays, tells_apart, without_words
from .landing import (
    THRESHOLDS,
    Kind,
    Landing,
    Seen,
    function_peak,
    landings,
    seen_in,
)

BATCH = 10  # images drawn at a time
KINDS: tuple[Kind, Kind] = ("colour", "shape")


@dataclass(frozen=True)
class Verdict:
    """One image against its prompt.

    Attributes:
        groups: the rows of the table that it counts for.
        seen: whether it is right, and where its objects are.
        words: how its colour words and its shape words land; empty where its objects cannot be
            told.
        function_peak: how high the maps of "a", "of" and their like are beside these words'.
    """

    prompt: str
    groups: tuple[str, ...]
    seen: Seen
    words: dict[str, list[Landing]]
    function_peak: float


def checker_accuracy(seed: int, size: int, count: int = 500) -> float:
    """Share of drawn scenes that the checker reads without any mistake, places included."""
    rng = np.random.default_rng(seed)
    right = 0
    for _ in range(count):
        scene = random_scene(rng)
        seen = seen_in(scene, Image.fromarray(scene.draw(size)))
        right += seen.shapes and seen.relation is not False and seen.masks is not None
    return right / count


def judge(scene: Scene, prompt: str, image: Image.Image, heatmaps: Heatmaps) -> Verdict:
    """Compare one image and its heatmaps with what the prompt asked for."""
    seen = seen_in(scene, image)
    words = {kind: landings(scene, seen.masks, heatmaps, kind) for kind in KINDS}
    return Verdict(prompt, groups(scene, prompt), seen, words, function_peak(heatmaps))


def groups(scene: Scene, prompt: str) -> tuple[str, ...]:
    """The rows of the table that a prompt counts for."""
    if scene.relation is None:
        return ("all", "one object")
    if scene.relation == "and":
        return ("all", "and")
    wording = "plain" if prompt in scene.prompts("plain") else "place first"
    return ("all", wording, f"{wording}: {scene.relation}")


def share(values: list[bool]) -> float | None:
    """Part of the values that are true; None if there are none."""
    return float(np.mean(values)) if values else None


def summarise(verdicts: list[Verdict]) -> dict[str, Any]:
    """The figures of some verdicts."""
    seen = [verdict.seen for verdict in verdicts]
    return {
        "prompts": len(verdicts),
        "colours": share([one.colours for one in seen]),
        "shapes": share([one.shapes for one in seen]),
        "relation": share([one.relation for one in seen if one.relation is not None]),
        **{f"{kind}_words": of_words([v.words[kind] for v in verdicts]) for kind in KINDS},
        "function_peak": float(np.mean([verdict.function_peak for verdict in verdicts])),
    }


def of_words(images: list[list[Landing]]) -> dict[str, Any]:
    """How the words of one kind land: on their own objects of two, and the IoU at that one of
    THRESHOLDS where it is best."""
    told = [[one.own for one in some if one.own is not None] for some in images]
    levels = np.array([one.ious for some in images for one in some])
    best = int(levels.mean(0).argmax()) if len(levels) else 0
    return {
        "on_own_object": share([own for some in told for own in some]),
        "both_on_own_object": share([all(some) for some in told if some]),
        "images_of_two": sum(bool(some) for some in told),
        "iou": float(levels.mean(0)[best]) if len(levels) else None,
        "iou_threshold": float(THRESHOLDS[best]),
    }


def table(figures: dict[str, dict[str, Any]]) -> str:
    """The figures as text, a row a group: the images; of colour words and of shape words the
    part on its own object and the IoU; the peaks of function words."""
    heads = ("colours", "shapes", "relation", "colour w.", "IoU", "shape w.", "IoU", "peaks")
    lines = [f"{'':24}{'n':>5}" + "".join(f"{head:>10}" for head in heads)]
    for group, row in figures.items():
        words = [row[f"{kind}_words"] for kind in KINDS]
        cells = [told(row[name], "{:.1%}") for name in heads[:3]]
        for one in words:
            cells += [told(one["on_own_object"], "{:.1%}"), told(one["iou"], "{:.3f}")]
        cells.append(told(row["function_peak"], "{:.3f}"))
        lines.append(f"{group:24}{row['prompts']:5}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def told(value: float | None, how: str) -> str:
    """A figure as text."""
    return "-" if value is None else how.format(value)


def unseen(args: argparse.Namespace) -> list[tuple[Scene, str]]:
    """Scenes of the held-out part, each with one of its prompts."""
    rng = np.random.default_rng(args.scene_seed)
    asked = []
    for _ in range(args.prompts):
        scene = random_scene(rng, held_out=True)
        said = scene.prompts(args.wording) or scene.prompts()
        asked.append((scene, said[0] if args.first else said[int(rng.integers(len(said)))]))
    return asked


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the model is drawn with: its own settings, which a folder has beside its weights, and
    what was asked for instead."""
    asked = {"num_inference_steps": args.steps, "guidance_scale": args.guidance}
    given = {name: value for name, value in asked.items() if value is not None}
    return {**own_settings(args.model), **given}


def evaluate(pipe: Any, args: argparse.Namespace) -> tuple[list[Verdict], list[Image.Image]]:
    """Draw every prompt with a seed of its own and judge it."""
    verdicts, images = [], []
    asked = unseen(args)
    options = settings(args)
    for start in range(0, len(asked), BATCH):
        part = asked[start : start + BATCH]
        prompts = [prompt for _, prompt in part]
        run = sdattn.generate(pipe, prompts, seed=args.seed + start, preset=args.preset, **options)
        for (scene, prompt), image, maps in zip(part, run.images, run.heatmaps, strict=True):
            verdicts.append(judge(scene, prompt, image, maps))
            images.append(image)
    return verdicts, images


def readings(pipe: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What stays of the first object where its colour word or its shape word is not looked at."""
    asked = [pair for pair in unseen(args) if tells_apart(pair[0])][: args.knockouts]
    options = settings(args)
    rows = [
        without_words(pipe, scene, prompt, args.seed + number, options)
        for number, (scene, prompt) in enumerate(asked)
    ]
    return stays(row for row in rows if row)


def main() -> None:
    """Read the options, measure, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="demo, or a folder")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--scene-seed", type=int, default=2024, help="which unseen prompts")
    parser.add_argument("--seed", type=int, default=0, help="of the first image's noise")
    parser.add_argument("--wording", default="any", choices=["any", "plain", "place first"])
    parser.add_argument("--first", action="store_true", help="the first wording of each scene only")
    parser.add_argument("--steps", type=int, help="by default the model's own")
    parser.add_argument("--guidance", type=float, help="by default the model's own")
    parser.add_argument("--preset", default="default", help="of the heatmaps")
    parser.add_argument("--knockouts", type=int, default=0, help="prompts drawn without a word")
    parser.add_argument("--out", type=Path, default=Path("outputs/evaluation.json"))
    args = parser.parse_args()
    pipe = sdattn.load_pipeline(args.model)
    pipe.set_progress_bar_config(disable=True)
    accuracy = checker_accuracy(args.scene_seed, pipe.vae.config.sample_size)
    print(f"checker: {accuracy:.1%} of drawn scenes read without a mistake", flush=True)
    print(f"vae: {vae_psnr(pipe.vae, seed=7):.2f} dB on unseen scenes", flush=True)
    began = time.time()
    verdicts, images = evaluate(pipe, args)
    by_group = defaultdict(list)
    for verdict in verdicts:
        for group in verdict.groups:
            by_group[group].append(verdict)
    figures = {group: summarise(by_group[group]) for group in sorted(by_group)}
    print(table(figures))
    print(f"{(time.time() - began) / len(verdicts):.2f} s an image, heatmaps and check included")
    without = readings(pipe, args)
    print(f"without a word of the first object: {json.dumps(without)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    wrong = [v.prompt for v in verdicts if not v.seen.shapes or v.seen.relation is False]
    options = {name: str(value) for name, value in (vars(args) | settings(args)).items()}
    report = {"options": options, "checker": accuracy, "figures": figures, "wrong": wrong}
    report |= {"knockouts": without}
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    wide = min(20, len(images))
    starts = range(0, len(images) - wide + 1, wide)
    rows = [images[start : start + wide] for start in starts]
    sheet = np.vstack([np.hstack([np.asarray(image) for image in row]) for row in rows])
    Image.fromarray(sheet).save(args.out.with_suffix(".png"))
    print(args.out)


if __name__ == "__main__":
    main()
