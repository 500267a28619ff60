"""Say which things are where in an image of sprites, drawn or generated.

- ``Segmenter`` names each cell of an image; ``train_sprite_checker`` trains one on drawn scenes.
- ``find_things`` makes objects of that; ``asked_for`` compares them with a scene.
- ``confusion`` and ``overlap`` measure the segmenter itself, for every figure that depends on it.

It knows nothing of the model that made an image, nor of what was asked for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from sdattn.maps.masks import components

from .scenes.emoji import Scene
from .scenes.shapes import holds
from .scenes.sprites import colour_of, nouns

SIDE, CELLS = 128, 64  # pixels and named cells in a row
WIDTHS = (24, 48, 96, 128)
LEAST = 0.01  # part of the image that counts as an object
SHARE = 0.3  # of an outline that a second noun must have to be an object of its own

Mask = NDArray[np.bool_]
Labels = NDArray[np.int64]


class Segmenter(nn.Module):
    """A small U-Net (Ronneberger et al. 2015): half the image's side, a score for each noun and,
    last, for the background."""

    def __init__(self) -> None:
        super().__init__()
        down = zip((3, *WIDTHS), WIDTHS, strict=False)
        self.down = nn.ModuleList(_block(before, after, 2) for before, after in down)
        up = zip(WIDTHS[:0:-1], WIDTHS[-2::-1], strict=True)
        self.up = nn.ModuleList(_block(below + beside, beside, 1) for below, beside in up)
        self.name = nn.Conv2d(WIDTHS[0], len(nouns()) + 1, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Images [batch, 3, H, W] from -1 to 1 to scores [batch, nouns + 1, H / 2, W / 2]."""
        levels = [pixels]
        for block in self.down:
            levels.append(block(levels[-1]))
        hidden = levels.pop()
        for block in self.up:
            wide = F.interpolate(hidden, scale_factor=2)
            hidden = block(torch.cat([wide, levels.pop()], dim=1))
        return self.name(hidden)


def _block(before: int, after: int, stride: int) -> nn.Sequential:
    """Return two convolutions with their norms, the first with a stride."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1),
        nn.GroupNorm(8, after),
        nn.SiLU(),
        nn.Conv2d(after, after, 3, padding=1),
        nn.GroupNorm(8, after),
        nn.SiLU(),
    )


def load_segmenter(path: Path) -> Segmenter:
    """Return the segmenter whose weights a file has."""
    segmenter = Segmenter()
    segmenter.load_state_dict(load_file(path))
    return segmenter.eval()


def true_labels(scene: Scene) -> Labels:
    """Return the noun's index in each cell of a scene, int64 [CELLS, CELLS]; the number of nouns
    for the background."""
    fine = scene.covers(SIDE).reshape(-1, CELLS, SIDE // CELLS, CELLS, SIDE // CELLS)
    covers = fine.mean((2, 4))
    which = [nouns().index(thing.noun) for thing in scene.objects] + [len(nouns())]
    return np.array(which)[np.concatenate([covers, 1 - covers.sum(0, keepdims=True)]).argmax(0)]


@torch.no_grad()
def labels(segmenter: Segmenter, images: list[Image.Image]) -> Labels:
    """Return the index of the likeliest noun in each cell, int64 [images, CELLS, CELLS]."""
    small = [np.asarray(one.convert("RGB").resize((SIDE, SIDE))) for one in images]
    pixels = torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).float() / 127.5 - 1
    weights = next(segmenter.parameters(), pixels)
    parts = pixels.to(weights.device).split(16)
    return torch.cat([segmenter(part).argmax(1).cpu() for part in parts]).numpy()


@dataclass(frozen=True)
class Found:
    """What the checker saw.

    Attributes:
        noun: what it is.
        colour: nearest of ``COLOURS`` to its main hue; None if hardly any of it is vivid.
        centre: (x, y) in fractions.
        mask: bool [CELLS, CELLS].
    """

    noun: str
    colour: str | None
    centre: tuple[float, float]
    mask: Mask


def find_things(segmenter: Segmenter, images: list[Image.Image]) -> list[list[Found]]:
    """Return the objects in each image, biggest first.

    A patch of cells that are not background is one object of the noun that most of its cells have;
    of two, if another noun has its ``SHARE``. Patches below ``LEAST`` are no objects.
    """
    found = []
    for image, named in zip(images, labels(segmenter, images), strict=True):
        things = []
        patches = components(torch.from_numpy(named != len(nouns()))).numpy()
        for number in range(1, patches.max() + 1):
            patch = patches == number
            counts = Counter(named[patch].tolist()).most_common()
            own = [index for index, n in counts if n >= SHARE * patch.sum()] or [counts[0][0]]
            for index in own:
                mask = patch if len(own) == 1 else patch & (named == index)
                if mask.mean() >= LEAST:
                    things.append(_found(image, nouns()[index], mask))
        found.append(sorted(things, key=lambda thing: -int(thing.mask.sum())))
    return found


def _found(image: Image.Image, noun: str, mask: Mask) -> Found:
    """Return a patch as an object, with its colour and its place."""
    rows, columns = np.nonzero(mask)
    centre = (float((columns.mean() + 0.5) / CELLS), float((rows.mean() + 0.5) / CELLS))
    pixels = np.asarray(image.convert("RGB").resize((CELLS, CELLS), Image.Resampling.BOX))[mask]
    return Found(noun, colour_of(noun, pixels), centre, mask)


@dataclass(frozen=True)
class Verdict:
    """How far an image is what was asked for.

    Attributes:
        objects: just the nouns that were asked for, each once.
        relation: the objects stand as asked; None if they are not there, or no relation was asked.
        colours: for each object with an adjective, in order, if it has that colour; empty if the
            objects are not there.
        found: the objects in the scene's order; empty if they are not there.
    """

    objects: bool
    relation: bool | None
    colours: tuple[bool, ...]
    found: tuple[Found, ...]


def asked_for(scene: Scene, found: list[Found]) -> Verdict:
    """Return how the things that were found compare with a scene."""
    expected = [thing.noun for thing in scene.objects]
    there = {thing.noun: thing for thing in found}
    if sorted(expected) != sorted(thing.noun for thing in found):
        return Verdict(False, None, (), ())
    things = tuple(there[noun] for noun in expected)
    stands = None
    if scene.relation not in (None, "and"):
        stands = holds(scene.relation, *(thing.centre for thing in things))
    pairs = zip(scene.objects, things, strict=True)
    colours = tuple(one.colour == thing.colour for thing, one in pairs if thing.colour)
    return Verdict(True, stands, colours, things)


def confusion(truth: Labels, seen: Labels) -> NDArray[np.int64]:
    """Return how many cells of each noun, in rows, are taken for each, in columns; the background
    comes last."""
    count = len(nouns()) + 1
    return np.bincount(truth.ravel() * count + seen.ravel(), minlength=count**2).reshape(count, -1)


def overlap(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the intersection over union of each noun, and of the background, in a confusion."""
    both = np.diag(counts)
    return both / np.maximum(counts.sum(0) + counts.sum(1) - both, 1)
