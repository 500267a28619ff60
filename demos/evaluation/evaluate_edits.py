"""Measure word swaps on a demo model: does the named object change, and nothing else?

Scenes of two objects that training never saw are drawn and edited by swapping one word, what an
object is or its colour in turn. The target is also drawn from the same noise with no control. A
checker that knows nothing of the model reads the images; where it reads the source without a
mistake, for each way:

    changed    what stands nearest to the named object's old place is what was asked for
    kept       the other object is what it was, in its place, and nothing else is there
    both

Each case is kept in ``--work`` as it ends; run again, the command goes on where it stopped.

    python -m demos.evaluation.evaluate_edits --checker build/checker/checker.safetensors
    python -m demos.evaluation.evaluate_edits --model demo-mmdit
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import sdattn
from sdattn.edit import edit
from sdattn.models import register, unregister
from sdattn.models.denoiser import find_denoiser
from sdattn.models.families import edits_of
from sdattn.models.pipeline_call import call_pipeline, images_of

from ..scene_checker import find_objects
from ..scenes import emoji, shapes, sprites
from ..scenes.shapes import DIRECTIONS, holds
from ..sprite_checker import find_things, load_segmenter
from .measures import wilson
from .records import claim
from .seeing import accuracy_of, is_joint, machine, own_settings

# How far a centre may move, in parts of the image's side: of the object that is to be kept, and
# of the one that changes (a triangle's centre is not where the circle's was).
NEAR, FAR = 0.1, 0.25
WAYS = ("edited", "no control")
MEASURES = ("changed", "kept", "both")

Name = tuple[str, str | None]  # what a thing is, and its colour; None if nothing is said of it
Things = list[tuple[Name, tuple[float, float]]]  # with their centres (x, y), in fractions
Find = Callable[[Image.Image], Things]
Images = tuple[Image.Image, Image.Image, Image.Image]


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
    relation: str | None
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
    return Case(before, after, index, kind, source, target, scene.relation, seed)  # type: ignore[arg-type]


def finder(model: str, checker: Path) -> Find:
    """Return what finds the things in a demo model's image."""
    if is_joint(model):
        return lambda image: [((t.shape, t.colour), t.centre) for t in find_objects(image)]
    segmenter = load_segmenter(checker)
    return lambda image: [
        ((t.noun, t.colour), t.centre) for t in find_things(segmenter, [image])[0]
    ]


def cases(make: Callable[..., Any], count: int, args: argparse.Namespace) -> list[Case]:
    """Return swaps in scenes that training never saw, in turn of a colour and of a noun."""
    rng = np.random.default_rng(args.scene_seed)
    found: list[Case] = []
    while len(found) < count:
        scene = make(rng, held_out=True, n_objects=2)
        # sprites have two nouns; shapes are told apart by their colours
        if len({getattr(thing, "noun", thing.colour) for thing in scene.objects}) == 2:
            kind = ("colour", "noun")[len(found) % 2]
            wording = int(rng.integers(len(scene.prompts())))
            found.append(make_case(scene, wording, args.seed + len(found), rng, kind))
    return found


def images(pipe: Any, case: Case, number: int, args: argparse.Namespace) -> Images:
    """Return a case's source, its edit, and the target with no control; keep them in a file."""
    path = args.work / f"{number}.png"
    if not path.exists():
        run = edit(
            pipe,
            case.source,
            case.target,
            seed=case.seed,
            mode="replace",
            cross_replace_steps=args.cross,
            self_replace_steps=args.self_steps,
            max_self_queries=args.self_queries,
            blend=[case.word] if args.blend else (),
        )
        settings = own_settings(args.model)
        plain = images_of(call_pipeline(pipe, [case.target], [case.seed], settings))
        made = [np.asarray(one.convert("RGB")) for one in (*run.images, *plain)]
        Image.fromarray(np.vstack(made)).save(path)
    with Image.open(path) as column:
        parts = np.split(np.asarray(column.convert("RGB")), 3)
    source, edited, plain = map(Image.fromarray, parts)
    return source, edited, plain


def is_right(case: Case, found: Things) -> bool:
    """Tell if just the source's objects are there, as was asked, in their relation."""
    there = [[centre for name, centre in found if fits(name, asked)] for asked in case.before]
    if len(found) != 2 or any(len(one) != 1 for one in there):
        return False
    return case.relation not in DIRECTIONS or holds(case.relation, there[0][0], there[1][0])


def edit_at(pipe: Any, depth: tuple[float, float]) -> None:
    """Have another part of the depth of this family's models take part in edits."""
    family, known = find_denoiser(pipe).family, edits_of(pipe)
    unregister(family)
    register(replace(family, edits=replace(known, depth=depth)))


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
    parser.add_argument("--cases", type=int, default=70)
    parser.add_argument("--scene-seed", type=int, default=77, help="which unseen scenes")
    parser.add_argument("--seed", type=int, default=5000, help="of the first image's noise")
    parser.add_argument("--cross", type=float, help="by default that of the model's family")
    parser.add_argument("--self", dest="self_steps", type=float, help="likewise")
    parser.add_argument("--depth", type=float, nargs=2, help="likewise: the layers that take part")
    parser.add_argument("--self-queries", type=int, help="see max_self_queries of edit()")
    parser.add_argument("--blend", action="store_true", help="blend on the word that is swapped")
    parser.add_argument("--work", type=Path, default=Path("build/edits"), help="finished cases")
    args = parser.parse_args(given)
    later = ("work", "cases", "checker")  # may differ when it goes on
    claim(args.work, {name: value for name, value in vars(args).items() if name not in later})
    torch.set_num_threads(1)
    pipe: Any = sdattn.load_pipeline(args.model, device="cpu", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if args.depth:
        edit_at(pipe, tuple(args.depth))
    make = shapes.random_scene if is_joint(args.model) else emoji.random_scene
    asked = cases(make, args.cases, args)
    made = []
    for number, case in enumerate(asked):
        made.append(images(pipe, case, number, args))
        print(number, case.source, "->", case.target, flush=True)
    find = finder(args.model, args.checker)
    verdicts, kinds, columns, told = [], [], [], []
    for case, (source, *others) in zip(asked, made, strict=True):
        before = find(source)
        if not is_right(case, before):
            continue
        judged = [judge(case, before, find(after)) for after in others]
        verdicts.append([(*one, all(one)) for one in judged])
        kinds.append(case.kind)
        columns.append(Image.fromarray(np.vstack([np.asarray(i) for i in (source, *others)])))
        told.append({"source": case.source, "target": case.target, "seed": case.seed})
    print(f"{len(verdicts)} of {len(asked)} sources are as asked")
    print(table(np.array(verdicts), kinds))
    report = {
        "machine": machine(),
        "checker": accuracy_of(args.checker),
        "figures": figures(np.array(verdicts)),
        "cases": [{**one, "verdicts": found} for one, found in zip(told, verdicts, strict=True)],
    }
    (args.work / "figures.json").write_text(json.dumps(report, indent=1) + "\n")
    sheet(columns).save(args.work / "sheet.png")
    print(args.work)


if __name__ == "__main__":
    main()
