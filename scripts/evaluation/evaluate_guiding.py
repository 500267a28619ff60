"""Measure ``guide()`` on a demo model: is the noun in its box, and is the image still as asked?

Prompts of one object each get a box of a quarter of the image, in a place by chance, and are drawn
from the same noise without guidance and with it. The share of the noun's heatmap in the box is that
of the run that drew the image; a checker that knows nothing of the model says what is in the image,
and how much of the object lies in the box. Each case is kept in ``--work`` as it ends; run again,
the command goes on where it stopped.

    python -m scripts.evaluation.evaluate_guiding --checker build/checker/checker.safetensors
    python -m scripts.evaluation.evaluate_guiding --model demo-mmdit --work build/guiding-mmdit
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

import sdattn
from sdattn.edit import guide, inside, share_inside
from sdattn.edit.losses import Box

from ..benchmarks.machine import forget_peak, peak_bytes
from .images import Asked
from .records import claim
from .seeing import Subject, accuracy_of, machine, subject_of

CELLS = 16  # places of boxes, in a row
ENOUGH = 0.8  # share of the noun's map in its box
WIDE = 8  # cases in a row of the sheet


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


def measured(subject: Subject, asked: Asked, box: Box, draw: Callable[..., Any]) -> dict[str, Any]:
    """Return what is known of one image, which is in ``"image"``."""
    _, scene, prompt = asked
    forget_peak("cpu")
    began = perf_counter()
    [run] = draw(subject.pipe, prompt)
    seconds = perf_counter() - began
    noun = next(word.text for word in scene.words(prompt) if word.kind == "noun")
    [seen] = subject.see([scene], [run.image])
    within = None
    if seen.masks is not None:
        within = float(share_inside(torch.from_numpy(seen.masks[0]).float(), box))
    return {
        "image": run.image,
        "share": float(share_inside(run.heatmaps[noun].values, box)),
        "right": bool(seen.objects and all(seen.colours)),
        "object": bool(seen.objects),
        "within": within,
        "seconds": seconds,
        "peak": peak_bytes("cpu"),
    }


def case(subject: Subject, asked: Asked, box: Box, args: argparse.Namespace) -> dict[str, Any]:
    """Return a case without guidance and with it, kept in a file."""
    number, scene, prompt = asked
    record = args.work / f"{number}.json"
    if record.exists():
        found: dict[str, Any] = json.loads(record.read_text())
        return found
    noun = next(word.text for word in scene.words(prompt) if word.kind == "noun")
    seed = args.seed + number
    asked_for = {name: getattr(args, name) for name in ("scale", "steps", "iterations", "enough")}
    chosen = {name: value for name, value in asked_for.items() if value is not None}

    def guided(pipe: Any, prompt: str) -> Any:
        return guide(pipe, prompt, [inside(noun, box)], seed=seed, **chosen)

    def plain(pipe: Any, prompt: str) -> Any:
        return sdattn.generate(pipe, prompt, seed=seed)

    told: dict[str, Any] = {"prompt": prompt, "noun": noun, "box": box, "seed": seed}
    for way, draw in {"without": plain, "with": guided}.items():
        told[way] = measured(subject, asked, box, draw)
        told[way].pop("image").save(args.work / f"{number}-{way}.png")
    record.write_text(json.dumps(told) + "\n")
    return told


def figures(found: list[dict[str, Any]], way: str) -> dict[str, float]:
    """Return the figures of one way over all cases."""
    some = [one[way] for one in found]
    shares = np.array([one["share"] for one in some])
    within = [one["within"] for one in some if one["within"] is not None]
    return {
        "share, mean": float(shares.mean()),
        "share, least": float(shares.min()),
        f"share >= {ENOUGH}": float((shares >= ENOUGH).mean()),
        "just the object": float(np.mean([one["object"] for one in some])),
        "and its colour": float(np.mean([one["right"] for one in some])),
        "object in the box": float(np.mean(within)) if within else float("nan"),
        "seconds, median": float(np.median([one["seconds"] for one in some])),
        "peak, MB": max(one["peak"] for one in some) / 1e6,
    }


def table(found: list[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table, without guidance and with it."""
    columns: Mapping[str, Mapping[str, float]] = {
        way: figures(found, way) for way in ("without", "with")
    }
    rows = [f"| {len(found)} prompts | without | with |", "|---|---|---|"]
    for name in columns["with"]:
        cells = (f"{columns[way][name]:.3g}" for way in columns)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def sheet(found: list[dict[str, Any]], work: Path) -> Image.Image:
    """Return the first cases in their boxes, each without guidance above the one with it."""
    rows = []
    for start in range(0, len(found) - WIDE + 1, WIDE):
        for way in ("without", "with"):
            row = []
            for number in range(start, start + WIDE):
                image = Image.open(work / f"{number}-{way}.png").convert("RGB")
                image = image.resize((128, 128), Image.Resampling.LANCZOS)
                corners = [round(side * 128) for side in found[number]["box"]]
                ImageDraw.Draw(image).rectangle(
                    (*corners[:2], corners[2] - 1, corners[3] - 1), outline=(255, 0, 128), width=2
                )
                row.append(np.asarray(image))
            rows.append(np.hstack(row))
    return Image.fromarray(np.vstack(rows))


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
    told = {name: value for name, value in vars(args).items() if name not in ("work", "cases")}
    claim(args.work, told)
    torch.set_num_threads(1)
    subject = subject_of(args.model, args.checker)
    found = [case(subject, *one, args) for one in cases(subject, args.cases, args.scene_seed)]
    print(table(found))
    sheet(found, args.work).save(args.work / "sheet.png")
    report = {
        "machine": machine(),
        "checker": accuracy_of(args.checker),
        "figures": {way: figures(found, way) for way in ("without", "with")},
        "cases": found,
    }
    (args.work / "figures.json").write_text(json.dumps(report, indent=1) + "\n")
    print(args.work)


if __name__ == "__main__":
    main()
