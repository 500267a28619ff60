"""Where should explain() look in an image that is there already? Images that the script draws,
with exact masks, noised to one timestep after another, to several of them, and inverted.

    python -m demos.evaluation.evaluate_explained
    python -m demos.evaluation.evaluate_explained --solvers 20   # how near inversions come back

The scenes are those that training never saw. Half of them (even numbers) are for choosing, the
others for what is reported of the choice. The maps at several timesteps are the means of those at
each, since the noise at a timestep depends on no other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import sdattn
from sdattn import Heatmaps
from sdattn.edit import invert
from sdattn.maps.aggregation import refines_itself

from .images import Asked, Sample, batches, composed, said, unseen_scenes
from .records import SPLITS, Records, read_image, split_of
from .seeing import Subject, as_composed, machine, subject_of
from .solvers import reconstructions
from .tables import NAMES, measures_of, table
from .variants import DEFAULT

PARTS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SEVERAL = (
    (0.05, 0.15, 0.25),  # of UNets
    (0.1, 0.2, 0.3),
    (0.2, 0.3, 0.4),
    (0.3, 0.4, 0.5),
    (0.4, 0.5, 0.6),
    (0.5, 0.6, 0.7),
    (0.6, 0.7, 0.8),
    (0.25, 0.5),
    (0.3, 0.5, 0.7),
    (0.1, 0.3, 0.5),
    (0.5, 0.7, 0.9),
)


def explained(
    subject: Subject, asked: Sequence[Asked], seed: int, inverts: bool
) -> Iterator[Sample]:
    """Yield the script's own images with the maps of every way to look at them."""
    pipe = subject.pipe
    most = pipe.scheduler.config.num_train_timesteps
    for part in batches(asked):
        given = composed(pipe, part), said(part)
        # maps as they are: each look is then one pass of its own, whose mean is that of several
        ways = {"seed": seed * 100_000 + part[0][0], "preset": plain(pipe)}
        at = {
            one: sdattn.explain(pipe, *given, timesteps=[round(one * most)], **ways).heatmaps
            for one in PARTS
        }
        inverted = _replayed(subject, *given) if inverts else None
        for i, (one, image) in enumerate(zip(part, given[0], strict=True)):
            maps = {f"at {share:g}": found[i] for share, found in at.items()}
            maps |= {_name(parts): _mean([at[share][i] for share in parts]) for parts in SEVERAL}
            maps[DEFAULT] = maps[_name(SEVERAL[0])]
            if inverted is not None:
                maps["inverted"] = inverted[i]
            yield Sample(*one, -1, image, as_composed(one[1]), maps)


def plain(pipe: Any) -> str:
    """Return the preset of a model that neither spreads nor sharpens."""
    return "columns" if refines_itself(pipe) else "default"


def _replayed(
    subject: Subject, images: Sequence[Image.Image], prompts: Sequence[str]
) -> Sequence[Heatmaps]:
    """Return the maps of the second half of the way back from the images' inversions, without
    guidance."""
    pipe = subject.pipe
    ways: dict[str, Any] = {"guidance_scale": 1.0, "null_text": False}
    ways["num_inference_steps"] = subject.settings["num_inference_steps"]
    pairs = zip(images, prompts, strict=True)
    found = [invert(pipe, *pair, **ways) for pair in pairs]
    options = {**found[0].options(), "latents": torch.cat([one.noise for one in found])}
    with found[0].replay(pipe):
        return sdattn.generate(pipe, list(prompts), preset=plain(pipe), **options).heatmaps


def _name(parts: Sequence[float]) -> str:
    return "mean of " + ", ".join(f"{part:g}" for part in parts)


def _mean(held: Sequence[Heatmaps]) -> Heatmaps:
    first = held[0]
    maps = torch.stack([one.maps for one in held]).mean(0)
    return Heatmaps(first.prompt, maps, first.columns, preset=first.preset)


def tables(figures: Mapping[str, Any]) -> str:
    """The figures in Markdown."""
    parts = []
    for split in [one for one in SPLITS if one in figures]:
        parts.append(f"**Scenes {split}**\n")
        for kind in ("noun", "colour"):
            by_variant = figures[split][kind]
            parts.append(f"{NAMES[kind]}:\n")
            names = [name for name in by_variant if name != DEFAULT]
            parts.append(table(by_variant, names, measures_of(kind)))
    return "\n".join(parts)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-mmdit", help="a demo model, or a folder of one")
    parser.add_argument(
        "--checker", type=Path, default=Path("build/checker/checker.safetensors"), help="weights"
    )
    parser.add_argument("--scenes", type=int, default=80)
    parser.add_argument("--noises", type=int, default=1, help="seeds of noise for each scene")
    parser.add_argument("--seed", type=int, default=2028, help="which unseen scenes")
    parser.add_argument("--solvers", type=int, help="only how near so many images come back")
    parser.add_argument("--out", type=Path, default=Path("outputs/evaluation/explained"))
    args = parser.parse_args(given)
    subject = subject_of(args.model, args.checker)
    asked = unseen_scenes(subject.make, args.solvers or args.scenes, args.seed)
    if args.solvers:
        print(reconstructions(subject.pipe, asked))
        return
    began, records = time.time(), Records()
    for seed in range(args.noises):
        for image in explained(subject, asked, seed, inverts=seed == 0):
            read_image(image, split_of(image.number), records)
            print(f"{image.number + 1} of {len(asked)}, {time.time() - began:.0f} s", flush=True)
    document = {
        "options": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "machine": machine(),
        "seconds": round(time.time() - began),
        "figures": records.figures(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "figures.json").write_text(json.dumps(document, indent=1) + "\n")
    text = tables(document["figures"])
    (args.out / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
