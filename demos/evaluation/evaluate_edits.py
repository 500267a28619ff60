"""Measure word swaps on a demo model: does the named object change, and nothing else?

Scenes of two objects that training never saw are drawn; those that the checker reads without a
mistake are edited by swapping one word, what an object is or its colour in turn. The same two
prompts are also drawn from the same noise with no control. For each way:

    changed    what stands nearest to the named object's old place is what was asked for
    kept       the other object is what it was, in its place, and nothing else is there
    both

    python -m demos.evaluation.evaluate_edits --checker build/checker/checker.safetensors
    python -m demos.evaluation.evaluate_edits --model demo-mmdit
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from sdattn.edit import edit
from sdattn.models import register, unregister
from sdattn.models.denoiser import find_denoiser
from sdattn.models.families import edits_of
from sdattn.models.pipeline_call import call_pipeline, images_of

from ..scene_checker import find_objects
from ..scenes import emoji, shapes, sprites
from ..sprite_checker import find_things, load_segmenter
from .seeing import Subject, accuracy_of, is_joint, machine, subject_of

BATCH = 10  # sources drawn at a time
# How far a centre may move, in parts of the image's side: of the object that is to be kept, and
# of the one that changes (a triangle's centre is not where the circle's was).
NEAR, FAR = 0.1, 0.25
WAYS = ("edited", "no control")
MEASURES = ("changed", "kept", "both")

Name = tuple[str, str | None]  # what a thing is, and its colour; None if nothing is said of it
Things = list[tuple[Name, tuple[float, float]]]  # with their centres (x, y), in fractions
Find = Callable[[Image.Image], Things]


@dataclass(frozen=True)
class Case:
    """A swap of one object's word, the ``kind`` of ``"noun"`` or ``"colour"``.

    Attributes:
        before, after: what the scene's two objects are called.
        index: of the object that changes.
    """

    before: tuple[Name, Name]
    after: tuple[Name, Name]
    index: int
    kind: str
    source: str
    target: str
    seed: int

    @property
    def word(self) -> str:
        """The word that is swapped."""
        noun, colour = self.before[self.index]
        return str(colour if self.kind == "colour" else noun)


def name_of(thing: emoji.Thing | shapes.SceneObject) -> Name:
    return (thing.noun if isinstance(thing, emoji.Thing) else thing.shape), thing.colour


def make_case(scene: Any, wording: int, seed: int, rng: np.random.Generator, kind: str) -> Case:
    """Swap the colour or the noun of one object for one that the scene does not have; the noun, if
    no object has a colour. A sprite with a colour stays one that can have it."""
    coloured = [i for i, thing in enumerate(scene.objects) if thing.colour]
    if not coloured:
        kind = "noun"
    index = int(rng.choice(coloured)) if kind == "colour" else int(rng.integers(2))
    here = scene.objects[index]
    is_sprite = isinstance(here, emoji.Thing)
    there = [name_of(thing) for thing in scene.objects]
    if kind == "colour":
        known = [*(sprites.COLOURS if is_sprite else shapes.COLOURS)]
        free = [one for one in known if one not in {colour for _, colour in there}]
        changed = replace(here, colour=str(rng.choice(free)))
    else:
        known = [*(sprites.COLOURABLE if here.colour else sprites.nouns())]
        free = [one for one in (known if is_sprite else shapes.SHAPES) if one not in dict(there)]
        changed = replace(here, **{"noun" if is_sprite else "shape": str(rng.choice(free))})
    objects = tuple(changed if i == index else thing for i, thing in enumerate(scene.objects))
    edited = replace(scene, objects=objects)
    source, target = scene.prompts()[wording], edited.prompts()[wording]
    before, after = (tuple(map(name_of, one.objects)) for one in (scene, edited))
    return Case(before, after, index, kind, source, target, seed)  # type: ignore[arg-type]


def finder(model: str, checker: Path) -> Find:
    """Return what finds the things in a demo model's image."""
    if is_joint(model):
        return lambda image: [((t.shape, t.colour), t.centre) for t in find_objects(image)]
    segmenter = load_segmenter(checker)
    return lambda image: [
        ((t.noun, t.colour), t.centre) for t in find_things(segmenter, [image])[0]
    ]


def right_sources(subject: Subject, count: int, args: argparse.Namespace) -> list[Case]:
    """Return swaps in scenes whose source image the checker reads without a mistake."""
    rng = np.random.default_rng(args.scene_seed)
    cases: list[Case] = []
    seed = args.seed
    tried = 0
    while len(cases) < count:
        scenes = [subject.make(rng, held_out=True, n_objects=2) for _ in range(BATCH)]
        scenes = [one for one in scenes if len({*map(name_of, one.objects)}) == 2]
        wordings = [int(rng.integers(len(scene.prompts()))) for scene in scenes]
        asked = [one.prompts()[i] for one, i in zip(scenes, wordings, strict=True)]
        images = drawn(subject, asked, range(seed, seed + len(asked)))
        for i, one in enumerate(subject.see(scenes, images)):
            is_right = one.objects and one.relation is not False and all(one.colours)
            if len(cases) < count and is_right:
                kind = ("colour", "noun")[len(cases) % 2]
                cases.append(make_case(scenes[i], wordings[i], seed + i, rng, kind))
        seed += BATCH
        tried += len(scenes)
    print(f"{count} right sources among the first {tried} drawn", flush=True)
    return cases


def edit_at(pipe: Any, depth: tuple[float, float]) -> None:
    """Have another part of the depth of this family's models take part in edits."""
    family, known = find_denoiser(pipe).family, edits_of(pipe)
    unregister(family)
    register(replace(family, edits=replace(known, depth=depth)))


