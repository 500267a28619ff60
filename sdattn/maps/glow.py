"""Heat over an image: where a word looked glows, and the rest of the image is dark and grey.

`overlay` is the only way in which maps are drawn over images; `heat.js` does the same on a page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from PIL import Image, ImageColor

from ..errors import OptionError, refuse
from ..files.images import AnyImage, as_image
from .render import COLORMAP, check_proportions, color_table, normalised

if TYPE_CHECKING:
    from torch import Tensor

Scale = Literal["own", "shared"] | tuple[float, float]
Style = Literal["heat", "spotlight"]
STYLES: tuple[Style, ...] = ("heat", "spotlight")

OPACITY = 0.85  # at the highest value
BRIGHTNESS = 1 / 3  # of the image, where no word looked
LUMA = (0.2126, 0.7152, 0.0722)  # of red, green and blue: Rec. 709, as browsers' grayscale()
FADE = 1 / 3  # below this place on the scale colours fade to none
# Saturated, with a CIELAB chroma over 50, and told apart by colour-blind people: for protanopia and
# deuteranopia (Machado et al. 2009) any two are 30 apart in CIELAB, the first three 60.
WORD_COLORS = ("#ff8000", "#2f8bff", "#00ffe1", "#e13c5a", "#b4ff96", "#c33c96", "#ffff00")
OUTLINE = 256  # an outline is a pixel wide in an image of so many, two in twice as many


class Drawn(Protocol):
    """A map with its scale, as :class:`sdattn.Heatmap` has them."""

    @property
    def values(self) -> Tensor: ...

    def scale(self, kind: Scale = ...) -> tuple[float, float]: ...


def own_scale(peak: float, top: float, ground: float = 0.0) -> tuple[float, float]:
    """Return the (lowest, highest) value of a word's own colour scale: its peak gets the place
    ``sqrt(peak / top)`` on it, at most 1, so that a word weaker than the strongest, whose peak is
    ``top``, stays darker, but is seen. At or below ``ground`` the image is bare."""
    share = min(1.0, peak / top) if peak > 0 and top > 0 else 1.0
    return ground, ground + (peak - ground) / math.sqrt(share)


def overlay(
    image: AnyImage,
    maps: Sequence[Drawn],
    *,
    scale: Scale = "own",
    style: Style = "heat",
    cmap: str = COLORMAP,
    alpha: float = OPACITY,
    colors: Sequence[str] | None = None,
) -> Image.Image:
    """Draw the heat of one or several maps over their image, darkened and in grey.

    One map has a colormap's colours, from dark to bright. Several have a colour each, bright where
    they are high, and a light outline at half their peak; where two overlap, the higher prevails.

    With places ``p`` on the words' scales, in [0, 1], ``m`` the highest of them, ``C`` the colour
    for a place (a colormap's, or a word's own times ``sqrt(p)``), ``g`` a third of the image's luma
    and ``a = alpha min(1, 3 m)``, a pixel is ``(1 - a m) g + a sum(p² C) / sum(p²)``: the higher a
    value, the brighter, on light and dark images. Spotlight: ``(1 - alpha m) g + alpha m image``.

    Args:
        image: a PIL image, an array, or a file's path; its size is the result's.
        maps: maps of one image, such as :class:`sdattn.Heatmap`, resized to it bilinearly.
        scale: ``"own"``: each from 0 to its peak, dimmed as :func:`own_scale` does; ``"shared"``:
            all from 0 to ``top``, the strongest content word's peak; or (lowest, highest) value.
        style: ``"heat"``, or ``"spotlight"``: the image in its colours where a word looked.
        cmap: name of a matplotlib colormap, for a single map without ``colors``.
        alpha: opacity at the highest value, in [0, 1].
        colors: a colour for each map, as ``"#ff8000"`` (default for several: :data:`WORD_COLORS`).

    Returns:
        RGB.

    Raises:
        ValueError: a map is not in the image's proportions or not finite; an option out of range,
            or fewer colours than maps.
    """
    if style not in STYLES:
        raise OptionError("style", style, " or ".join(map(repr, STYLES)))
    if not 0 <= alpha <= 1:
        raise refuse("alpha", alpha, "a number from 0 to 1")
    if colors is None and len(maps) > 1:
        colors = WORD_COLORS
    if colors is not None and len(colors) < len(maps):
        raise refuse("colors", tuple(colors), f"a colour for each of {len(maps)} maps")
    base = as_image(image).convert("RGB")
    places = []
    for heatmap in maps:
        check_proportions(base, tuple(heatmap.values.shape))
        values = normalised(heatmap.values.detach().numpy(), heatmap.scale(scale))
        # resized before it is coloured: resizing would mix colours
        places.append(Image.fromarray(values).resize(base.size, Image.Resampling.BILINEAR))
    if not places:
        places.append(Image.new("F", base.size))
    all_places = np.stack([np.asarray(place) for place in places])  # [words, height, width]
    tints = None if colors is None else np.array([*map(ImageColor.getrgb, colors)], np.float32)
    return Image.fromarray(glow(np.asarray(base), all_places, tints, style, cmap, alpha))


def glow(
    pixels: np.ndarray,
    places: np.ndarray,
    tints: np.ndarray | None,
    style: Style,
    cmap: str,
    alpha: float,
) -> np.ndarray:
    """Colour an image's pixels, uint8 ``[height, width, 3]``, by places on the words' scales,
    float32 ``[words, height, width]`` in [0, 1], as :func:`overlay` says. ``tints`` are the words'
    colours, ``[words, 3]``, or None for the colormap."""
    highest = places.max(0)[..., None]  # [height, width, 1]
    grey = (pixels @ np.array(LUMA, np.float32))[..., None] * np.float32(BRIGHTNESS)
    if style == "spotlight":
        made = grey + alpha * highest * (pixels - grey)
    else:
        seen = alpha * np.minimum(1, highest / FADE)
        made = grey + seen * (_colours(places, tints, cmap) - highest * grey)
    if tints is not None:
        for place, tint in zip(places, tints, strict=False):
            edge = _outline(place)
            made[edge] += place.max() * ((tint + 255) / 2 - made[edge])  # a weak word's is weak
    return np.rint(made.clip(0, 255)).astype(np.uint8)


def _colours(places: np.ndarray, tints: np.ndarray | None, cmap: str) -> np.ndarray:
    """Return the colour of each pixel, float32 ``[height, width, 3]``."""
    if tints is None:
        table = color_table(cmap)
        return table[np.minimum((places[0] * len(table)).astype(np.int32), len(table) - 1)]
    mixed = np.zeros((*places.shape[1:], 3), np.float32)
    for place, tint in zip(places, tints, strict=False):
        mixed += place[..., None] ** 2.5 * tint
    return mixed / np.maximum((places**2).sum(0), 1e-9)[..., None]


def _outline(place: np.ndarray) -> np.ndarray:
    """Return the inner edge of where a word is at least half its peak, bool ``[height, width]``."""
    peak = place.max()
    inside = (place >= peak / 2) & (peak > 0)
    wide = max(1, round(max(place.shape) / OUTLINE))
    padded = np.pad(inside, wide, mode="edge")  # no edge along the image's sides
    rows, cols = place.shape
    whole = inside.copy()
    for down, right in ((0, wide), (2 * wide, wide), (wide, 0), (wide, 2 * wide)):
        whole &= padded[down : down + rows, right : right + cols]
    return inside & ~whole
