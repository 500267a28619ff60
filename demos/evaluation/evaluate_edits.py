"""Measure word swaps on a demo model: does the named object change, and nothing else?

Scenes of two objects that training never saw are drawn; those that the checker reads without a
mistake are edited by swapping one word, a shape or a colour in turn. The same two prompts are also
drawn from the same noise with no control. For each way:

    changed    what stands nearest to the named object's old place is what was asked for
    kept       the other object has kept its colour, its shape and its place
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import sdattn
from sdattn.edit import edit
from sdattn.models import register, unregister
from sdattn.models.demos import demo_settings
from sdattn.models.denoiser import find_denoiser
from sdattn.models.families import edits_of
from sdattn.models.pipeline_call import call_pipeline, images_of

from ..scene_checker import Found, find_objects, match
from ..scenes.shapes import COLOURS, SHAPES, Scene, random_scene

BATCH = 10  # sources drawn at a time
# How far a centre may move, in parts of the image's side: of the object that is to be kept, and
# of the one that changes (a triangle's centre is not where the circle's was).
NEAR, FAR = 0.1, 0.25


@dataclass(frozen=True)
class Case:
    """A swap: ``scene`` becomes ``edited`` by changing ``kind`` of the object at ``index``."""

    scene: Scene
    edited: Scene
    index: int
    kind: str
    source: str
    target: str
    seed: int


def make_case(scene: Scene, wording: int, seed: int, rng: np.random.Generator, kind: str) -> Case:
    """Swap the colour or the shape of one object for one that the scene does not have."""
    index = int(rng.integers(2))
    here = scene.objects[index]
    if kind == "colour":
        free = [name for name in COLOURS if name not in {thing.colour for thing in scene.objects}]
        changed = replace(here, colour=free[int(rng.integers(len(free)))])
    else:
        free = [name for name in SHAPES if name not in {thing.shape for thing in scene.objects}]
        changed = replace(here, shape=free[int(rng.integers(len(free)))])
    objects = tuple(changed if i == index else thing for i, thing in enumerate(scene.objects))
    edited = replace(scene, objects=objects)
    source, target = scene.prompts()[wording], edited.prompts()[wording]
    return Case(scene, edited, index, kind, source, target, seed)


def right_sources(pipe: Any, count: int, args: argparse.Namespace) -> list[Case]:
    """Cases whose source image the checker reads without a mistake."""
    rng = np.random.default_rng(args.scene_seed)
    cases: list[Case] = []
    seed = args.seed
    tried = 0
    while len(cases) < count:
        scenes = [random_scene(rng, held_out=True, n_objects=2) for _ in range(BATCH)]
        scenes = [one for one in scenes if len({thing.colour for thing in one.objects}) == 2]
        wordings = [int(rng.integers(len(scene.prompts()))) for scene in scenes]
        asked = [one.prompts()[i] for one, i in zip(scenes, wordings, strict=True)]
        images = drawn(pipe, asked, range(seed, seed + len(asked)))
        for i, (scene, image) in enumerate(zip(scenes, images, strict=True)):
            if len(cases) < count and places(scene, image) is not None:
                kind = ("colour", "shape")[len(cases) % 2]
                cases.append(make_case(scene, wordings[i], seed + i, rng, kind))
        seed += BATCH
        tried += len(scenes)
    print(f"{count} right sources among the first {tried} drawn", flush=True)
    return cases


def edit_at(pipe: Any, depth: tuple[float, float]) -> None:
    """Have another part of the depth of this family's models take part in edits."""
    family, known = find_denoiser(pipe).family, edits_of(pipe)
    unregister(family)
    register(replace(family, edits=replace(known, depth=depth)))


def drawn(pipe: Any, prompts: list[str], seeds: Sequence[int]) -> list[Image.Image]:
    """The images of :func:`sdattn.generate`, without their heatmaps."""
    return images_of(call_pipeline(pipe, prompts, seeds, demo_settings(pipe)))


