"""Measure a demo model on prompts it never saw: are the images right, and the heatmaps?

Images are read by a checker that knows nothing of the model, ``scene_checker`` for shapes and
``sprite_checker`` for sprites; its own accuracy is measured first. Heatmaps are compared with the
objects that the checker found. Each part is kept in ``--work`` as it ends; run again, the command
goes on where it stopped.

    python -m demos.evaluation.evaluate_demo_model --checker build/checker/checker.safetensors
    python -m demos.evaluation.evaluate_demo_model --sheet sheet.png  # 24 images, nothing else
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import sdattn
from sdattn.models.pipeline_call import call_pipeline, images_of

from ..training.autoencoder import vae_psnr
from .images import Asked, Sample, batches, said, samples, seeds_of, unseen_scenes
from .records import KINDS, Records, claim, kept, read_image
from .seeing import Subject, accuracy_of, function_peak, machine, subject_of
from .variants import DEFAULT

PART = 50  # prompts
GOALS = {"objects": 0.8, "relation": 0.9, "colours": 0.8, "noun pointing": 0.85}
SHEET = (4, 6)  # images of the sheet, rows and columns


def checker_accuracy(subject: Subject, seed: int, count: int = 300) -> dict[str, float]:
    """Return how well the checker reads composed scenes: the shares that have just the objects and
    the relation that it sees, and the mean IoU of the masks in these."""
    rng, side = np.random.default_rng(seed), subject.pipe.vae.config.sample_size
    scenes = [subject.make(rng, held_out=True) for _ in range(count)]
    seen = subject.see(scenes, [Image.fromarray(scene.draw(side)) for scene in scenes])
    right = [one.objects and one.relation is not False for one in seen]
    ious: list[float] = []
    for scene, one in zip(scenes, seen, strict=True):
        if one.masks is not None:
            truth = scene.masks(one.masks.shape[-1])
            ious += ((one.masks & truth).sum((1, 2)) / (one.masks | truth).sum((1, 2))).tolist()
    return {"right": float(np.mean(right)), "iou": float(np.mean(ious)) if ious else 0.0}


def groups(scene: Any, prompt: str) -> tuple[str, ...]:
    """Return the rows of the table that a prompt counts for."""
    if len(scene.objects) != 2:
        return ("all", {1: "one object", 3: "three objects"}[len(scene.objects)])
    if scene.relation == "and":
        return ("all", "and")
    wording = "place first" if "," in prompt else "plain"
    return ("all", wording, f"{wording}: {scene.relation}")


def read_sample(sample: Sample, records: Records) -> None:
    """Record one image against its prompt, and the maps of its words, in each group's row."""
    seen, words = sample.seen, sample.scene.words(sample.prompt)
    found: dict[str, Sequence[bool]] = {"objects": [seen.objects], "colours": seen.colours}
    found["relation"] = [] if seen.relation is None else [seen.relation]
    peak = np.array([function_peak(words, sample.heatmaps[DEFAULT])])
    for group in groups(sample.scene, sample.prompt):
        read_image(sample, group, records)
        records.add((group, "image", DEFAULT, "function peak"), sample.number, peak)
        for measure, values in found.items():
            if values:
                key = group, "image", DEFAULT, measure
                records.add(key, sample.number, np.array(values, np.float64))


def draw(subject: Subject, asked: list[Asked], seed: int, preset: str) -> Iterator[Sample]:
    """Yield an image of each prompt, with its heatmaps."""
    for part in batches(asked):
        seeds, options = seeds_of(part, seed), subject.settings
        run = sdattn.generate(subject.pipe, said(part), seed=seeds[0], preset=preset, **options)
        maps = [{DEFAULT: one} for one in run.heatmaps]
        yield from samples(subject, part, seeds, run.images, maps)


