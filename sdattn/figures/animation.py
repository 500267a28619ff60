from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import refuse
from ..maps import render, sheets
from ..runs.imagerun import ImageRun
from ..runs.run import Run
from .choosing import chosen, format_of, kept_steps, one_image, save_file

if TYPE_CHECKING:
    from PIL import Image

FORMATS = (".gif", ".webp")
_MOST = {"gif": 655_350, "webp": 2**24 - 1}  # milliseconds of a frame, or of several that are equal
HOLD = 1500  # milliseconds: minimum duration of the last step
_SAMPLE = 8  # steps that a GIF's colours are chosen from


def animate(
    run: ImageRun | Run, words: Sequence[str] | None = None, *, size: int = 1600
) -> list[Image.Image]:
    """Return a frame for each kept step: the image with the step's number and timestep, and each
    word in colour over it.

    All words share one scale, from 0 to the highest value of a content word in any step. A video is
    shown by its middle frame; for another pass ``run.frame(number)``.

    Args:
        run: a run of one image, from :func:`sdattn.generate` or :func:`sdattn.load_run`, with its
            steps; of several images one, ``run[0]``.
        words: words or phrases, each occurrence by itself (default: all words).
        size: maximum pixels of a frame's longer side.

    Returns:
        RGB, all of one size, in the order in which the steps ran.

    Raises:
        ValueError: the run has not kept its steps, or has several images.
        KeyError: a word that is not in the prompt.
    """
    run = one_image(run)
    if run.video is not None:
        run = run.frame(run.video.middle)
    kept = kept_steps(run)
    steps = [chosen(heatmaps, words) for _, heatmaps in kept]
    # One scale for all frames: a change of colour is a change of attention.
    scale = 0.0, max(heatmaps.top for _, heatmaps in kept)
    factor = min(1.0, render.SHORTEST_SIDE / min(run.image.size))
    small = round(run.image.width * factor), round(run.image.height * factor)
    image = run.image.convert("RGB").resize(small, reducing_gap=3.0)
    frames = []
    for (name, _), maps in zip(kept, steps, strict=True):
        tiles = [heatmap.overlay(image, scale=scale) for heatmap in maps]
        frame = sheets.grid(image, tiles, ", ".join(name))
        frame.thumbnail((size, size))
        frames.append(frame)
    return frames


def save_animation(
    frames: Sequence[Image.Image], path: str | Path, *, milliseconds: int = 200
) -> None:
    """Write frames as ``.gif`` or ``.webp``, by the file's extension, playing in a loop; raise
    ValueError for another format, or a duration out of range.

    A GIF has 256 colours for all frames together.

    Args:
        frames: RGB, all of one size.
        path: file to write.
        milliseconds: duration of each frame, in a GIF to the nearest ten; the last one stays for
            ``HOLD`` or longer.
    """
    kind = format_of(path, FORMATS)
    most = _MOST[kind] // len(frames)  # together no longer than one frame can be
    if not 20 <= milliseconds <= most:
        text = f"20, the least that browsers show, to {most}, the most of {len(frames)} frames"
        raise refuse("milliseconds", milliseconds, text)
    options: dict[str, Any] = {"quality": 85} if kind == "webp" else {"optimize": False}
    first, *rest = _in_few_colours(frames) if kind == "gif" else frames
    unit = 10 if kind == "gif" else 1
    each = round(milliseconds / unit) * unit
    times = [each] * len(rest) + [max(each, HOLD)]
    buffer = io.BytesIO()
    first.save(
        buffer, kind.upper(), save_all=True, append_images=rest, duration=times, loop=0, **options
    )
    save_file(path, buffer.getvalue())


def _in_few_colours(frames: Sequence[Image.Image]) -> list[Image.Image]:
    """Reduce all frames to the same 256 colours, so that unchanged parts do not flicker."""
    from PIL import Image

    # The palette for the whole run is chosen from some of its frames, stacked.
    some = frames[:: -(-len(frames) // _SAMPLE)]
    width, height = frames[0].size
    sheet = Image.new("RGB", (width, height * len(some)))
    for i, frame in enumerate(some):
        sheet.paste(frame, (0, i * height))
    palette = sheet.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    return [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
