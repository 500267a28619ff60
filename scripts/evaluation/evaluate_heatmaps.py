"""Do the heatmaps point at the right thing? Presets, layers and steps against known objects.

Scenes that the demo model never saw are drawn twice: by the model, with masks by colour from its
images, and by the script, with exact masks, which the model then explains from one noising to
each of a few timesteps or from its inversion. Each word's map is compared with its object's mask,
and with where the image changes when the word is knocked out.

Of an MM-DiT (``--model demo-mmdit``) the model's own images are looked at, in two halves: one to
choose by, one to report.

Prints the tables of docs/trust.md and docs/causes.md and writes all figures (.json), the tables
(.md) and a plot (.png).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import sdattn
from sdattn.models.demos import DEMOS

from . import images, joint
from .causes import correlations
from .records import Records, read_image
from .tables import all_tables, plot
from .variants import PEERS, VARIANTS

SETTINGS: dict[str, Callable[..., Iterator[images.Sample]]] = {
    "generated": images.generated,
    "noised": images.noised,
    "inverted": images.inverted,
}
CHUNK = 25  # scenes a job
JOINT = "joint"


def measure(model: str, setting: str, seed: int, asked: Sequence[images.Asked]) -> Records:
    """One job, in a process of its own: some scenes in one setting with one seed."""
    torch.set_num_threads(1)
    pipe = sdattn.load_pipeline(model, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    if is_joint(model):
        way = joint.caused if setting == "causes" else joint.measured
        return way(pipe, model, seed, asked)
    records = Records()
    if setting == "causes":
        correlations(pipe, images.generated(pipe, asked, seed, PEERS), records)
        return records
    variants = VARIANTS if setting == "generated" else PEERS
    for image in SETTINGS[setting](pipe, asked, seed, variants):
        read_image(image, setting, records)
    return records


def is_joint(model: str) -> bool:
    """Whether the demo model of a name or folder has joint attention."""
    folder = Path(DEMOS.get(model, model))
    return (folder / "transformer").is_dir()


def jobs(args: argparse.Namespace) -> list[tuple[str, str, int, list[images.Asked]]]:
    """The longest first."""
    asked = images.unseen_scenes(args.scenes, args.seed)
    seeds = {"inverted": 1, "causes": 1, "generated": args.noises, "noised": args.noises}
    if is_joint(args.model):
        seeds = {"causes": 1, JOINT: args.noises}
    counts = {"causes": args.causes}
    found = []
    for setting, number in seeds.items():
        most = counts.get(setting, args.scenes)
        for seed in range(number):
            for start in range(0, most, CHUNK):
                part = asked[start : min(start + CHUNK, most)]
                found.append((args.model, setting, seed, part))
    return found


def options(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a demo model, or the folder of one")
    parser.add_argument("--scenes", type=int, default=500)
    parser.add_argument("--noises", type=int, default=3, help="seeds of noise for each scene")
    parser.add_argument("--causes", type=int, default=250, help="scenes with knockouts")
    parser.add_argument("--seed", type=int, default=2026, help="which unseen scenes")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="24 scenes, one seed")
    parser.add_argument("--again", action="store_true", help="only the tables of --out, again")
    parser.add_argument("--out", type=Path, default=Path("outputs/heatmaps-evaluation"))
    args = parser.parse_args(given)
    if args.quick:
        args.scenes, args.noises, args.causes = 24, 1, 12
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all, and tell how."""
    began, records = time.time(), Records()
    todo = jobs(args)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        for i, done in enumerate(pool.map(measure, *zip(*todo, strict=True)), start=1):
            records.add_all(done)
            print(f"{i} of {len(todo)} jobs, {time.time() - began:.0f} s", flush=True)
    return {
        "options": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "seconds": round(time.time() - began),
        "figures": records.figures(),
    }


def main(given: list[str] | None = None) -> None:
    args = options(given)
    saved = args.out / "figures.json"
    if args.again:
        document = json.loads(saved.read_text())
    else:
        document = run(args)
        args.out.mkdir(parents=True, exist_ok=True)
        saved.write_text(json.dumps(document, indent=1) + "\n")
    figures, told = document["figures"], document["options"]
    text = joint.tables(figures) if is_joint(args.model) else all_tables(figures, told)
    made = f"{document['seconds']} s with {told['processes']} processes"
    text += f"\n{made} on {document['machine']}\n"
    print(text)
    (args.out / "tables.md").write_text(text)
    if not is_joint(args.model):
        plot(figures, args.out / "plot.png")
    print(args.out)


if __name__ == "__main__":
    main()
