"""Measure the demo model on prompts it never saw: are the pictures right, and the heatmaps?

Pictures are read by ``sdattn.scene_checker``, which knows nothing of the model; its own accuracy
is measured first. Heatmaps are compared with the objects that the checker found.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from training.autoencoder import vae_psnr

import sdattn
from sdattn.scene_checker import Found, find_objects, match
from sdattn.scenes import DIRECTIONS, Scene, holds, random_scene

BATCH = 10  # pictures drawn at a time
SIDE = 64  # side of the checker's masks
THRESHOLDS = np.linspace(0.05, 0.95, 19).round(2)


@dataclass(frozen=True)
class Verdict:
    """One picture against its prompt; ``own`` and ``ious`` are None where they cannot be told.

    Attributes:
        colours: the objects found have the colours that were asked for, and no others.
        shapes: and each has the shape that was asked for.
        relation: the two stand as they should; None if no direction was asked for.
        own: for each of two objects, its word's map is higher on it than on the other.
        ious: for each object its word's IoU at each of the thresholds.
    """

    prompt: str
    groups: tuple[str, ...]
    colours: bool
    shapes: bool
    relation: bool | None
    own: tuple[bool, ...]
    ious: tuple[tuple[float, ...], ...]


def objects_right(scene: Scene, found: list[Found]) -> tuple[bool, bool]:
    """Whether the colours are right, and whether colours with their shapes are."""
    seen = Counter((thing.colour, thing.shape) for thing in found)
    wanted = Counter((thing.colour, thing.shape) for thing in scene.objects)
    colours = Counter(thing.colour for thing in found)
    return colours == Counter(thing.colour for thing in scene.objects), seen == wanted


def checker_accuracy(seed: int, count: int = 500) -> float:
    """Share of drawn scenes that the checker reads without any mistake, places included."""
    rng = np.random.default_rng(seed)
    right = 0
    for _ in range(count):
        scene = random_scene(rng)
        found = find_objects(scene.draw(SIDE))
        chosen = match(scene, found)
        placed = chosen is not None and related(scene, chosen) is not False
        right += objects_right(scene, found)[1] and placed
    return right / count


def related(scene: Scene, chosen: tuple[Found, ...] | None) -> bool | None:
    """Whether the found objects stand in the relation; None if no direction was asked for."""
    if scene.relation not in DIRECTIONS:
        return None
    return chosen is not None and holds(scene.relation, *(thing.centre for thing in chosen))


def word_maps(scene: Scene, heatmaps: Any) -> list[torch.Tensor]:
    """The map of each object's word at the checker's size, float32 [64, 64]."""
    names = [thing.shape for thing in scene.objects]
    maps = []
    for index, name in enumerate(names):
        occurrence = heatmaps.find(name)[names[:index].count(name)]
        maps.append(occurrence.resize((SIDE, SIDE)))
    return maps


def judge(scene: Scene, prompt: str, picture: Image.Image, heatmaps: Any) -> Verdict:
    """Compare one picture and its heatmaps with what the prompt asked for."""
    found = find_objects(picture)
    chosen = match(scene, found)
    colours, shapes = objects_right(scene, found)
    own: tuple[bool, ...] = ()
    ious: list[tuple[float, ...]] = []
    if chosen is not None and len(found) == len(scene.objects):
        maps = word_maps(scene, heatmaps)
        masks = [torch.from_numpy(thing.mask) for thing in chosen]
        if len(maps) == 2:
            pairs = zip(maps, masks, masks[::-1], strict=True)
            own = tuple(bool(m[here].mean() > m[there].mean()) for m, here, there in pairs)
        for values, mask in zip(maps, masks, strict=True):
            parts = [values >= float(level) * values.max() for level in THRESHOLDS]
            ious.append(tuple(float((p & mask).sum() / (p | mask).sum()) for p in parts))
    relation = related(scene, chosen)
    return Verdict(prompt, groups(scene, prompt), colours, shapes, relation, own, tuple(ious))


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
    levels = np.array([ious for verdict in verdicts for ious in verdict.ious])
    best = int(levels.mean(0).argmax()) if len(levels) else 0
    pairs = [verdict.own for verdict in verdicts if verdict.own]
    return {
        "prompts": len(verdicts),
        "colours": share([verdict.colours for verdict in verdicts]),
        "shapes": share([verdict.shapes for verdict in verdicts]),
        "relation": share([v.relation for v in verdicts if v.relation is not None]),
        "word_on_own_object": share([flag for pair in pairs for flag in pair]),
        "both_words_on_own_object": share([all(pair) for pair in pairs]),
        "pictures_with_two_words_measured": len(pairs),
        "iou": float(levels.mean(0)[best]) if len(levels) else None,
        "iou_threshold": float(THRESHOLDS[best]),
    }


def table(figures: dict[str, dict[str, Any]]) -> str:
    """The figures as text, a row a group."""
    names = ("colours", "shapes", "relation", "word_on_own_object", "both_words_on_own_object")
    heads = "".join(f"{head:>9}" for head in ("colours", "shapes", "relation", "word", "both"))
    lines = [f"{'':24}{'n':>5}{heads}  IoU"]
    for group, row in figures.items():
        shares = "".join(f"{'-' if row[n] is None else f'{row[n]:.1%}':>9}" for n in names)
        iou = "" if row["iou"] is None else f"  {row['iou']:.3f} at {row['iou_threshold']}"
        lines.append(f"{group:24}{row['prompts']:5}{shares}{iou}")
    return "\n".join(lines)


def unseen(args: argparse.Namespace) -> list[tuple[Scene, str]]:
    """Scenes of the held-out part, each with one of its prompts."""
    rng = np.random.default_rng(args.scene_seed)
    asked = []
    for _ in range(args.prompts):
        scene = random_scene(rng, held_out=True)
        said = scene.prompts(args.wording) or scene.prompts()
        asked.append((scene, said[0] if args.first else said[int(rng.integers(len(said)))]))
    return asked


def evaluate(pipe: Any, args: argparse.Namespace) -> tuple[list[Verdict], list[Image.Image]]:
    """Draw every prompt with a seed of its own and judge it."""
    verdicts, pictures = [], []
    asked = unseen(args)
    options = {"num_inference_steps": args.steps, "guidance_scale": args.guidance}
    given = {name: value for name, value in options.items() if value is not None}
    for start in range(0, len(asked), BATCH):
        part = asked[start : start + BATCH]
        prompts = [prompt for _, prompt in part]
        run = sdattn.generate(pipe, prompts, seed=args.seed + start, **given)
        for (scene, prompt), picture, maps in zip(part, run.images, run.heatmaps, strict=True):
            verdicts.append(judge(scene, prompt, picture, maps))
            pictures.append(picture)
    return verdicts, pictures


def main() -> None:
    """Read the options, measure, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="demo, or a folder")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--scene-seed", type=int, default=2024, help="which unseen prompts")
    parser.add_argument("--seed", type=int, default=0, help="of the first picture's noise")
    parser.add_argument("--wording", default="any", choices=["any", "plain", "place first"])
    parser.add_argument("--first", action="store_true", help="the first wording of each scene only")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--out", type=Path, default=Path("outputs/evaluation.json"))
    args = parser.parse_args()
    accuracy = checker_accuracy(args.scene_seed)
    print(f"checker: {accuracy:.1%} of drawn scenes read without a mistake", flush=True)
    pipe = sdattn.load_pipeline(args.model)
    print(f"vae: {vae_psnr(pipe.vae, seed=7):.2f} dB on unseen scenes", flush=True)
    began = time.time()
    verdicts, pictures = evaluate(pipe, args)
    by_group = defaultdict(list)
    for verdict in verdicts:
        for group in verdict.groups:
            by_group[group].append(verdict)
    figures = {group: summarise(by_group[group]) for group in sorted(by_group)}
    print(table(figures))
    print(f"{(time.time() - began) / len(verdicts):.2f} s a picture, heatmaps and check included")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    wrong = [v.prompt for v in verdicts if not v.shapes or v.relation is False]
    options = {name: str(value) for name, value in vars(args).items()}
    report = {"options": options, "checker": accuracy, "figures": figures, "wrong": wrong}
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    wide = min(20, len(pictures))
    starts = range(0, len(pictures) - wide + 1, wide)
    rows = [pictures[start : start + wide] for start in starts]
    sheet = np.vstack([np.hstack([np.asarray(picture) for picture in row]) for row in rows])
    Image.fromarray(sheet).save(args.out.with_suffix(".png"))
    print(args.out)


if __name__ == "__main__":
    main()
