"""A run's images as files: maps over the image, all of them in a grid, masks; videos for a
video."""

import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count

import numpy as np
from PIL import Image

from ..files.images import png
from ..files.paths import file_name
from ..files.videos import Video, best_format, write_video
from ..maps import sheets
from ..maps.glow import Scale
from ..maps.heatmap import Heatmap, latent_frames
from ..maps.masks import MaskSettings
from ..maps.render import caption, enlarge
from ..maps.sheets import strips
from .imagerun import ImageRun
from .parts import USUAL

# About the bytes of zlib's quickest level in three quarters of its time
_QUICK = {"compress_level": 1, "compress_type": zlib.Z_RLE}
EVERY_MASK = MaskSettings()  # each at half of its range


def image_files(run: ImageRun, parts: Collection[str] = USUAL) -> dict[str, bytes]:
    """Return ``image.png``, and ``video.mp4`` for a video, as asked. A video's ``image.png`` is its
    middle frame and always included. Videos are ``.webp`` if PyAV is not installed, see
    :mod:`sdattn.files.videos`."""
    with_video = run.video is not None and "video" in parts
    files = {"image.png": png(run.image)} if "image" in parts or with_video else {}
    if run.video is not None and with_video:
        kind = best_format()
        files[f"video.{kind}"] = write_video(run.video, run.video.rate, kind)
    return files


def drawings(
    run: ImageRun,
    maps: Sequence[Heatmap],
    title: str,
    parts: Collection[str] = USUAL,
    scale: Scale = "own",
    masks: MaskSettings = EVERY_MASK,
    numbers: Sequence[int] | None = None,
) -> dict[str, bytes]:
    """Draw maps over a run's image, as asked. ``scale`` is as :meth:`sdattn.Heatmap.overlay`
    takes it; ``numbers`` number the files (default: from 1).

    - ``overlays``: ``heatmaps/NN-word.png`` for each map; ``.mp4`` over a video.
    - ``grid``: ``grid.png``, all of them in one; for a video key frames, one row per word, and
      ``strips.png``, see :func:`sdattn.maps.sheets.strips`.
    - ``masks``: ``masks/NN-word.png`` for the words that ``masks`` selects, 255 where a map reaches
      its threshold (default: the upper half of its range); for a video a lossless animated
      ``.webp``. A word has the same number as in ``heatmaps``.
    """
    if run.video is not None:
        return _video_drawings(run.video, maps, title, parts, scale, masks, numbers)
    files: dict[str, bytes] = {}
    labels = [heatmap.label for heatmap in maps]
    names = [f"{name}.png" for name in named(labels, numbers)]
    overlaid = {"overlays", "grid"}.intersection(parts)
    tiles = [heatmap.overlay(run.image, scale=scale) for heatmap in maps] if overlaid else []
    if "overlays" in parts:
        for name, tile in zip(names, tiles, strict=True):
            files[f"heatmaps/{name}"] = png(tile, **_QUICK)
    if "grid" in parts:
        files["grid.png"] = png(sheets.grid(run.image, tiles, title), **_QUICK)
    if "masks" in parts:
        size = run.image.height, run.image.width
        for name, heatmap in zip(names, maps, strict=True):
            if masks.selects(heatmap.label):
                mask = heatmap.mask(size, masks.threshold).numpy()
                files[f"masks/{name}"] = png(_white(mask), **_QUICK)
    return files


def _video_drawings(
    video: Video,
    maps: Sequence[Heatmap],
    title: str,
    parts: Collection[str],
    scale: Scale,
    masks: MaskSettings,
    numbers: Sequence[int] | None,
) -> dict[str, bytes]:
    kind = best_format()
    files = {}
    names = named([heatmap.label for heatmap in maps], numbers)
    if "overlays" in parts:
        for name, heatmap in zip(names, maps, strict=True):
            frames = _over(video, heatmap, scale, range(len(video)))
            files[f"heatmaps/{name}.{kind}"] = write_video(frames, video.rate, kind)
    if "grid" in parts:
        # key frames in a row, and below them one row of overlays per word
        shown = video.key_frames()
        head = [caption(enlarge(video[i]), f"frame {i + 1}") for i in shown]
        rows = [[*_over(video, heatmap, scale, shown)] for heatmap in maps]
        files["grid.png"] = png(sheets.bands(head, rows, {"prompt": title}), **_QUICK)
        files["strips.png"] = png(strips(maps, len(video)), **_QUICK)
    if "masks" in parts:
        size = video[0].height, video[0].width
        for name, heatmap in zip(names, maps, strict=True):
            if not masks.selects(heatmap.label):
                continue
            # one level for all frames, so the mask is of the whole video
            mask = heatmap.mask(size, masks.threshold).numpy()
            shown = latent_frames(len(mask), len(video))
            white = (_white(mask[i]) for i in shown)
            files[f"masks/{name}.webp"] = write_video(white, video.rate, "webp", lossless=True)
    return files


def _over(
    video: Video, heatmap: Heatmap, scale: Scale, numbers: Iterable[int]
) -> Iterator[Image.Image]:
    shown = latent_frames(len(heatmap.values), len(video))
    return (heatmap.frame(shown[i]).overlay(video[i], scale=scale) for i in numbers)


def named(labels: Iterable[str], numbers: Iterable[int] | None = None) -> list[str]:
    """Name files for maps by number (default: from 1) and word."""
    numbered = zip(numbers or count(1), labels, strict=False)
    return [f"{number:02d}-{file_name(label)}" for number, label in numbered]


def _white(mask: np.ndarray) -> Image.Image:
    return Image.fromarray(mask.astype(np.uint8) * 255)
