"""Drawings of things with a name, cut out: a noun, a hand that drew it, colours and an outline.

``sprites.png`` holds them all, ``sprites.json`` says which is which, ``ATTRIBUTIONS.md`` whose
they are; ``make_sprites`` renders the three.
"""

from __future__ import annotations

import colorsys
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

HERE = Path(__file__).parent
SHEET, TABLE, ATTRIBUTIONS = HERE / "sprites.png", HERE / "sprites.json", HERE / "ATTRIBUTIONS.md"
SIDE = 96  # of a sprite in pixels

# Colours that an adjective can give a thing, as hue, saturation and value in [0, 1].
COLOURS = {
    "red": (0.99, 0.85, 0.88),
    "yellow": (0.14, 0.80, 0.98),
    "green": (0.35, 0.75, 0.68),
    "blue": (0.60, 0.80, 0.92),
    "purple": (0.77, 0.65, 0.72),
    "pink": (0.93, 0.42, 0.99),
}
# Nouns whose drawings have one colour that can be changed without making them something else.
COLOURABLE = ("car", "balloon", "umbrella", "heart", "book", "tulip", "bird", "star")
MOTLEY = {("umbrella", "emojione")}  # a drawing of many colours, which stays as it is
NEAR = 0.12  # hues so far from a drawing's own, of a circle of 1, change with it
LEAF = 0.3  # the hue of leaves
VIVID = 0.25  # saturation times value from which a pixel has a hue of its own

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Sprite:
    """One drawing: whose it is, under which licence; ``pixels`` uint8 [SIDE, SIDE, 4], RGBA."""

    noun: str
    set: str
    licence: str
    pixels: Pixels


@cache
def sprites() -> tuple[Sprite, ...]:
    """Return all drawings, in the order of the table."""
    told = json.loads(TABLE.read_text())
    with Image.open(SHEET) as image:
        sheet = np.asarray(image)
    found = []
    for index, row in enumerate(told["sprites"]):
        top, left = (SIDE * at for at in divmod(index, told["columns"]))
        pixels = sheet[top : top + SIDE, left : left + SIDE]
        found.append(Sprite(row["noun"], row["set"], row["licence"], pixels))
    return tuple(found)


@cache
def hands() -> dict[str, dict[str, Sprite]]:
    """Return each noun's drawings, by the set that they are from."""
    found: dict[str, dict[str, Sprite]] = {}
    for sprite in sprites():
        found.setdefault(sprite.noun, {})[sprite.set] = sprite
    return found


def nouns() -> tuple[str, ...]:
    """Return the nouns, in the order of the table."""
    return tuple(hands())


def colourable(noun: str) -> tuple[str, ...]:
    """Return the hands whose drawing of a noun can have another colour."""
    return tuple(
        hand for hand in hands()[noun] if noun in COLOURABLE and (noun, hand) not in MOTLEY
    )


@cache
def coloured(noun: str, hand: str, colour: str | None) -> Pixels:
    """Return a drawing in another colour, uint8 [SIDE, SIDE, 4]; None leaves it as it was drawn.

    Pixels near the drawing's own hue, the one that most of its vivid pixels have, take the new one.
    Saturation and value move by the ratio of the new colour's to the drawing's own, so highlights
    and shadows stay. Everything else, and the outline, stays too.

    Raises:
        ValueError: the drawing cannot have another colour.
    """
    sprite = hands()[noun][hand]
    if colour is None:
        return sprite.pixels
    if hand not in colourable(noun):
        can = ", ".join(f"{one} ({', '.join(colourable(one))})" for one in COLOURABLE)
        raise ValueError(f"The {noun} of {hand} cannot be made {colour}. Choose one of {can}.")
    hsv = _to_hsv(sprite.pixels[..., :3])
    vivid = (hsv[..., 1] * hsv[..., 2] > VIVID) & (sprite.pixels[..., 3] > 127)
    if noun == "tulip":  # its leaves are green, and often the larger part
        vivid &= _apart(hsv[..., 0], LEAF) > NEAR
    own = _main_hue(hsv[vivid])
    changed = (_apart(hsv[..., 0], own) < NEAR) & (hsv[..., 1] > 0.15)
    solid = changed & vivid
    hue, saturation, value = COLOURS[colour]
    ratio = [new / np.median(hsv[..., i][solid]) for i, new in ((1, saturation), (2, value))]
    new = np.stack(
        [np.full(hsv.shape[:2], hue), hsv[..., 1] * ratio[0], hsv[..., 2] * ratio[1]], -1
    )
    rgb = np.where(changed[..., None], _to_rgb(new.clip(0, 1)), sprite.pixels[..., :3])
    return np.concatenate([rgb, sprite.pixels[..., 3:]], axis=-1)


def colour_of(noun: str, pixels: Pixels) -> str | None:
    """Return the one of ``COLOURS`` that is nearest to the hue that most vivid pixels of a noun,
    uint8 [n, 3], have; None if hardly any is vivid."""
    hsv = _to_hsv(pixels)
    vivid = hsv[:, 1] * hsv[:, 2] > VIVID
    if vivid.mean() < 0.1:
        return None
    bloom = vivid & (_apart(hsv[:, 0], LEAF) > NEAR)
    if noun == "tulip" and bloom.sum() > 0.2 * vivid.sum():
        vivid = bloom
    hue = np.array(_main_hue(hsv[vivid]))
    return min(COLOURS, key=lambda name: float(_apart(hue, COLOURS[name][0])))


def _main_hue(hsv: NDArray[np.float64]) -> float:
    """Return the middle of the most weighty twelfth of the circle of hues, of pixels [n, 3]."""
    weight = hsv[:, 1] * hsv[:, 2]
    counts, edges = np.histogram(hsv[:, 0], bins=36, range=(0, 1), weights=weight)
    smooth = counts + np.roll(counts, 1) + np.roll(counts, -1)
    best = int(smooth.argmax())
    return float((edges[best] + edges[best + 1]) / 2)


def _apart(hue: NDArray[np.float64], other: float) -> NDArray[np.float64]:
    """Return the distance of hues on a circle of 1."""
    away = abs(hue - other)
    return np.minimum(away, 1 - away)


def _to_hsv(rgb: Pixels) -> NDArray[np.float64]:
    """Return hue, saturation and value in [0, 1] of RGB pixels."""
    flat = [colorsys.rgb_to_hsv(*one) for one in (rgb.reshape(-1, 3) / 255).tolist()]
    return np.array(flat).reshape(rgb.shape)


def _to_rgb(hsv: NDArray[np.float64]) -> Pixels:
    """Return RGB pixels of hue, saturation and value in [0, 1]."""
    flat = [colorsys.hsv_to_rgb(*one) for one in hsv.reshape(-1, 3).tolist()]
    return np.rint(255 * np.array(flat)).astype(np.uint8).reshape(hsv.shape)
