"""Measure on the demo whether its maps tell which words arrived, and choose the seed that has all.

Prompts that training never saw are drawn from several seeds each. A checker that knows nothing of
the model says what is in each image, or a file of labels by eye. Half of the prompts choose the
measure and the thresholds, the other half report: how well a noun's map tells that it is missing,
and how many images are as asked if a seed is chosen by its score after a part of the steps, at
random, or by whoever judged. Further prompts of three things are drawn for their rows alone. Each
prompt is kept in ``--work`` as it ends; run again, the command goes on where it stopped.

    python -m demos.evaluation.evaluate_arrival --checker build/checker/checker.safetensors
    python -m demos.evaluation.evaluate_arrival --labels labels.json --calibration FILE
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

import sdattn
from scripts.calibrate import auc, fit
from sdattn.follow.run_part import RunPart
from sdattn.maps.arrival import WEAK, Calibration, leads, peak_of

from ..scenes import emoji
from .arrival import (
    FURTHER,
    Drawn,
    Floats,
    by_checker,
    by_eye,
    draw,
    measured,
    prompts_of,
    read,
)
from .measures import interval
from .records import claim, split_of
from .seeing import Subject, accuracy_of, machine, own_settings, subject_of

END = (0.5, 1.0)  # of the run: what the default preset reads
SHARES = (0.2, 0.3, 0.4, 0.5)
DECIDED = 0.4  # of the steps, for the sheet
CHOSEN = (0, 160, 0)  # colour of a frame
ROUNDS = 300  # of the bootstrap
Rows = dict[str, list[Drawn]]


def part_of(share: float, steps: int) -> tuple[float, float]:
    """Return the part of the run by which a seed is judged: the last step up to a share of the
    run, or for the whole what the default preset reads."""
    if share == 1:
        return END
    middle = (len(RunPart.of(share).passes(steps)) - 0.5) / steps
    return middle, middle


def groups(drawn: Iterable[Drawn]) -> Rows:
    """Return the prompts by the rows of the tables. Those drawn for their three things alone are in
    no other row."""
    rows: Rows = {"all": [], "one thing": [], "two things": [], "three things": []}
    for one in drawn:
        if one.number < FURTHER:
            rows["all"].append(one)
        rows[[*rows][len(one.nouns)]].append(one)
    return {name: held for name, held in rows.items() if held}


def told_apart(drawn: Sequence[Drawn], share: float) -> dict[str, Any]:
    """Return the AUC of each measure for missing nouns, with its 95 % interval over prompts."""
    values: dict[str, list[Floats]] = {}
    missing, prompts = [], []
    for one in drawn:
        for seed, there in enumerate(one.there):
            missing.append(~there)
            prompts.append(np.full(len(there), one.number))
            part = part_of(share, one.maps.shape[1])
            for name, found in measured(one, seed, *part).items():
                values.setdefault(name, []).append(found)
    absent, owner = np.concatenate(missing), np.concatenate(prompts)
    every = {name: np.concatenate(held) for name, held in values.items()}
    told: dict[str, Any] = {"nouns": len(absent), "missing": int(absent.sum())}
    for name, held in every.items():
        told[name] = resampled(owner, lambda some, held=held: auc(held[some], absent[some]), absent)
    return told


def resampled(
    owner: np.ndarray, figure: Callable[[np.ndarray], float], absent: np.ndarray
) -> list[float]:
    """Return a figure and the ends of its 95 % interval, by resampling whole prompts."""
    every = np.arange(len(owner))
    if not 0 < absent.sum() < len(absent):
        return [float("nan")] * 3
    by_prompt = [np.flatnonzero(owner == name) for name in np.unique(owner)]
    rng = np.random.default_rng(0)
    found = []
    for _ in range(ROUNDS):
        some = np.concatenate(
            [by_prompt[i] for i in rng.integers(0, len(by_prompt), len(by_prompt))]
        )
        if 0 < absent[some].sum() < len(some):
            found.append(figure(some))
    return [figure(every), *np.percentile(found, [2.5, 97.5]).tolist()]


def chosen(
    drawn: Sequence[Drawn], n: int, score: Callable[[Drawn, int], float]
) -> tuple[Floats, np.ndarray]:
    """Return for each choice of ``n`` of a prompt's seeds whether the image with the highest score
    is as asked, and the prompt's number."""
    right, owner = [], []
    for one in drawn:
        scores = [score(one, seed) for seed in range(len(one.right))]
        for some in combinations(range(len(scores)), n):
            right.append(float(one.right[max(some, key=lambda seed: scores[seed])]))
            owner.append(one.number)
    return np.array(right), np.array(owner)


