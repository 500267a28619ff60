"""Sheets of images with captions, in a grid, in columns, in bands of rows; and heat strips."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .heatmap import Heatmap, latent_frames
from .render import FAINT, INK, PAPER, caption, colorize, enlarge, fit, font_of

# Pixels of a heat strip: its height and the gap below, its label, its least width, and its note
_ROW = 28
_GAP = 6
_LABEL = 150
_WIDTH = 640
_NOTE = 110


def grid(image: Image.Image, overlays: Sequence[Image.Image], title: str = "") -> Image.Image:
    """Arrange the image, with ``title`` below, and its words' captioned overlays, row by row."""
    tiles = [caption(enlarge(image), title or "image"), *overlays]
    across = min(len(tiles), max(1, round(math.sqrt(len(tiles) * 1.6))))
    return _sheet([tiles[i : i + across] for i in range(0, len(tiles), across)])


def columns(parts: Sequence[tuple[Image.Image, str, Sequence[Image.Image]]]) -> Image.Image:
    """Arrange images side by side, each above its overlays: (image, title, overlays) per column."""
    heads = [caption(enlarge(image), title or "image") for image, title, _ in parts]
    nothing = Image.new("RGB", (1, 1), PAPER)
    below = zip_longest(*(tiles for _, _, tiles in parts), fillvalue=nothing)
    return _sheet([heads, *below])


def _sheet(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    gap = 6
    width, height = (side + gap for side in rows[0][0].size)
    size = max(map(len, rows)) * width + gap, len(rows) * height + gap
    sheet = Image.new("RGB", size, PAPER)
    for i, row in enumerate(rows):
        for j, tile in enumerate(row):
            sheet.paste(tile, (gap + j * width, gap + i * height))
    return sheet


def bands(
    head: Sequence[Image.Image],
    rows: Sequence[Sequence[Image.Image]],
    lines: Mapping[str, str] | None = None,
) -> Image.Image:
    """Arrange rows of tiles of one size below a head row, repeated if many rows wrap into further
    columns; ``lines`` of text by name go above all, each wrapped to three rows at most."""
    width, height = head[0].size
    across = 1
    # Columns are added until the sheet is at most about two and a half times as high as wide.
    while (math.ceil(len(rows) / across) + 1) * height > 2.5 * across * len(head) * width:
        across += 1
    deep = max(1, math.ceil(len(rows) / across))
    parts = [rows[start : start + deep] for start in range(0, max(1, len(rows)), deep)]
    sheets = [_sheet([head, *part]) for part in parts]
    pitch = sheets[0].width + width // 12
    body = Image.new("RGB", (len(sheets) * pitch - width // 12, sheets[0].height), PAPER)
    for i, sheet in enumerate(sheets):
        body.paste(sheet, (i * pitch, 0))
    return _headed(body, lines) if lines else body


def _headed(body: Image.Image, lines: Mapping[str, str]) -> Image.Image:
    size = min(36, max(14, body.width // 64))
    font = font_of(size)
    left = round(max(map(font.getlength, lines))) + 2 * size
    rows = []
    for name, text in lines.items():
        for i, row in enumerate(_wrap(text, font, body.width - left - size)):
            rows.append(("" if i else name, row))
    top = round(1.5 * size * (len(rows) + 1))
    out = Image.new("RGB", (body.width, body.height + top), PAPER)
    out.paste(body, (0, top))
    draw = ImageDraw.Draw(out)
    for i, (name, row) in enumerate(rows):
        middle = 1.5 * size * (i + 1)
        draw.text((size, middle), name, FAINT, font, anchor="lm")
        draw.text((left, middle), row, INK, font, anchor="lm")
    return out


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: float) -> list[str]:
    """Wrap the text to one to three rows; an ellipsis ends text that does not fit."""
    rows: list[str] = []
    words = text.split()
    while words and len(rows) < 2:
        number = min(len(words), 100)  # more do not fit in any font
        # As many words as fit in this row.
        while number > 1 and font.getlength(" ".join(words[:number])) > width:
            number -= 1
        rows.append(fit(" ".join(words[:number]), font, width))
        words = words[number:]
    return [*rows, fit(" ".join(words), font, width)] if words or not rows else rows


def frame_means(heatmap: Heatmap, frames: int) -> np.ndarray:
    """Return the mean of a word's map in each frame of a video, float64 ``[frames]``; a latent
    frame counts for each video frame that it codes."""
    values = heatmap.values.detach().double().mean((1, 2)).numpy()
    return np.asarray(values[latent_frames(len(values), frames)])


def strips(maps: Sequence[Heatmap], frames: int) -> Image.Image:
    """Draw one strip per word of a video, its colour from 0 to the highest mean of any word in any
    frame; left the word, right its highest mean and that frame, counted from 1."""
    means = [frame_means(heatmap, frames) for heatmap in maps]
    top = max((float(mean.max()) for mean in means), default=0.0)
    wide = max(_WIDTH // frames, 1) * frames
    size = _LABEL + wide + _NOTE, (_ROW + _GAP) * (len(maps) + 1) + _GAP
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    font = font_of(15)
    small = font_of(12)
    for i, (heatmap, mean) in enumerate(zip(maps, means, strict=True)):
        y = _GAP + i * (_ROW + _GAP)
        strip = Image.fromarray(colorize(mean[None], (0.0, top)))
        sheet.paste(strip.resize((wide, _ROW), Image.Resampling.NEAREST), (_LABEL, y))
        label = fit(heatmap.label, font, _LABEL - 2 * _GAP)
        draw.text((_LABEL - _GAP, y + _ROW // 2), label, INK, font, anchor="rm")
        note = f"{mean.max():.2g} in {int(mean.argmax()) + 1}"
        draw.text((_LABEL + wide + _GAP, y + _ROW // 2), note, FAINT, small, anchor="lm")
    y = _GAP + len(maps) * (_ROW + _GAP) + _ROW // 2
    draw.text((_LABEL, y), "frame 1", FAINT, small, anchor="lm")
    draw.text((_LABEL + wide, y), f"frame {frames}", FAINT, small, anchor="rm")
    return sheet
