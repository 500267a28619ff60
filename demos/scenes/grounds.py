"""What scenes of sprites stand on: grass, a beach, the night, snow, plain colours.

``draw_ground(name, size, rng)`` makes one; all of it, whatever its parts, is the background.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

PLAIN = {
    "white": (250, 250, 250),
    "gray": (190, 194, 200),
    "blue": (90, 150, 235),
    "green": (120, 200, 130),
    "yellow": (250, 225, 120),
    "pink": (250, 185, 205),
}
DEFAULT = "gray"  # what a prompt that names no background means
GRASS = ((118, 176, 84), (94, 152, 66), (140, 194, 100))  # ground, darker and lighter blades
SKY, SEA, SAND = (168, 214, 240), (66, 156, 200), (236, 212, 156)
NIGHT = ((14, 18, 52), (40, 44, 98), (250, 246, 210))  # top, bottom, stars
SNOW = ((206, 222, 238), (184, 204, 226), (252, 253, 255))  # ground, its dents, flakes

Image = NDArray[np.float64]


def draw_ground(name: str, size: int, rng: np.random.Generator) -> Image:
    """Return a background, float64 [size, size, 3] in [0, 255].

    Raises:
        ValueError: there is no background of that name.
    """
    if name in PLAIN:
        return np.full((size, size, 3), PLAIN[name], dtype=np.float64)
    if name in PLACES:
        return PLACES[name](size, rng)
    known = ", ".join([*PLAIN, *PLACES])
    raise ValueError(f"No background is called {name!r}. Choose one of {known}.")


def _grass(size: int, rng: np.random.Generator) -> Image:
    """Return a meadow from above: tufts of three short blades, darker or lighter."""
    ground = np.full((size, size, 3), GRASS[0], dtype=np.float64)
    for dark in (1, 2):
        for x, y in rng.uniform(0, 1, (6, 2)).tolist():
            for lean in (-1, 0, 1):
                _stroke(ground, (x, y), (x + 0.028 * lean, y - 0.06), 0.008, GRASS[dark])
    return ground


def _beach(size: int, rng: np.random.Generator) -> Image:
    """Return sky, sea and sand, one above the other, with a wavy shore."""
    x, y = _centres(size)
    horizon, shore = rng.uniform(0.16, 0.26), rng.uniform(0.38, 0.5)
    wave = 0.015 * np.sin(2 * np.pi * (2 * x + rng.random()))
    sea = _below(y, horizon, size)[..., None]
    sand = _below(y, shore + wave, size)[..., None]
    coast = SKY + sea * (np.array(SEA) - SKY)
    return coast + sand * (np.array(SAND) - coast)


def _night(size: int, rng: np.random.Generator) -> Image:
    """Return a dark sky that is lighter below, with small stars."""
    _, y = _centres(size)
    sky = np.array(NIGHT[0]) + y[..., None] * (np.array(NIGHT[1]) - NIGHT[0])
    for x, y in rng.uniform(0.02, 0.98, (9, 2)).tolist():
        _stroke(sky, (x, y), (x, y), rng.uniform(0.008, 0.014), NIGHT[2])
    return sky


def _snow(size: int, rng: np.random.Generator) -> Image:
    """Return snow that lies and falls: soft waves and white flakes."""
    x, y = _centres(size)
    wave = 0.5 + 0.5 * np.sin(2 * np.pi * (2 * y + 0.25 * np.sin(2 * np.pi * (x + rng.random()))))
    snow = np.array(SNOW[0]) + wave[..., None] * (np.array(SNOW[1]) - SNOW[0])
    for x, y in rng.uniform(0.02, 0.98, (9, 2)).tolist():
        _stroke(snow, (x, y), (x, y), rng.uniform(0.012, 0.022), SNOW[2])
    return snow


PLACES: dict[str, Callable[[int, np.random.Generator], Image]] = {
    "grass": _grass,
    "beach": _beach,
    "night": _night,
    "snow": _snow,
}
GROUNDS = (*PLAIN, *PLACES)


def _centres(size: int) -> tuple[Image, Image]:
    """Return x and y of each pixel's centre, in fractions of the side."""
    at = (np.arange(size) + 0.5) / size
    y, x = np.meshgrid(at, at, indexing="ij")
    return x, y


def _below(y: Image, line: float | Image, size: int) -> Image:
    """Return how much of each pixel is below a line, in [0, 1]."""
    return np.clip((y - line) * size + 0.5, 0, 1)


def _stroke(
    image: Image,
    start: tuple[float, float],
    end: tuple[float, float],
    radius: float,
    colour: tuple[int, int, int],
) -> None:
    """Draw a stroke with round ends, soft for one pixel, from one (x, y) to another."""
    size, reach = len(image), radius + 2 / len(image)
    rows, cols = (
        slice(
            max(0, int((min(start[axis], end[axis]) - reach) * size)),
            max(0, int((max(start[axis], end[axis]) + reach) * size) + 1),
        )
        for axis in (1, 0)
    )
    part = image[rows, cols]
    y, x = ((np.arange(size)[cut] + 0.5) / size for cut in (rows, cols))
    to_x, to_y = x[None] - start[0], y[:, None] - start[1]
    way_x, way_y = end[0] - start[0], end[1] - start[1]
    length = max(way_x**2 + way_y**2, 1e-12)  # a dot ends where it starts
    along = np.clip((to_x * way_x + to_y * way_y) / length, 0, 1)
    distance = np.hypot(to_x - along * way_x, to_y - along * way_y)
    cover = np.clip((radius - distance) * size + 0.5, 0, 1)[..., None]
    part += cover * (np.array(colour) - part)