def choices(drawn: Sequence[Drawn], seeds: int) -> dict[str, Any]:
    """Return the share of images as asked, [mean, low, high], by number of candidates and by what
    chooses, with the price in calls of the model, in images."""
    told: dict[str, Any] = {"prompts": len(drawn)}
    told["1"] = {"random": [*interval(*chosen(drawn, 1, lambda *_: 0.0))]}
    scores = {
        "score": lambda heatmaps: heatmaps.score(),
        "peaks alone": lambda heatmaps: sum(math.log(peak_of(w)) for w in heatmaps.judged()),
    }
    known: dict[tuple[str, float, int, int], float] = {}
    for share, one in product((*SHARES, 1.0), drawn):
        part = part_of(share, one.maps.shape[1])
        for seed in range(len(one.right)):
            heatmaps = one.heatmaps(seed, *part)
            for name, score in scores.items():
                known[name, share, one.number, seed] = score(heatmaps)
    for n in [n for n in (2, 4, 8) if n <= seeds]:
        row: dict[str, Any] = {}
        for share in (*SHARES, 1.0):
            row[str(share)] = {"price": round(n * share + 1 - share, 2)}
            for name in scores:

                def by(one: Drawn, seed: int, key: tuple[str, float] = (name, share)) -> float:
                    return known[(*key, one.number, seed)]

                row[str(share)][name] = [*interval(*chosen(drawn, n, by))]
        row["judge"] = [*interval(*chosen(drawn, n, lambda one, seed: float(one.right[seed])))]
        told[str(n)] = row
    return told


def judged(drawn: Iterable[Drawn]) -> tuple[Floats, NDArray[np.bool_], Floats]:
    """Return the lead of each noun over the other words, if the noun is missing, and the leads of
    the words of grounds."""
    of_nouns, missing, of_grounds = [], [], []
    for one in drawn:
        for seed, there in enumerate(one.there):
            words = one.heatmaps(seed, *END).judged()
            for word, lead in zip(words, leads(words), strict=True):
                if word.label in one.nouns:
                    of_nouns.append(lead)
                    missing.append(not there[one.nouns.index(word.label)])
                else:
                    of_grounds.append(lead)
    return np.array(of_nouns), np.array(missing), np.array(of_grounds)


def flagged(drawn: Iterable[Drawn], below: float) -> dict[str, float]:
    """Return how many of the missing nouns, of the others, and of the words of grounds have a lead
    below a threshold, and the AUC for missing nouns."""
    found, missing, grounds = judged(drawn)
    low = found < below
    return {
        "missing nouns": float(low[missing].mean()),
        "other nouns": float(low[~missing].mean()),
        "grounds": float((grounds < below).mean()) if len(grounds) else float("nan"),
        "auc": auc(found, missing),
    }


def figures(drawn: Sequence[Drawn], seeds: int, model: str) -> dict[str, Any]:
    """Return all figures: of the half that chooses, and of the one that reports."""
    halves: dict[str, list[Drawn]] = {"for choosing": [], "reported": []}
    for one in drawn:
        halves[split_of(one.number)].append(one)
    found, missing, _ = judged(halves["for choosing"])
    calibration = fit(model, "default", found.tolist(), missing.tolist())
    told: dict[str, Any] = {"calibration": calibration.to_json()}
    told["flagged"] = flagged(halves["reported"], calibration.lead)
    told["flagged as weak"] = flagged(halves["reported"], WEAK)
    for half, some in halves.items():
        told[half] = {}
        for name, held in groups(some).items():
            told[half][name] = {
                "auc": {str(share): told_apart(held, share) for share in (DECIDED, 1.0)},
                "candidates": choices(held, seeds),
            }
    return told