def drawn(subject: Subject, prompts: list[str], seeds: Sequence[int]) -> list[Image.Image]:
    """Return the images of :func:`sdattn.generate`, without their heatmaps."""
    return images_of(call_pipeline(subject.pipe, prompts, seeds, subject.settings))


def fits(thing: Name, asked: Name) -> bool:
    """Check if a thing is what was asked for, in its colour if one was asked for."""
    return thing[0] == asked[0] and asked[1] in (None, thing[1])


def judge(case: Case, before: Things, after: Things) -> tuple[bool, bool]:
    """Return (changed, kept) of an edit."""

    def stands(index: int) -> tuple[bool, float]:
        """Tell if what is nearest to an object's old place is as asked, and how far off it is."""
        old = [centre for name, centre in before if fits(name, case.before[index])]
        if not old or not after:
            return False, math.inf
        away = [math.dist(old[0], centre) for _, centre in after]
        nearest = int(np.argmin(away))
        return fits(after[nearest][0], case.after[index]), away[nearest]

    (changed, moved), (kept, strayed) = stands(case.index), stands(1 - case.index)
    return changed and moved <= FAR, kept and strayed <= NEAR and len(after) == 2


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    z = 1.959964
    middle = (hits + z**2 / 2) / (n + z**2)
    half = z / (n + z**2) * math.sqrt(hits * (n - hits) / n + z**2 / 4)
    return middle - half, middle + half


def figures(verdicts: NDArray[np.bool_]) -> dict[str, dict[str, list[float]]]:
    """Return [share, low, high] by way and measure of verdicts [cases, ways, measures]."""
    found: dict[str, dict[str, list[float]]] = {}
    for way, name in enumerate(WAYS):
        hits, n = verdicts[:, way].sum(0).tolist(), len(verdicts)
        shares = [[one / n, *wilson(one, n)] for one in hits]
        found[name] = dict(zip(MEASURES, shares, strict=True))
    return found


def table(verdicts: NDArray[np.bool_], kinds: Sequence[str]) -> str:
    """Return the shares as a Markdown table, a row for each kind of swap."""
    heads = [f"{name}, {way}" for way in WAYS for name in MEASURES]
    lines = [f"| swap | n | {' | '.join(heads)} |", "|---|---" + "|---" * len(heads) + "|"]
    for kind in ("all", "noun", "colour"):
        some = verdicts[[kind in ("all", one) for one in kinds]]
        if len(some):
            shares = [one for way in figures(some).values() for one in way.values()]
            told = " | ".join(
                f"{share:.0%} ({low:.0%} to {high:.0%})" for share, low, high in shares
            )
            lines.append(f"| {kind} | {len(some)} | {told} |")
    return "\n".join(lines)


def sheet(rows: Sequence[Image.Image], wide: int = 10) -> Image.Image:
    """Return the cases' columns of images side by side, so many in a row."""
    width, height = rows[0].size
    whole = Image.new("RGB", (width * min(wide, len(rows)), height * -(-len(rows) // wide)))
    for i, one in enumerate(rows):
        whole.paste(one, (width * (i % wide), height * (i // wide)))
    return whole


def main(given: list[str] | None = None) -> None:
    """Read the options, measure, print a table and write figures and images: of each case the
    source, the edit, and the target with no control."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="demo, demo-mmdit, or a folder of one")
    parser.add_argument(
        "--checker", type=Path, default=Path("build/checker/checker.safetensors"), help="of sprites"
    )
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--scene-seed", type=int, default=77, help="which unseen scenes")
    parser.add_argument("--seed", type=int, default=5000, help="of the first image's noise")
    parser.add_argument("--cross", type=float, help="by default that of the model's family")
    parser.add_argument("--self", dest="self_steps", type=float, help="likewise")
    parser.add_argument("--depth", type=float, nargs=2, help="likewise: the layers that take part")
    parser.add_argument("--self-queries", type=int, help="see max_self_queries of edit()")
    parser.add_argument("--blend", action="store_true", help="blend on the word that is swapped")
    parser.add_argument("--out", type=Path, default=Path("outputs/edits.json"))
    args = parser.parse_args(given)
    torch.set_num_threads(1)
    subject, find = subject_of(args.model, args.checker), finder(args.model, args.checker)
    if args.depth:
        edit_at(subject.pipe, tuple(args.depth))
    cases = right_sources(subject, args.cases, args)
    began, verdicts, columns = time.time(), [], []
    for case in cases:
        run = edit(
            subject.pipe,
            case.source,
            case.target,
            seed=case.seed,
            mode="replace",
            cross_replace_steps=args.cross,
            self_replace_steps=args.self_steps,
            max_self_queries=args.self_queries,
            blend=[case.word] if args.blend else (),
        )
        images = [*run.images, *drawn(subject, [case.target], [case.seed])]
        before, *others = map(find, images)
        judged = [judge(case, before, after) for after in others]
        verdicts.append([(*one, all(one)) for one in judged])
        columns.append(Image.fromarray(np.vstack([np.asarray(one) for one in images])))
    kinds = [case.kind for case in cases]
    print(table(np.array(verdicts), kinds))
    print(f"{(time.time() - began) / len(cases):.2f} s a case")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "options": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "machine": machine(),
        "checker": accuracy_of(args.checker),
        "figures": figures(np.array(verdicts)),
        "cases": [
            {"source": case.source, "target": case.target, "seed": case.seed, "verdicts": found}
            for case, found in zip(cases, verdicts, strict=True)
        ],
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    sheet(columns).save(args.out.with_suffix(".png"))
    print(args.out)


if __name__ == "__main__":
    main()
