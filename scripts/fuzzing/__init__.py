"""Faults at random, with a seed: what was harmed, and whether sdattn found it and said so.

    world = World(folder)                 what cases are tried on, made once
    missed = try_case(world, seed, 17)    case 17 of this seed: None, or what was not found

A kind of case is a function of the world and of chance that harms a copy of something and returns
None where the harm was found, else a sentence. To add one, decorate it with :func:`kind` and import
its module at the end of this one.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from uuid import uuid4

from sdattn.batch.formats import FORMATS

PROMPTS = ("a red car", "a star", "green")


class World:
    """What the cases of one process are tried on.

    Args:
        root: an empty folder; whatever is made lies there.
    """

    def __init__(self, root: Path):
        self.root = root

    def new_folder(self) -> Path:
        """An empty folder, for one case; it may be removed afterwards."""
        folder = self.root / uuid4().hex
        folder.mkdir(parents=True)
        return folder

    @cached_property
    def runs(self) -> dict[str, Path]:
        """A finished batch run of each format, with an unreadable line: format to folder."""
        return {name: self.draw(self.root / "runs" / name, name) for name in FORMATS}

    def draw(self, out: Path, format: str, **more) -> Path:
        """Draw the batch that cases are about, or what of it is missing."""
        self.root.mkdir(parents=True, exist_ok=True)
        source = self.root / "prompts.jsonl"
        lines = [*(f'{{"prompt": "{one}"}}' for one in PROMPTS), '{"prompt": 5}']
        source.write_text("\n".join(lines) + "\n")
        return draw(source, out, format, **more)


def draw(source: Path, out: Path, format: str, **more) -> Path:
    from sdattn.batch import Request, run_batch
    from sdattn.runs.parts import PARTS

    options = {"num_inference_steps": 1}
    of_images = [part for part in PARTS if part != "video"]
    more = {"save": of_images, "options": options, "batch_size": 2, "device": "cpu", **more}
    outcome = run_batch(Request(source, out, format=format, shard_items=2, **more))
    if outcome.whole != len(PROMPTS):
        raise RuntimeError(f"only {outcome.whole} of {len(PROMPTS)} items are whole")
    return out


Case = Callable[[World, random.Random], str | None]


@dataclass(frozen=True)
class Kind:
    """A kind of case: its name, how many of a hundred cases it has about, and what it does."""

    name: str
    share: int
    case: Case


KINDS: list[Kind] = []


def kind(name: str, share: int) -> Callable[[Case], Case]:
    """Add a kind of case."""

    def add(case: Case) -> Case:
        KINDS.append(Kind(name, share, case))
        return case

    return add


def choose(seed: int, number: int) -> tuple[Kind, random.Random]:
    """The kind of a case, and the chance that it goes on with."""
    chance = random.Random(f"{seed}-{number}")
    return chance.choices(KINDS, [one.share for one in KINDS])[0], chance


def try_case(world: World, seed: int, number: int) -> str | None:
    """Try one case; returns what was not found, with how to try it again."""
    chosen, chance = choose(seed, number)
    missed = chosen.case(world, chance)
    again = f"scripts/fuzz --seed {seed} --case {number}"
    return None if missed is None else f"{chosen.name}: {missed} (again: {again})"


from . import batches, models, weights  # noqa: E402, F401  the kinds, which need what is above