def sheet(drawn: Sequence[Drawn], below: float) -> Image.Image:
    """Return each prompt's images in a row: the one with the highest score after ``DECIDED`` of the
    steps in a frame, and under each its score and the words whose lead is below a threshold."""
    line = 12
    wide = drawn[0].images[0].width
    whole = Image.new("RGB", (wide * len(drawn[0].images), (wide + 3 * line) * len(drawn)), "white")
    pen = ImageDraw.Draw(whole)
    for row, one in enumerate(drawn):
        top = row * (wide + 3 * line)
        pen.text((2, top), one.prompt.text, "black")
        part = part_of(DECIDED, one.maps.shape[1])
        scores = [one.heatmaps(seed, *part).score() for seed in range(len(one.images))]
        for seed, image in enumerate(one.images):
            left = seed * wide
            whole.paste(image, (left, top + line))
            if scores[seed] == max(scores):
                corner = left + wide - 1, top + line + wide - 1
                pen.rectangle((left, top + line, *corner), outline=CHOSEN, width=4)
            words = one.heatmaps(seed, *END).judged()
            low = [
                word.label for word, lead in zip(words, leads(words), strict=True) if lead < below
            ]
            told = f"{scores[seed]:.2f}  {'no ' * bool(low)}{', '.join(low)}"
            pen.text((left + 2, top + line + wide), told, "red" if low else "black")
    return whole


def main(given: list[str] | None = None) -> None:
    """Read the options, draw what is missing, and print and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="demo, or a folder of one")
    parser.add_argument(
        "--checker", type=Path, default=Path("build/checker/checker.safetensors"), help="of sprites"
    )
    parser.add_argument("--labels", type=Path, help="JSON of labels by eye, in place of a checker")
    parser.add_argument("--prompts", type=int, default=FURTHER, help="at most by default")
    parser.add_argument("--three", type=int, default=60, help="further prompts of three things")
    parser.add_argument("--seeds", type=int, default=4, help="of each prompt")
    parser.add_argument("--scene-seed", type=int, default=78, help="which unseen prompts")
    parser.add_argument("--calibration", type=Path, help="write the threshold into this file")
    parser.add_argument("--sheet", type=int, nargs="+", default=[], help="prompts to show")
    parser.add_argument("--work", type=Path, default=Path("build/arrival"))
    args = parser.parse_args(given)
    # what may differ when it goes on
    later = ("work", "checker", "labels", "prompts", "three", "calibration", "sheet")
    claim(args.work, {name: value for name, value in vars(args).items() if name not in later})
    torch.set_num_threads(1)
    if args.labels:
        pipe: Any = sdattn.load_pipeline(args.model, device="cpu", dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)
        subject = Subject(pipe, own_settings(args.model), emoji.random_scene, lambda *_: [])
        judge = by_eye(json.loads(args.labels.read_text()))
    else:
        subject = subject_of(args.model, args.checker)
        judge = by_checker(subject.see)
    drawn = []
    for one in prompts_of(subject.make, args.prompts, args.three, args.scene_seed):
        path = args.work / f"{one[0]}.safetensors"
        draw(subject, one, path, args.seeds)
        drawn.append(read(subject.pipe, one, path, judge))
    found = figures(drawn, args.seeds, args.model)
    if args.sheet:
        shown = [one for one in drawn if one.number in args.sheet]
        sheet(shown, found["calibration"]["lead"]).save(args.work / "sheet.png")
    if args.calibration:
        Calibration(**found["calibration"]).write(args.calibration)
    checker = {"by eye": str(args.labels)} if args.labels else accuracy_of(args.checker)
    report = {"machine": machine(), "checker": checker, **found}
    (args.work / "figures.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