def places(scene: Scene, image: Image.Image) -> tuple[Found, ...] | None:
    """The scene's objects in an image that shows exactly them; None if it does not."""
    found = find_objects(image)
    seen = Counter((thing.colour, thing.shape) for thing in found)
    expected = Counter((thing.colour, thing.shape) for thing in scene.objects)
    return match(scene, found) if seen == expected else None


def judge(case: Case, before: Image.Image, after: Image.Image) -> tuple[bool, bool]:
    """(changed, kept) of an edit."""
    there = places(case.scene, before)
    found = find_objects(after)
    if there is None or not found:
        return False, False

    def stands(index: int) -> tuple[bool, float]:
        """Whether what is nearest to an object's old place is as asked, and how far off."""
        old, expected = there[index].centre, case.edited.objects[index]
        away = [float(np.hypot(*np.subtract(thing.centre, old))) for thing in found]
        nearest = found[int(np.argmin(away))]
        return (nearest.colour, nearest.shape) == (expected.colour, expected.shape), min(away)

    (changed, moved), (kept, strayed) = stands(case.index), stands(1 - case.index)
    return changed and moved <= FAR, kept and strayed <= NEAR


def main() -> None:
    """Read the options, measure, print a table and write figures and images."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-mmdit", help="demo, demo-mmdit, or a folder")
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--scene-seed", type=int, default=77, help="which unseen scenes")
    parser.add_argument("--seed", type=int, default=5000, help="of the first image's noise")
    parser.add_argument("--cross", type=float, help="by default that of the model's family")
    parser.add_argument("--self", dest="self_steps", type=float, help="likewise")
    parser.add_argument("--depth", type=float, nargs=2, help="likewise: the layers that take part")
    parser.add_argument("--self-queries", type=int, help="see max_self_queries of edit()")
    parser.add_argument("--blend", action="store_true", help="blend on the word that is swapped")
    parser.add_argument("--out", type=Path, default=Path("outputs/edits.json"))
    args = parser.parse_args()
    pipe = sdattn.load_pipeline(args.model)
    pipe.set_progress_bar_config(disable=True)
    if args.depth:
        edit_at(pipe, tuple(args.depth))
    cases = right_sources(pipe, args.cases, args)
    began, verdicts, rows = time.time(), [], []
    for case in cases:
        word = getattr(case.scene.objects[case.index], case.kind)
        run = edit(
            pipe,
            case.source,
            case.target,
            seed=case.seed,
            mode="replace",
            cross_replace_steps=args.cross,
            self_replace_steps=args.self_steps,
            max_self_queries=args.self_queries,
            blend=[word] if args.blend else (),
        )
        [plain] = drawn(pipe, [case.target], [case.seed])
        before, after = run.images
        verdicts.append((case.kind, *judge(case, before, after), *judge(case, before, plain)))
        rows.append(np.vstack([np.asarray(one) for one in (before, after, plain)]))
    figures = {}
    print(f"{'':8}{'n':>4}{'changed':>9}{'kept':>8}   no control:{'changed':>9}{'kept':>8}")
    for kind in ("all", "colour", "shape"):
        some = np.array([one[1:] for one in verdicts if kind in ("all", one[0])])
        figures[kind] = [float(share) for share in some.mean(0)]
        edited = "{:>9.0%}{:>8.0%}".format(*figures[kind][:2])
        plainly = "{:>9.0%}{:>8.0%}".format(*figures[kind][2:])
        print(f"{kind:8}{len(some):4}{edited}   {'':11}{plainly}")
    print(f"{(time.time() - began) / len(cases):.2f} s a case")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    options = {name: str(value) for name, value in vars(args).items()}
    prompts = [
        [case.source, case.target, *map(bool, v[1:])]
        for case, v in zip(cases, verdicts, strict=True)
    ]
    report = {"options": options, "figures": figures, "cases": prompts}
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    wide = 10
    sheet = [np.hstack(rows[i : i + wide]) for i in range(0, len(rows) - wide + 1, wide)]
    if sheet:
        Image.fromarray(np.vstack(sheet)).save(args.out.with_suffix(".png"))
    print(args.out)


if __name__ == "__main__":
    main()
