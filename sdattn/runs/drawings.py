"""A run's pictures as PNG files: maps over the image, all in a grid, masks."""

import io
import zlib
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from PIL import Image

from ..files.paths import file_name
from ..maps import sheets
from ..maps.heatmap import Heatmap

PARTS = ("image", "overlays", "grid", "maps", "masks", "report")
USUAL = ("image", "overlays", "grid", "maps", "report")
# About the bytes of zlib's quickest level in three quarters of its time
_QUICK = {"compress_level": 1, "compress_type": zlib.Z_RLE}


def drawings(
    image: Image.Image,
    maps: Sequence[Heatmap],
    title: str,
    parts: Collection[str] = USUAL,
    scale: tuple[float, float] | None = None,
) -> dict[str, bytes]:
    """``heatmaps/NN-word.png`` for each map, ``grid.png``, and ``masks/NN-word.png`` (255 where a
    map lies in the upper half of its range), as asked. ``scale`` is that of all maps; by
    default their own, see :meth:`sdattn.Heatmap.overlay`."""
    files: dict[str, bytes] = {}
    names = [f"{name}.png" for name in named(heatmap.label for heatmap in maps)]
    wanted = {"overlays", "grid"}.intersection(parts)
    tiles = [heatmap.overlay(image, scale=scale) for heatmap in maps] if wanted else []
    if "overlays" in parts:
        files |= {
            f"heatmaps/{n}": png(tile, **_QUICK) for n, tile in zip(names, tiles, strict=True)
        }
    if "grid" in parts:
        files["grid.png"] = png(sheets.grid(image, tiles, title), **_QUICK)
    if "masks" in parts:
        files |= {f"masks/{n}": _mask(m, image) for n, m in zip(names, maps, strict=True)}
    return files


def named(labels: Iterable[str]) -> list[str]:
    """Names of files for maps: number and word."""
    return [f"{n:02d}-{file_name(label)}" for n, label in enumerate(labels, start=1)]


def _mask(heatmap: Heatmap, image: Image.Image) -> bytes:
    mask = heatmap.mask((image.height, image.width)).numpy()
    return png(Image.fromarray(mask.astype(np.uint8) * 255), **_QUICK)


def png(image: Image.Image, **packing: int) -> bytes:
    """A picture as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **packing)
    return buffer.getvalue()
