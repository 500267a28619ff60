"""A run as one image to share: the image, its heat, the prompt with words in colours, peaks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from PIL import Image, ImageColor, ImageDraw, ImageFont

from ..maps.glow import WORD_COLORS, overlay
from ..maps.heatmap import Heatmap
from ..maps.render import FAINT, INK, PAPER, fit, fonts_for
from ..prompts.words import is_content_word, name_things
from .imagerun import ImageRun, made
from .report.pages import indices_by_span, pieces

SIZE = (1200, 630)  # as sites show the image of a link
_EDGE = 28  # pixels around everything, and between the images
_SIDE = 230  # width of the words' column
_FOOT = 34  # height of the last line
# Sizes of the prompt's letters, each with the height that the prompt may then take
_LETTERS = ((46, 130), (38, 130), (30, 130), (24, 150), (19, 170), (16, 220), (13, 300), (10, 380))
_DARK, _LIGHT = (0, 0, 0), (255, 255, 255)


def draw_card(
    run: ImageRun, maps: Sequence[Heatmap], note: str = "", part: float | None = None
) -> Image.Image:
    """Draw a card with some words' maps; ``note`` goes into its last line, and ``part`` of its
    lower edge is lit."""
    sheet = Image.new("RGB", SIZE, PAPER)
    pen = ImageDraw.Draw(sheet)
    wide = SIZE[0] - 2 * _EDGE
    size, lines = _lettered(_parts(run, maps), wide)
    for row, line in enumerate(lines):
        _write_line(pen, line, _EDGE + 1.5 * size * row, size)
    top = round(_EDGE + 1.5 * size * len(lines) + 16)
    room = wide - _SIDE - _EDGE, SIZE[1] - top - _FOOT - _EDGE
    width, height = run.image.size
    factor = min((room[0] - _EDGE // 2) / 2 / width, room[1] / height)
    tile = max(1, round(width * factor)), max(1, round(height * factor))
    image = run.image.convert("RGB").resize(tile, Image.Resampling.LANCZOS)
    sheet.paste(image, (_EDGE, top))
    sheet.paste(overlay(image, maps, colors=WORD_COLORS), (_EDGE + tile[0] + _EDGE // 2, top))
    left = _EDGE + 2 * tile[0] + _EDGE // 2 + _EDGE
    _write_peaks(pen, maps, (left, top), (SIZE[0] - _EDGE - left, room[1]))
    foot = SIZE[1] - _EDGE - 8
    _write(pen, (_EDGE, foot), " · ".join(filter(None, (made(run), note))), 20, wide - 110, FAINT)
    pen.text((SIZE[0] - _EDGE, foot), "sdattn", INK, _font("sdattn", 22), anchor="rm")
    if part is not None:
        pen.rectangle((0, SIZE[1] - 6, part * SIZE[0], SIZE[1]), fill=WORD_COLORS[0])
    return sheet


def strongest(maps: Sequence[Heatmap]) -> list[Heatmap]:
    """Return the maps that a card shows by default: the strongest that name a thing, as many as
    there are colours, the strongest first."""
    things = [maps[i] for i in name_things([one.label for one in maps])]
    things = things or [one for one in maps if is_content_word(one.label)] or [*maps]
    return sorted(things, key=lambda one: -one.peak)[: len(WORD_COLORS)]


class _Part(NamedTuple):
    """A stretch of the prompt; its colour, or None, and the word that it belongs to."""

    text: str
    color: str | None
    word: int


def _parts(run: ImageRun, maps: Sequence[Heatmap]) -> list[_Part]:
    prompt = run.heatmaps.prompt
    found = []
    for number, piece in enumerate(pieces(prompt, indices_by_span(prompt, maps))):
        color = None if piece.number is None else WORD_COLORS[piece.number]
        found += [_Part(text, color, number) for text in re.findall(r"\s+|\S+", piece.text)]
    return found


def _lettered(parts: Sequence[_Part], wide: int) -> tuple[int, list[list[_Part]]]:
    """Return the largest size of letters in which the prompt has room, and its lines."""
    for size, height in _LETTERS:
        lines = _wrapped(parts, size, wide)
        if 1.5 * size * len(lines) <= height:
            return size, lines
    most = int(height / 1.5 / size)
    return size, [*lines[: most - 1], [*lines[most - 1][:-1], _Part("…", None, -1)]]


def _wrapped(parts: Sequence[_Part], size: int, wide: int) -> list[list[_Part]]:
    lines: list[list[_Part]] = [[]]
    at = 0.0
    for part in parts:
        for piece in _cut(part, size, wide):
            length = _font(piece.text, size).getlength(piece.text)
            if at + length > wide and lines[-1]:
                lines.append([])
                at = 0.0
            if not lines[-1] and piece.text.isspace():
                continue
            lines[-1].append(piece)
            at += length
    return lines


def _cut(part: _Part, size: int, wide: int) -> Iterator[_Part]:
    """Yield the part; letter by letter if it is longer than a line."""
    if _font(part.text, size).getlength(part.text) <= wide:
        yield part
        return
    for letter in part.text:
        yield part._replace(text=letter)


def _write_line(pen: ImageDraw.ImageDraw, line: Sequence[_Part], top: float, size: int) -> None:
    at = float(_EDGE)
    for part, after in zip(line, [*line[1:], _Part("", None, -1)], strict=True):
        font = _font(part.text, size)
        length = font.getlength(part.text)
        if part.color:
            # one box around a phrase, and no room where a comma follows
            edge = 0.12 * size if after.text[:1].isspace() or not after.text else 0
            box = at - 0.12 * size, top, at + length + edge, top + 1.35 * size
            pen.rounded_rectangle(box, size // 6, fill=part.color)
        ink = INK if part.color is None else _ink_on(part.color)
        pen.text((at, top + 0.68 * size), part.text, ink, font, anchor="lm")
        at += length


def _write_peaks(
    pen: ImageDraw.ImageDraw,
    maps: Sequence[Heatmap],
    corner: tuple[int, int],
    room: tuple[int, int],
) -> None:
    """Write each word next to its colour, with its peak below."""
    pitch = min(62.0, room[1] / len(maps))
    size = round(0.42 * pitch)
    for row, (heatmap, color) in enumerate(zip(maps, WORD_COLORS, strict=False)):
        left, top = corner[0], corner[1] + pitch * row
        pen.rounded_rectangle((left, top + 2, left + 10, top + pitch - 6), 4, fill=color)
        place = left + 22, top + 0.28 * pitch
        _write(pen, place, heatmap.label, size, room[0] - 22, INK)
        told = f"peak {heatmap.peak:.2g}"
        _write(pen, (left + 22, top + 0.68 * pitch), told, round(0.32 * pitch), room[0] - 22, FAINT)


def _write(
    pen: ImageDraw.ImageDraw,
    place: tuple[float, float],
    text: str,
    size: int,
    wide: float,
    ink: tuple[int, int, int],
) -> None:
    """Write a line, smaller if it is too long; a word of very many letters ends in an ellipsis."""
    text = " ".join(text.split())
    while size > 8 and _font(text, size).getlength(text) > wide:
        size -= 1
    font = _font(text, size)
    pen.text(place, fit(text, font, wide), ink, font, anchor="lm")


def _ink_on(color: str) -> tuple[int, int, int]:
    """Return black or white, whichever has more contrast on a colour (WCAG 2.2)."""
    shades = (shade / 255 for shade in ImageColor.getrgb(color)[:3])
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shades]
    light = sum(part * s for part, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return _DARK if light > 0.179 else _LIGHT


@cache
def _font(text: str, size: int) -> ImageFont.FreeTypeFont:
    """Return a font that has the text's letters, if one is installed."""
    from matplotlib import font_manager

    path = font_manager.findfont(font_manager.FontProperties(family=[fonts_for(text)[-1]]))
    return ImageFont.truetype(path, size)
