"""A shard's images and maps for the gallery, small, in one WebP file. Images are lossy. Maps are in
the alpha channel, which WebP keeps exactly, over black: a page on a disk may not read an image's
pixels, but a filter can colour them by their alpha."""

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

SIDE = 192  # pixels of the longer side of an image
CELLS = 24  # and of a map
MOST_WORDS = 300  # of an item: a WebP has at most 16383 columns
MOST_PIXELS = 20_000_000  # of all images, and of all maps: a browser unpacks the whole file


class Tile(NamedTuple):
    """One item's part of a sheet: ``"image"`` and of an edit ``"source"``; each word's map, uint8
    ``[rows, cols]``, with the values of 0 and 255 and the share of that range at which its mask
    begins, None for an empty mask."""

    images: dict[str, Image.Image]
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
        low, high = heatmap.range  # of all frames
        level = masks.level(heatmap.values)
        if run.video is not None:
            frames = latent_frames(len(heatmap.values), len(run.video))
            heatmap = heatmap.frame(frames[run.video.middle])
        factor = max(1.0, max(heatmap.map.shape) / CELLS)
        rows, cols = (max(1, round(many / factor)) for many in heatmap.map.shape)
        cells = adaptive_avg_pool2d(heatmap.map[None], (rows, cols))[0]
        shades = (cells - low) / ((high - low) or 1.0)
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
    ``"image"``, ``"source"`` and ``"maps"``, all maps in a row, each in a border of one pixel, are
    (left, top, width, height) in pixels; ``"ranges"`` as in :class:`Tile`, one per map.
    """
    items = [(n, one) for n, one in enumerate(tiles) if one is not None]
    side = math.isqrt(MOST_PIXELS // max(1, sum(len(one.images) for _, one in items)))
    most = MOST_PIXELS // max(1, sum(one.maps[0].size for _, one in items if one.maps))
    places: list[dict[str, Any]] = [{} for _ in tiles]
    pieces: list[tuple[int, str, Image.Image]] = []
    for n, one in items:
        pieces += [(n, name, _small(image, side)) for name, image in one.images.items()]
        # each with its border twice: browsers smooth beyond the part that they draw
        if maps := [np.pad(cells, 1, mode="edge") for cells in one.maps[: max(1, most)]]:
            black = Image.new("RGB", (maps[0].shape[1] * len(maps), len(maps[0])))
            black.putalpha(Image.fromarray(np.hstack(maps)))
            pieces.append((n, "maps", black))
            places[n]["ranges"] = [*map(list, one.ranges[: len(maps)])]
    pieces.sort(key=lambda piece: -piece[2].height)  # on shelves
    area = sum(piece.width * piece.height for *_, piece in pieces)
    width = max([2048, math.isqrt(area), *(piece.width for *_, piece in pieces)])
    left = top = shelf = 0
    for n, name, piece in pieces:
        if left + piece.width > width:
            left = 0
            top += shelf
            shelf = 0
        places[n][name] = [left, top, piece.width, piece.height]
        left += piece.width
        shelf = max(shelf, piece.height)
    sheet = Image.new("RGBA", (width, max(1, top + shelf)))
    buffer = io.BytesIO()
    for n, name, piece in pieces:
        sheet.paste(piece, tuple(places[n][name][:2]))
    sheet.save(buffer, "WEBP", quality=80, alpha_quality=100, method=2)
    return buffer.getvalue() if pieces else b"", [place or None for place in places]


def _small(image: Image.Image, side: int = SIDE) -> Image.Image:
    small = image.convert("RGB")
    small.thumbnail((side, side))
    return small
