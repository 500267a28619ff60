"""Measure ``guide_missing()`` on the demo: are more of the things there that were asked for?

Unseen prompts of three things are drawn; where the maps name a noun that did not arrive, it is
guided in from the same noise. A checker that knows nothing of the model says what is in both
images. Each prompt is kept in ``--work`` as it ends; run again, the command goes on where it
stopped.

    python -m demos.evaluation.evaluate_missing --checker build/checker/checker.safetensors
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import sdattn
from sdattn.edit import guide_missing

from .arrival import by_checker, prompts_of
from .images import Asked
from .measures import wilson
from .records import claim
from .seeing import Subject, accuracy_of, machine, subject_of


def case(subject: Subject, asked: Asked, work: Path) -> dict[str, Any]:
    """Return what the maps say of a prompt's image, and if the guided one was taken; keep it, and
    both images, in files."""
    number, scene, prompt = asked
    record = work / f"{number}.json"
    if record.exists():
        known: dict[str, Any] = json.loads(record.read_text())
        return known
    nouns = [word.text for word in scene.words(prompt) if word.kind == "noun"]
    [plain] = sdattn.generate(subject.pipe, prompt, seed=number, **subject.settings)
    missing = [one.word for one in plain.missing(nouns)]
    told = {"prompt": prompt, "missing": missing, "taken": False}
    images = [plain.image]
    if missing:
        [chosen] = guide_missing(subject.pipe, prompt, nouns, seed=number, **subject.settings)
        told["taken"] = chosen.image.tobytes() != plain.image.tobytes()
        images.append(chosen.image)
    Image.fromarray(np.hstack(images)).save(work / f"{number}.png")
    record.write_text(json.dumps(told) + "\n")
    return told


def share(flags: list[bool]) -> list[float]:
    """Return how many are true, as a share, and its 95 % interval (Wilson)."""
    return [float(np.mean(flags)), *wilson(sum(flags), len(flags))] if flags else []


def main(given: list[str] | None = None) -> None:
    """Read the options, draw what is missing, and print and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--checker", type=Path, default=Path("build/checker/checker.safetensors"), help="of sprites"
    )
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--scene-seed", type=int, default=79, help="which unseen prompts")
    parser.add_argument("--work", type=Path, default=Path("build/missing"))
    args = parser.parse_args(given)
    claim(args.work, {"model": args.model, "scene_seed": args.scene_seed})
    torch.set_num_threads(1)
    subject = subject_of(args.model, args.checker)
    judge = by_checker(subject.see)
    right: dict[str, list[bool]] = {"plain": [], "guided": [], "named": [], "its image": []}
    nouns: dict[str, list[bool]] = {"before": [], "after": []}
    taken = []
    for asked in prompts_of(subject.make, 0, args.prompts, args.scene_seed):
        told = case(subject, asked, args.work)
        both = np.asarray(Image.open(args.work / f"{asked[0]}.png"))
        side = both.shape[0]
        images = [Image.fromarray(both[:, at : at + side]) for at in range(0, both.shape[1], side)]
        there, as_asked = judge(asked, images)
        right["plain"].append(bool(as_asked[0]))
        right["guided"].append(bool(as_asked[-1]))
        if told["missing"]:
            right["named"].append(bool(as_asked[0]))
            right["its image"].append(bool(as_asked[-1]))
            taken.append(told["taken"])
            gone = ~there[0]
            nouns["before"] += there[0].tolist()
            nouns["after"] += there[-1].tolist()
            nouns.setdefault("missing ones, after", []).extend(there[-1][gone].tolist())
    report = {
        "machine": machine(),
        "checker": accuracy_of(args.checker),
        "prompts": args.prompts,
        "with words that the maps name": len(taken),
        "guided images taken": share(taken),
        "as asked": {name: share(flags) for name, flags in right.items()},
        "nouns there": {name: share(flags) for name, flags in nouns.items()},
    }
    (args.work / "figures.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