def evaluate(args: argparse.Namespace) -> Records:
    """Return the records of all prompts and seeds, part by part."""
    seeds = range(args.seed, args.seed + args.seeds)
    parts = [(seed, at) for seed in seeds for at in range(0, args.prompts, PART)]
    records, spawn = Records(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        for part, done in zip(parts, pool.map(measure, [args] * len(parts), parts), strict=True):
            records.add_all(done)
            print(f"seed {part[0]}, prompts from {part[1]}", flush=True)
    return records


def measure(args: argparse.Namespace, part: tuple[int, int]) -> Records:
    """Return the records of a seed's prompts from a first one on, kept in a file."""

    def make() -> Records:
        torch.set_num_threads(1)
        subject, made = asked_subject(args), Records()
        asked = unseen_scenes(subject.make, args.prompts, args.scene_seed)[start : start + PART]
        for sample in draw(subject, asked, seed, args.preset):
            read_sample(sample, made)
        return made

    seed, start = part
    return kept(args.work / f"{seed}-{start}-{min(PART, args.prompts - start)}.json", make)


def asked_subject(args: argparse.Namespace) -> Subject:
    """Return the model, with the settings that were asked for in place of its own."""
    subject = subject_of(args.model, args.checker, args.device)
    asked_for = {"num_inference_steps": args.steps, "guidance_scale": args.guidance}
    chosen = {name: value for name, value in asked_for.items() if value is not None}
    return replace(subject, settings={**subject.settings, **chosen})


def table(figures: Mapping[str, Any]) -> str:
    """Return the figures as text, a row a group: the images; by kind of word the parts that point
    at their object and that are on it rather than on another, and the IoU; the peaks of function
    words."""
    images = ("objects", "relation", "colours", "function peak")
    words = {"pointing": "point", "own": "own", "iou": "IoU"}
    heads = [*images, *(f"{kind} {told}" for kind in KINDS for told in words.values())]
    lines = [f"{'':24}{'n':>5}" + "".join(f"{head:>15}" for head in heads)]
    for group in sorted(figures):
        row = figures[group]
        image = row["image"][DEFAULT]
        cells = [image.get(one) for one in images]
        cells += [row.get(kind, {}).get(DEFAULT, {}).get(one) for kind in KINDS for one in words]
        told = "".join(f"{'-' if one is None else f'{one[0]:.3f}':>15}" for one in cells)
        lines.append(f"{group:24}{image['n']:5}{told}")
    return "\n".join(lines)


def goals(figures: Mapping[str, Any]) -> str:
    """Return a line for each figure that must hold, over all prompts."""
    of_all = figures["all"]
    found = {
        name: of_all["image"][DEFAULT].get(name) for name in ("objects", "relation", "colours")
    }
    found["noun pointing"] = of_all.get("noun", {}).get(DEFAULT, {}).get("pointing")
    lines = []
    for name, least in GOALS.items():
        value = found[name]
        verdict = "is not known" if value is None else f"{value[0]:.1%}"
        holds = value is not None and value[0] >= least
        lines.append(f"{name}: {verdict}, at least {least:.0%} {'holds' if holds else 'MISSED'}")
    return "\n".join(lines)


def wrong(records: Records, asked: list[Asked]) -> list[str]:
    """Return the prompts whose image, for one of the seeds, had not the objects asked for."""
    key = "all", "image", DEFAULT, "objects"
    numbers = {*records.scenes(key)[records.values(key) == 0].tolist()}
    return [prompt for number, _, prompt in asked if number in numbers]


def sheet(subject: Subject, seed: int, path: Path) -> None:
    """Draw the first images of a seed's unseen prompts, none left out, each above its prompt."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, cols = SHEET
    asked = unseen_scenes(subject.make, rows * cols, seed)
    figure, axes = plt.subplots(rows, cols, figsize=(1.9 * cols, 2.25 * rows), layout="constrained")
    places = iter(axes.flat)
    for part in batches(asked):
        drawn = call_pipeline(subject.pipe, said(part), seeds_of(part, 0), subject.settings)
        for image, prompt in zip(images_of(drawn), said(part), strict=True):
            axis = next(places)
            axis.imshow(image)
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(textwrap.fill(prompt, 30), fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def options(given: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a demo model, or the folder of one")
    parser.add_argument(
        "--checker", type=Path, default=Path("build/checker/checker.safetensors"), help="weights"
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--scene-seed", type=int, default=2024, help="which unseen prompts")
    parser.add_argument("--seed", type=int, default=0, help="first seed of noise")
    parser.add_argument("--seeds", type=int, default=2, help="how many seeds of noise")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, or cuda")
    parser.add_argument("--steps", type=int, help="by default the model's own")
    parser.add_argument("--guidance", type=float, help="by default the model's own")
    parser.add_argument("--preset", default="default", help="of the heatmaps")
    parser.add_argument("--sheet", type=Path, help="only draw 24 prompts into this image")
    parser.add_argument(
        "--work", type=Path, default=Path("build/evaluation"), help="finished parts"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/evaluation.json"))
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    """Measure, print a table and write the figures."""
    args = options(given)
    subject = asked_subject(args)
    if args.sheet:
        sheet(subject, args.scene_seed, args.sheet)
        return
    accuracy = checker_accuracy(subject, args.scene_seed)
    print(f"checker: {accuracy['right']:.1%} of composed scenes are right", flush=True)
    make = subject.make
    vae = copy.deepcopy(subject.pipe.vae).cpu()
    decibels = vae_psnr(vae, seed=7, count=100, make=make)
    print(f"vae: {decibels:.2f} dB on unseen scenes", flush=True)
    named = ("model", "checker", "prompts", "scene_seed", "steps", "guidance", "preset")
    claim(args.work, {name: getattr(args, name) for name in named})
    records = evaluate(args)
    figures = records.figures()
    print(table(figures))
    print(goals(figures))
    report = {
        "options": {
            name: str(value)
            for name, value in (vars(args) | dict(subject.settings)).items()
            if name not in ("out", "work")
        },
        "machine": machine(args.device),
        "checker": accuracy,
        "segmenter": accuracy_of(args.checker),
        "vae": decibels,
        "figures": figures,
        "wrong": wrong(records, unseen_scenes(make, args.prompts, args.scene_seed)),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(args.out)


if __name__ == "__main__":
    main()
