from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import refuse
from ..files.videos import write_video
from ..runs.card import draw_card
from ..runs.imagerun import ImageRun
from ..runs.run import Run
from .card import of_image, shown_words
from .choosing import chosen, format_of, kept_steps, save_file

if TYPE_CHECKING:
    from PIL import Image

FORMATS = (".gif", ".webp", ".mp4")
_MOST = {"gif": 655_350, "webp": 2**24 - 1}  # milliseconds of a frame, or of several that are equal
HOLD = 1500  # milliseconds: minimum duration of the last step
LARGEST = 3_000_000  # bytes: frames of a file that is larger are made smaller
_SAMPLE = 8  # steps that a GIF's colours are chosen from


def animate(
    run: ImageRun | Run, words: Sequence[str] | None = None, *, size: int = 900
) -> list[Image.Image]:
    """Return a frame for each kept step: a :func:`.card.card` with the words' heat in this step,
    its number and its timestep, and how far the run is.

    Each step has its own scale, and its peaks are told. A video is shown by its middle frame; for
    another pass ``run.frame(number)``.

    Args:
        run: a run of one image, from :func:`sdattn.generate` or :func:`sdattn.load_run`, with its
            steps; of several images one, ``run[0]``.
        words: as for :func:`.card.card`.
        size: maximum pixels of a frame's longer side.

    Returns:
        RGB, all of one size, in the order in which the steps ran.

    Raises:
        ValueError: the run has not kept its steps, or has several images; too many words.
        KeyError: a word that is not in the prompt.
    """
    run = of_image(run)
    kept = kept_steps(run)
    columns = [one.columns for one in shown_words(run.heatmaps, words)]
    frames = []
    for number, (name, heatmaps) in enumerate(kept, 1):
        found = {one.columns: one for one in chosen(heatmaps, words)}
        maps = [found[those] for those in columns]
        frame = draw_card(run, maps, ", ".join(name), number / len(kept))
        frame.thumbnail((size, size))
        frames.append(frame)
    return frames


def save_animation(
    frames: Sequence[Image.Image], path: str | Path, *, milliseconds: int = 200
) -> None:
    """Write frames as ``.gif``, ``.webp`` or ``.mp4``, by the file's extension, playing in a loop;
    raise ValueError for another format, or a duration out of range.

    A file has at most 3 MB: frames are made smaller until it does. A GIF has 256 colours for all
    frames together. MP4 needs PyAV.

    Args:
        frames: RGB, all of one size.
        path: file to write.
        milliseconds: duration of each frame, in a GIF to the nearest ten; the last one stays for
            ``HOLD`` or longer.
    """
    kind = format_of(path, FORMATS)
    most = _MOST.get(kind, _MOST["gif"]) // len(frames)  # together no longer than one frame can be
    if not 20 <= milliseconds <= most:
        text = f"20, the least that browsers show, to {most}, the most of {len(frames)} frames"
        raise refuse("milliseconds", milliseconds, text)
    data = _encoded(frames, kind, milliseconds)
    while len(data) > LARGEST:
        width, height = frames[0].size
        size = round(width * 0.8), round(height * 0.8)
        frames = [frame.resize(size, reducing_gap=3.0) for frame in frames]
        data = _encoded(frames, kind, milliseconds)
    save_file(path, data)


def _encoded(frames: Sequence[Image.Image], kind: str, milliseconds: int) -> bytes:
    if kind == "mp4":
        last = [frames[-1]] * max(1, -(-HOLD // milliseconds))
        return write_video([*frames[:-1], *last], 1000 / milliseconds, "mp4")
    options: dict[str, Any] = {"quality": 85} if kind == "webp" else {"optimize": False}
    first, *rest = _in_few_colours(frames) if kind == "gif" else frames
    unit = 10 if kind == "gif" else 1
    each = round(milliseconds / unit) * unit
    times = [each] * len(rest) + [max(each, HOLD)]
    buffer = io.BytesIO()
    first.save(
        buffer, kind.upper(), save_all=True, append_images=rest, duration=times, loop=0, **options
    )
    return buffer.getvalue()


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
