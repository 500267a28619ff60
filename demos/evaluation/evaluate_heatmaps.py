"""Do the heatmaps point at the right thing? Presets, layers and steps against known objects.

Scenes that the demo model never saw are drawn twice: by the model, with masks by the checker from
its images, and by the script, with exact masks, which the model then explains from one noising to
each of a few timesteps or from its inversion. The map of each noun, colour word and background word
is compared with its object's mask; of pairs that are alike and of others it is measured how much of
a noun's map is on the other object; and words are knocked out, to see what becomes of the image.

Scenes with even numbers are to choose the default by, the others report. Of an MM-DiT
(``--model demo-mmdit``) the model's own images of shapes are looked at.

Each part is kept in ``--work`` as it ends; run again, the command goes on where it stopped. Prints
the tables of docs/trust.md and docs/causes.md and writes all figures (.json), the tables (.md) and
a plot (.png).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import images, joint
from .causes import causes
from .leakage import leakage, paired_scenes
from .records import Records, claim, kept, read_image, rounded, split_of
from .seeing import Subject, accuracy_of, is_joint, machine, subject_of
from .tables import all_tables, plot
from .variants import DEFAULT, PEERS, VARIANTS

WAYS: dict[str, Callable[..., Iterator[images.Sample]]] = {
    "drawn": images.generated,
    "noised": images.noised,
    "inverted": images.inverted,
}
PAIRS = "pairs "  # before the way
CHUNK = 20  # scenes a part
JOINT = "joint"
TIME = ("time", "parts", DEFAULT, "seconds")


class Part(NamedTuple):
    """Some scenes in one setting with one seed of noise: from a first one to before a last one."""

    setting: str
    seed: int
    first: int
    last: int


def measure(args: argparse.Namespace, part: Part) -> Records:
    """Return the records of a part, in a process of its own, kept in a file."""

    def make() -> Records:
        torch.set_num_threads(1)
        began = time.time()
        records = read_part(subject_of(args.model, args.checker, args.device), args, part)
        records.add(TIME, 0, np.array([time.time() - began]))
        return records

    return kept(args.work / f"{'-'.join(map(str, part)).replace(' ', '-')}.json", make)


def read_part(subject: Subject, args: argparse.Namespace, part: Part) -> Records:
    """Return the records of a part."""
    setting, seed, first, last = part
    records = Records()
    if setting.startswith(PAIRS):
        pairs = paired_scenes(args.pairs, args.seed)[first:last]
        for image in WAYS[setting.removeprefix(PAIRS)](subject, pairs, seed, PEERS):
            leakage(image, setting, records)
        return records
    most = max(args.scenes, args.inverted, args.causes)
    asked = images.unseen_scenes(subject.make, most, args.seed)[first:last]
    if is_joint(args.model):
        way = joint.caused if setting == "causes" else joint.measured
        return way(subject, seed, asked)
    if setting == "causes":
        causes(subject, images.generated(subject, asked, seed, PEERS), records)
        return records
    for image in WAYS[setting](subject, asked, seed, VARIANTS):
        read_image(image, f"{setting}, {split_of(image.number)}", records)
    return records


def parts(args: argparse.Namespace) -> list[Part]:
    """Return all parts, the longest first."""
    counts = {"inverted": args.inverted, "causes": args.causes, "drawn": args.scenes}
    counts |= {f"{PAIRS}drawn": args.pairs, "noised": args.scenes, f"{PAIRS}noised": args.pairs}
    if is_joint(args.model):
        counts = {"causes": args.causes, JOINT: args.scenes}
    found = []
    for setting, most in counts.items():
        seeds = args.noises if setting in ("drawn", "noised", JOINT) else 1
        for seed in range(seeds):
            starts = range(0, most, CHUNK)
            found += [Part(setting, seed, at, min(at + CHUNK, most)) for at in starts]
    return found


def options(given: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a demo model, or the folder of one")
    parser.add_argument(
        "--checker", type=Path, default=Path("build/checker/checker.safetensors"), help="weights"
    )
    parser.add_argument("--scenes", type=int, default=120)
    parser.add_argument("--noises", type=int, default=1, help="seeds of noise for each scene")
    parser.add_argument("--inverted", type=int, default=24, help="scenes that are inverted")
    parser.add_argument("--causes", type=int, default=30, help="scenes with knockouts")
    parser.add_argument("--pairs", type=int, default=80, help="scenes of two, half of them alike")
    parser.add_argument("--seed", type=int, default=2026, help="which unseen scenes")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, or cuda")
    parser.add_argument("--quick", action="store_true", help="a few scenes of each kind")
    parser.add_argument("--work", type=Path, default=Path("build/heatmaps-evaluation"))
    parser.add_argument("--out", type=Path, default=Path("outputs/heatmaps-evaluation"))
    args = parser.parse_args(given)
    if args.quick:
        args.scenes, args.noises, args.inverted, args.causes, args.pairs = 12, 1, 4, 4, 8
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all parts, and how they were made."""
    claim(args.work, {one: getattr(args, one) for one in ("model", "checker", "seed", "scenes")})
    records, todo = Records(), parts(args)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        for i, done in enumerate(pool.map(measure, [args] * len(todo), todo), start=1):
            records.add_all(done)
            took = f"{done.values(TIME).sum():.0f} s"
            print(f"{i} of {len(todo)}, {todo[i - 1].setting}: {took}", flush=True)
    hidden = ("out", "work")
    return {
        "options": {name: str(value) for name, value in vars(args).items() if name not in hidden},
        "machine": machine(args.device),
        "seconds": round(records.values(TIME).sum()),
        "checker": {} if is_joint(args.model) else accuracy_of(args.checker),
        "figures": records.figures(),
    }


def main(given: list[str] | None = None) -> None:
    """Measure, print the tables and write them."""
    args = options(given)
    document = run(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "figures.json").write_text(json.dumps(rounded(document)) + "\n")
    figures, told = document["figures"], document["options"]
    shapes = is_joint(args.model)
    text = joint.tables(figures) if shapes else all_tables(figures, told, document["checker"])
    text += f"\n{document['seconds']} s of work on {document['machine']}\n"
    print(text)
    (args.out / "tables.md").write_text(text)
    if not shapes:
        plot(figures, args.out / "plot.png")
    print(args.out)


if __name__ == "__main__":
    main()
