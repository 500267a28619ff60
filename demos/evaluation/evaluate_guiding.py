"""Measure ``guide()`` on a demo model: is the noun in its box, and is the image still as asked?

Prompts of one object each get a box of a quarter of the image, in a place by chance, and are drawn
from the same noise without guidance and with it. The share of the noun's heatmap in the box is that
of the run that drew the image; a checker that knows nothing of the model says what is in the image,
and how much of the object lies in the box. Each case is kept in ``--work`` as it ends; run again,
the command goes on where it stopped.

    python -m demos.evaluation.evaluate_guiding --checker build/checker/checker.safetensors
    python -m demos.evaluation.evaluate_guiding --model demo-mmdit --work build/guiding-mmdit
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

import sdattn
from sdattn.edit import guide, inside, share_inside
from sdattn.edit.losses import Box

from .images import Asked
from .records import claim
from .seeing import Subject, accuracy_of, machine, subject_of

CELLS = 16  # places of boxes, in a row
ENOUGH = 0.8  # share of the noun's map in its box
SHOWN, WIDE, SIDE = 16, 8, 128  # cases of the sheet, cases in a row, pixels of an image
WAYS = ("without", "with")


def cases(subject: Subject, count: int, seed: int) -> list[tuple[Asked, Box]]:
    """Return scenes of one object, each with one of its prompts and a box."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        scene = subject.make(rng, n_objects=1)
        left, top = (rng.integers(0, CELLS // 2, 2, endpoint=True) / CELLS).tolist()
        asked = number, scene, scene.caption(rng)
        found.append((asked, (left, top, left + 0.5, top + 0.5)))
    return found


def case(subject: Subject, asked: Asked, box: Box, args: argparse.Namespace) -> dict[str, Any]:
    """Return what is known of a case without guidance and with it; keep it, and its images, in
    files."""
    number, scene, prompt = asked
    record = args.work / f"{number}.json"
    if record.exists():
        known: dict[str, Any] = json.loads(record.read_text())
        return known
    noun = next(word.text for word in scene.words(prompt) if word.kind == "noun")
    asked_for = {name: getattr(args, name) for name in ("scale", "steps", "iterations", "enough")}
    chosen = {name: value for name, value in asked_for.items() if value is not None}
    chosen["seed"] = args.seed + number
    ways = {
        "without": partial(sdattn.generate, subject.pipe, prompt, seed=chosen["seed"]),
        "with": partial(guide, subject.pipe, prompt, [inside(noun, box)], **chosen),
    }
    told: dict[str, Any] = {"prompt": prompt, "noun": noun, "box": box}
    for way, draw in ways.items():
        began = perf_counter()
        [run] = draw()
        seconds = perf_counter() - began
        share = float(share_inside(run.heatmaps[noun].values, box))
        told[way] = {"share": share, "seconds": seconds}
        run.image.save(args.work / f"{number}-{way}.png")
    record.write_text(json.dumps(told) + "\n")
    return told


def judge(subject: Subject, asked: Asked, told: dict[str, Any], work: Path) -> None:
    """Add what the checker says of a case's images: the object is there, alone; it has the colour
    that was asked for, if any; and how much of it is in the box."""
    number, scene, _ = asked
    for way in WAYS:
        [seen] = subject.see([scene], [opened(work, number, way)])
        told[way]["object"] = bool(seen.objects)
        told[way]["colour"] = bool(seen.objects and all(seen.colours))
        if seen.masks is not None:
            mask = torch.from_numpy(seen.masks[0]).float()
            told[way]["within"] = float(share_inside(mask, told["box"]))


def opened(work: Path, number: int, way: str) -> Image.Image:
    """Return one of a case's images, RGB."""
    with Image.open(work / f"{number}-{way}.png") as image:
        return image.convert("RGB")


def figures(found: list[dict[str, Any]], way: str) -> dict[str, float]:
    """Return the figures of one way over all cases."""
    some = [one[way] for one in found]
    shares = np.array([one["share"] for one in some])
    within = [one["within"] for one in some if "within" in one]
    return {
        "share, mean": float(shares.mean()),
        "share, least": float(shares.min()),
        f"share >= {ENOUGH}": float((shares >= ENOUGH).mean()),
        "just the object": float(np.mean([one["object"] for one in some])),
        "and its colour": float(np.mean([one["colour"] for one in some])),
        "object in the box": float(np.mean(within)) if within else float("nan"),
        "seconds, median": float(np.median([one["seconds"] for one in some])),
    }


def table(found: list[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table, without guidance and with it."""
    columns = {way: figures(found, way) for way in WAYS}
    rows = [f"| {len(found)} prompts | without | with |", "|---|---|---|"]
    for name in columns["with"]:
        cells = (f"{columns[way][name]:.3g}" for way in columns)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def sheet(found: list[dict[str, Any]], work: Path) -> Image.Image:
    """Return the first cases, each without guidance above the one with it, in their boxes and with
    the share inside."""
    rows, wide = [], min(WIDE, len(found))
    for start in range(0, min(SHOWN, len(found)) - wide + 1, wide):
        for way in WAYS:
            numbers = range(start, start + wide)
            rows.append(np.hstack([_panel(found[n], work, n, way) for n in numbers]))
    return Image.fromarray(np.vstack(rows))


def _panel(told: dict[str, Any], work: Path, number: int, way: str) -> Image.Image:
    image = opened(work, number, way).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    left, top, right, bottom = (round(side * SIDE) for side in told["box"])
    pen = ImageDraw.Draw(image)
    pen.rectangle((left, top, right - 1, bottom - 1), outline=(255, 0, 128), width=2)
    share = f"{told[way]['share']:.2f}"
    pen.text((4, SIDE - 16), share, "white", stroke_width=1, stroke_fill="black")
    return image


def main(given: list[str] | None = None) -> None:
    """Read the options, measure what is missing, and print and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="demo, demo-mmdit, or a folder of one")
    parser.add_argument(
        "--checker", type=Path, default=Path("build/checker/checker.safetensors"), help="of sprites"
    )
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--scene-seed", type=int, default=65, help="which scenes and boxes")
    parser.add_argument("--seed", type=int, default=6500, help="of the first image's noise")
    parser.add_argument("--scale", type=float, help="see guide(), as the next ones")
    parser.add_argument("--steps", type=float)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--enough", type=float)
    parser.add_argument("--work", type=Path, default=Path("build/guiding"))
    args = parser.parse_args(given)
    later = ("work", "cases", "checker")  # may differ when it goes on
    claim(args.work, {name: value for name, value in vars(args).items() if name not in later})
    torch.set_num_threads(1)
    subject = subject_of(args.model, args.checker)
    found = []
    for asked, box in cases(subject, args.cases, args.scene_seed):
        found.append(case(subject, asked, box, args))
        judge(subject, asked, found[-1], args.work)
    print(table(found))
    sheet(found, args.work).save(args.work / "sheet.png")
    report = {
        "machine": machine(),
        "checker": accuracy_of(args.checker),
        "figures": {way: figures(found, way) for way in WAYS},
        "cases": found,
    }
    (args.work / "figures.json").write_text(json.dumps(report, indent=1) + "\n")
    print(args.work)


if __name__ == "__main__":
    main()
