"""A shard's images and maps for the gallery, small, in one WebP file.

    tile(run, parts)       one item's, made where the item is drawn
    make_sheet(tiles)      the file, and where in it the page finds each item's

Images are lossy. Maps are the file's alpha channel, which WebP keeps exactly, over black: a page on
a disk may not read pixels, but a filter can colour them by their alpha.
"""

import io
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch.nn.functional import adaptive_avg_pool2d

from ...maps.heatmap import Heatmap, latent_frames
from ...maps.masks import MaskSettings
from ...runs.drawings import EVERY_MASK
from ...runs.imagerun import ImageRun

SIDE, CELLS = 192, 24  # of the longer side of an image and of a map
MOST_WORDS = 300  # of an item: a WebP has at most 16383 columns
MOST_PIXELS = 20_000_000  # of all images, and of all maps: a browser unpacks the whole file


class Tile(NamedTuple):
    """One item's part of a sheet.

    Attributes:
        images: ``"image"``, and for an edit ``"source"``: uint8 ``[rows, cols, 3]``.
        maps: of the first occurrence of each word, uint8 ``[rows, cols]`` in its own range.
        ranges: for each map the values of 0 and 255, and the share of the range at which its mask
            begins, None for an empty mask.
    """

    images: dict[str, np.ndarray]
    maps: list[np.ndarray]
    ranges: list[tuple[float, float, float | None]]


def tile(
    run: ImageRun,
    parts: Collection[str],
    masks: MaskSettings = EVERY_MASK,
    source: Image.Image | None = None,
) -> Tile:
    """Return an item's tile: the image, of a video its middle frame, if it is saved, and the maps
    if anything else is. ``source`` is the image that was edited."""
    is_shown = not {"image", "video"}.isdisjoint(parts)
    made = tile_of_images(run.image, source) if is_shown else Tile({}, [], [])
    words: dict[str, Heatmap] = {}
    for heatmap in run.heatmaps.occurrences() if {*parts} - {"image", "video"} else ():
        words.setdefault(heatmap.label, heatmap)
    for heatmap in [*words.values()][:MOST_WORDS]:
        (low, high), level = heatmap.range, masks.level(heatmap.values)  # of all frames
        if run.video is not None:
            frames = latent_frames(len(heatmap.values), len(run.video))
            heatmap = heatmap.frame(frames[run.video.middle])
        values = heatmap.map[None]
        factor = max(1.0, max(values.shape) / CELLS)
        rows, cols = (max(1, round(many / factor)) for many in values.shape[1:])
        shades = (adaptive_avg_pool2d(values, (rows, cols))[0] - low) / ((high - low) or 1.0)
        share = None if math.isinf(level) else round((level - low) / (high - low), 3)
        made.maps.append((shades.clamp(0, 1) * 255).round().byte().numpy())
        made.ranges.append((float(f"{low:.3g}"), float(f"{high:.3g}"), share))
    return made


def tile_of_images(image: Image.Image | None, source: Image.Image | None) -> Tile:
    """Return the tile of an item whose maps are not saved."""
    images = {"image": image, "source": source}
    return Tile({n: _small(each) for n, each in images.items() if each is not None}, [], [])


def make_sheet(tiles: Sequence[Tile | None]) -> tuple[bytes, list[dict[str, Any] | None]]:
    """Return a shard's sheet, ``b""`` if it is empty, and for each item where its parts are, or
    None. The bytes depend on the tiles alone.

    ``"image"`` and ``"source"`` are (left, top, width, height) in pixels, and so is ``"maps"``, the
    first map; the others follow to its right. ``"ranges"`` are those of :class:`Tile`.
    """
    items = [(n, one) for n, one in enumerate(tiles) if one is not None]
    side = math.isqrt(MOST_PIXELS // max(1, sum(len(one.images) for _, one in items)))
    most = MOST_PIXELS // max(1, sum(one.maps[0].size for _, one in items if one.maps))
    pieces: list[tuple[int, str, Image.Image]] = []
    for n, one in items:
        for name, pixels in one.images.items():
            pieces.append((n, name, Image.fromarray(_small(Image.fromarray(pixels), side))))
    for n, one in items:
        if maps := one.maps[: max(1, most)]:
            black = Image.new("RGB", (maps[0].shape[1] * len(maps), len(maps[0])))
            black.putalpha(Image.fromarray(np.hstack(maps)))
            pieces.append((n, "maps", black))
    width = max([2048, *(piece.width for *_, piece in pieces)])
    width = max(width, math.isqrt(sum(piece.width * piece.height for *_, piece in pieces)))
    places: list[dict[str, Any]] = [{} for _ in tiles]
    left = top = tallest = 0
    for n, name, piece in pieces:
        if left + piece.width > width:
            left, top, tallest = 0, top + tallest, 0
        places[n][name] = [left, top, piece.width, piece.height]
        left, tallest = left + piece.width, max(tallest, piece.height)
    sheet, buffer = Image.new("RGBA", (width, max(1, top + tallest))), io.BytesIO()
    for n, name, piece in pieces:
        sheet.paste(piece, (places[n][name][0], places[n][name][1]))
    for n, one in items:
        if one.maps:
            wide = one.maps[0].shape[1]
            places[n]["ranges"] = [*map(list, one.ranges[: places[n]["maps"][2] // wide])]
            places[n]["maps"][2] = wide
    sheet.save(buffer, "WEBP", quality=80, alpha_quality=100, method=2)
    return buffer.getvalue() if pieces else b"", [place or None for place in places]


def _small(image: Image.Image, side: int = SIDE) -> np.ndarray:
    small = image.convert("RGB")
    small.thumbnail((side, side))
    return np.asarray(small)
