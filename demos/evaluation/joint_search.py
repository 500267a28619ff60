"""Which part of a run, blocks, power and spreadings the default of joint attention should have.

Each scene is drawn once, and every block's attention to the text and to the image is kept for each
step of the second half. All candidates are made from that, as the model would make them while it
runs, see :mod:`sdattn.look.refined`. The scenes with even numbers choose: of the candidates whose
IoU and pointing, of shape and of colour words, are within the interval of the best, the cheapest.
The scenes with odd numbers are for what is reported of it.

python -m demos.evaluation.joint_search --scenes 120 --noises 2 --seed 2027
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import sdattn
from scripts.benchmarks.machine import processor_name
from sdattn.follow.run_part import RunPart
from sdattn.look.attended import Columns
from sdattn.look.refined import Refined
from sdattn.maps.aggregation import finish
from sdattn.maps.heatmaps import Heatmaps
from sdattn.maps.presets import PRESETS
from sdattn.maps.requirements import columns_around
from sdattn.models.denoiser import find_denoiser
from sdattn.models.pipeline_call import call_pipeline, images_of
from sdattn.models.reading import read_prompts

from .images import Asked, Sample, batches, said, samples, seeds_of, unseen_scenes
from .measures import pointed
from .records import SPLITS, Records, read_image, split_of
from .seeing import Subject, subject_of
from .variants import DEFAULT

PARTS = {"last half": 0.5, "last quarter": 0.75, "last eighth": 0.875, "last step": None}
BLOCKS = {"all": 0.0, "last half": 1 / 2, "last third": 2 / 3, "last": 5 / 6}
POWERS = (4.0, 5.0, 6.0)
TEXT = 0.2  # what a layer's text costs, in units of the image's attention to itself
KINDS, MEASURES = ("noun", "colour"), ("iou", "pointing")
OUT = Path("outputs/evaluation/joint/search")


@dataclass(frozen=True)
class Way:
    """One candidate.

    Attributes:
        part, blocks: keys of ``PARTS`` and ``BLOCKS``: the steps that are read, and the blocks
            along which maps are spread.
        text: attention to the text by all blocks, ``"all"``, or by these, ``"same"``.
        rounds: how often a map is spread.
        power: to which it is raised.
    """

    part: str
    blocks: str
    text: str
    rounds: int
    power: float

    @property
    def name(self) -> str:
        return f"{self.part} | {self.blocks} | {self.text} | {self.rounds} | {self.power:g}"

    def kept(self, steps: int, layers: int) -> tuple[list[int], list[int]]:
        """Return the steps and the blocks that it reads."""
        first = PARTS[self.part]
        passes = [steps - 1] if first is None else RunPart(first, 1.0).passes(steps)
        return passes, list(range(int(BLOCKS[self.blocks] * layers + 1e-9), layers))

    def price(self, steps: int, layers: int) -> float:
        """Return how often the image's attention to itself is computed once more, as a share of how
        often a run computes it, and what the text costs. Two spreadings of one pass fit into one,
        but for the first."""
        passes, blocks = self.kept(steps, layers)
        spreads = len(blocks) * (len(passes) + self.rounds - 1)
        texts = (layers if self.text == "all" else len(blocks)) * len(passes)
        return (spreads + TEXT * texts) / (steps * layers)


WAYS = [
    Way(part, blocks, text, *rest)
    for part, blocks, text, *rest in product(PARTS, BLOCKS, ("all", "same"), (1, 2), POWERS)
    if (blocks, text) != ("all", "same")
]
FORMER = Way("last half", "all", "all", 2, 5.0)  # the default that the others are compared with


def _recorded(refined: Refined, columns: Columns) -> Iterator[Tensor]:
    """Yield a block's attention to the text, and its cells' attention to each other."""
    text = refined.text.add_to(None, columns) / refined.heads
    cells = torch.eye(refined.cells).expand(refined.batch, -1, -1)
    found = torch.cat([text, refined._spread(cells).mean(1)], dim=-1)
    yield found[:, None] * refined.heads  # of which the store takes the mean over heads


def spread_while_running(text: Tensor, cells: Tensor, rounds: int, blocks: list[int]) -> Tensor:
    """Return the mean ``[N, T]`` of maps that are spread as :class:`Spreading` has them.

    Args:
        text: ``[steps, blocks, N, T]``, each block's attention to the text.
        cells: ``[steps, blocks, N, N]``, each row sums to 1.
        rounds: 1 or 2. Once, a block spreads the mean map of the step before.
        blocks: those along which maps are spread.
    """
    found, before = [], None
    for own, along in zip(text, cells[:, blocks], strict=True):
        if before is None:
            # all blocks spread their own; some of them that of all blocks until there
            is_some = len(blocks) < len(own)
            so_far = [own[: i + 1].mean(0) if is_some else own[i] for i in blocks]
            once = along @ torch.stack(so_far)
            twice = along @ once
        else:
            once, twice = along @ before[0], along @ before[1]
        before = own.mean(0), once.mean(0)
        found.append((once, twice)[rounds - 1].mean(0))
    return torch.stack(found).mean(0)


def drawn(subject: Subject, asked: Sequence[Asked], seed: int) -> Iterator[Sample]:
    """Yield the model's images with every candidate's heatmaps."""
    pipe, settings = subject.pipe, subject.settings
    steps = settings["num_inference_steps"]
    for part in batches(asked):
        prompts, seeds = said(part), seeds_of(part, seed)
        read = read_prompts(pipe, prompts, **settings)
        columns = columns_around(*read)
        late = list(range(steps // 2, steps))
        watch: dict[str, Any] = {"refine": "self", "steps": late, "tokens": columns}
        with mock.patch.object(Refined, "_parts", _recorded):
            with sdattn.capture(pipe, **watch) as store:
                images = images_of(call_pipeline(pipe, prompts, seeds, settings))
        every = torch.stack(list(store.maps.values()), dim=2)  # [images, steps, blocks, rows, ...]
        found: list[dict[str, Heatmaps]] = []
        for i in range(len(part)):
            grid, held = every.shape[3:5], every[i].flatten(2, 3)
            text, cells = held.split([len(columns), math.prod(grid)], dim=-1)
            maps, spread = dict[str, Heatmaps](), dict[Any, Tensor]()
            for way in WAYS:
                kept, blocks = way.kept(steps, every.shape[2])
                if (structure := (way.part, way.blocks, way.text, way.rounds)) not in spread:
                    first = blocks[0] if way.text == "same" else 0
                    some = slice(kept[0] - late[0], None), slice(first, None)
                    along = [block - first for block in blocks]
                    held = spread_while_running(text[some], cells[some], way.rounds, along)
                    spread[structure] = held.unflatten(0, grid)
                preset = replace(PRESETS["joint"], sharpen=way.power)
                name = DEFAULT if way == FORMER else way.name
                maps[name] = finish(spread[structure], read[i], preset, columns)
            found.append(maps)
        yield from samples(subject, part, seeds, images, found)


def measured(subject: Subject, args: argparse.Namespace) -> Records:
    """Return the records of all scenes, each with every seed of noise."""
    records, began = Records(), time.time()
    asked = unseen_scenes(subject.make, args.scenes, args.seed)
    for seed in range(args.noises):
        for image in drawn(subject, asked, seed):
            read_image(image, split_of(image.number), records, scored=pointed)
            if image.number % 10 == 9:
                done = f"seed {seed}, {image.number + 1} scenes, {time.time() - began:.0f} s"
                print(done, flush=True)
    return records


def entry_of(figures: Mapping[str, Any], split: str, kind: str, way: Way) -> Mapping[str, Any]:
    return figures[split][kind][DEFAULT if way == FORMER else way.name]


def chosen(figures: Mapping[str, Any], steps: int, layers: int) -> Way:
    """Return the cheapest way within the interval of the best in each kind's IoU and pointing, on
    the scenes for choosing; of those of one price the one with the best IoU at half of the
    range."""
    fits, split = list(WAYS), "for choosing"
    for kind, measure in product(KINDS, MEASURES):
        of = {way: entry_of(figures, split, kind, way)[measure] for way in WAYS}
        _, least, _ = max(of.values(), key=lambda known: known[0])
        fits = [way for way in fits if of[way][0] >= least]

    def order(way: Way) -> tuple[float, float]:
        at_half = [entry_of(figures, split, kind, way)["fixed"][0] for kind in KINDS]
        return way.price(steps, layers), -sum(at_half)

    return min(fits, key=order)


def table(figures: Mapping[str, Any], split: str, steps: int, layers: int) -> str:
    """Return the ways in Markdown, the cheapest first, each with its best power."""
    lines = ["| steps | spread along blocks | text of blocks | spreadings | power | price |"]
    for kind, told in product(KINDS, ("IoU, best threshold", "half of the range", "pointing")):
        lines[0] += f" {kind}: {told} |"
    lines.append("|" + "---|" * (6 + 6))
    structures = {(way.part, way.blocks, way.text, way.rounds) for way in WAYS}
    best = []
    for structure in structures:
        powers = [Way(*structure, power) for power in POWERS]
        best.append(
            max(
                powers,
                key=lambda way: sum(
                    entry_of(figures, "for choosing", kind, way)["fixed"][0] for kind in KINDS
                ),
            )
        )
    best.append(FORMER)
    for way in sorted(best, key=lambda way: (way.price(steps, layers), way.name)):
        cells = [way.part, way.blocks, way.text, str(way.rounds), f"{way.power:g}"]
        cells.append(f"{way.price(steps, layers):.3f}")
        for kind, measure in product(KINDS, ("iou", "fixed", "pointing")):
            mean, low, high = entry_of(figures, split, kind, way)[measure]
            cells.append(f"{mean:.3f} ± {max(mean - low, high - mean):.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-mmdit")
    parser.add_argument("--scenes", type=int, default=120)
    parser.add_argument("--noises", type=int, default=1, help="seeds of noise for each scene")
    parser.add_argument("--seed", type=int, default=2027, help="which unseen scenes")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    subject, began = subject_of(args.model, Path()), time.time()
    figures = measured(subject, args).figures()
    layers = len(find_denoiser(subject.pipe.transformer).layers)
    shape = subject.settings["num_inference_steps"], layers
    way = chosen(figures, *shape)
    parts = [f"{args.scenes} scenes (seed {args.seed}), {args.noises} seeds of noise each, "]
    parts[0] += f"{time.time() - began:.0f} s on {processor_name()}, torch {torch.__version__}.\n"
    parts.append(
        f"Chosen: {way.name} (steps, blocks spread along, blocks whose text, spreadings, power).\n"
    )
    for split in SPLITS:
        parts += [f"**Scenes {split}**\n", table(figures, split, *shape)]
    for kind, measure in product(KINDS, ("iou", "fixed", "pointing")):
        mean, low, high = entry_of(figures, "reported", kind, way)["ahead"][measure]
        parts.append(
            f"{kind}, {measure}: former minus chosen {mean:+.3f} ({low:+.3f} to {high:+.3f})"
        )
    text = "\n".join(parts) + "\n"
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tables.md").write_text(text)
    (args.out / "figures.json").write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
