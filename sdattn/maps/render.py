"""Heatmap + image -> PIL pictures. Values are normalised here, when they are drawn, only here."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import zip_longest

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..errors import InvalidTypeError, InvalidValueError

OPACITY = 0.85  # of what is highest
COLORMAP = "inferno"  # perceptually uniform, readable to colour-blind people
DIVERGING = "RdBu_r"  # blue below zero, red above: colour-blind people tell them apart
SHORTEST_SIDE = 256  # pixels; a smaller picture is drawn enlarged so that its label can be read
LONGEST_SIDE = 4096  # pixels; what is long and thin is not enlarged beyond
_INK, _FAINT, _PAPER = (235, 235, 235), (170, 170, 170), (20, 20, 20)


def colorize(
    values: np.ndarray, scale: tuple[float, float] | None = None, colormap: str = COLORMAP
) -> np.ndarray:
    """Values in colour.

    Args:
        values: ``[rows, cols]``.
        scale: the values drawn in the first and the last colour; by default the smallest and the
            largest. A flat map is drawn in the first colour.
        colormap: a name that matplotlib knows.

    Returns:
        uint8 ``[rows, cols, 3]``.

    Raises:
        ValueError: values that are not finite.
    """
    table = _table(colormap)
    shades = (_normalise(values, scale) * len(table)).astype(np.int32)
    return table[np.minimum(shades, len(table) - 1)]


@cache
def _table(colormap: str) -> np.ndarray:
    """The colours of a colour map, uint8 ``[colours, 3]``."""
    import matplotlib  # heavy, and needed only here

    colours = matplotlib.colormaps[colormap]
    return (colours(np.arange(colours.N))[:, :3] * 255).astype(np.uint8)


def _normalise(values: np.ndarray, scale: tuple[float, float] | None) -> np.ndarray:
    values = np.asarray(values, dtype=np.float32)
    if not np.isfinite(values).all():
        raise InvalidValueError("The heatmap holds values that are not finite; it cannot be drawn.")
    low, high = scale or (float(values.min()), float(values.max()))
    return ((values - low) / (high - low) if high > low else np.zeros_like(values)).clip(0, 1)


def colorize_signed(values: np.ndarray, most: float | None = None) -> np.ndarray:
    """Values of both signs in colour: blue below zero, red above, zero in the neutral colour.

    Args:
        values: ``[rows, cols]``.
        most: the size that has the strongest colour; by default the largest. The scale reaches
            from ``-most`` to ``most``. Values that are all zero are drawn in the neutral colour.

    Returns:
        uint8 ``[rows, cols, 3]``.

    Raises:
        ValueError: values that are not finite.
    """
    import matplotlib

    most = float(np.abs(values).max()) if most is None else most
    shares = _normalise(values, (-most, most) if most > 0 else (-1.0, 1.0))
    colours = matplotlib.colormaps[DIVERGING].resampled(257)  # odd, so that zero has one of its own
    return np.rint(colours(shares)[..., :3] * 255).astype(np.uint8)


def signed(
    values: np.ndarray, size: tuple[int, int], label: str = "", most: float | None = None
) -> Image.Image:
    """A map of differences in colour, as by :func:`colorize_signed`, with a caption below.

    There is no picture beneath it: a colour is a value, and the neutral colour is no difference.

    Args:
        values: ``[rows, cols]``, brought to ``size`` bilinearly.
        size: (width, height) in pixels.
        label: written below, beside the scale; "" leaves the caption out.
        most: as in :func:`colorize_signed`.

    Returns:
        RGB, ``size`` plus the caption.

    Raises:
        ValueError: values that are not finite.
    """
    values = np.asarray(values, dtype=np.float32)
    most = float(np.abs(values).max()) if most is None else most
    fine = Image.fromarray(values).resize(size, Image.Resampling.BILINEAR)
    picture = Image.fromarray(colorize_signed(np.asarray(fine), most))
    note = f"-{most:.2g} to +{most:.2g}" if most > 0 else "0 everywhere"
    return caption(picture, label, note) if label else picture


def overlay(
    image: Image.Image,
    values: np.ndarray,
    label: str = "",
    *,
    opacity: float = OPACITY,
    scale: tuple[float, float] | None = None,
    stretch: bool = False,
    colormap: str = COLORMAP,
) -> Image.Image:
    """A heatmap in colour over the image it belongs to, with a caption below.

    Colours are the more opaque the higher the value: where there is nothing the picture, in grey,
    is bare.

    Args:
        image: the generated image.
        values: ``[rows, cols]``, brought to the image's size bilinearly.
        label: written below, beside the highest value; "" leaves the caption out.
        opacity: of the last colour, in [0, 1]; that of the others is in proportion.
        scale: the values that have the first and the last colour; by default 0 and the highest.
        stretch: from the smallest to the largest value, and all colours equally opaque: shows the
            shape of a map, however weak, and hides how weak it is.
        colormap: as in :func:`colorize`.

    Returns:
        RGB, the image's size (enlarged by a whole number if its shorter side is under
        ``SHORTEST_SIDE`` pixels, see :func:`enlarge`) plus the caption.

    Raises:
        TypeError: the image is no PIL image.
        ValueError: the map's proportions are not the image's, or a scale for a map that is to be
            stretched over its own.
    """
    if stretch and scale:
        raise InvalidValueError(
            f"stretch=True and scale={scale}: a map has one of them, leave one out."
        )
    if not isinstance(image, Image.Image):
        raise InvalidTypeError(
            f"image is a {type(image).__name__}. Pass the PIL image of the same run."
        )
    values = np.asarray(values, dtype=np.float32)
    _check_proportions(image, values.shape)
    base, (low, high) = enlarge(image), (float(values.min()), float(values.max()))
    # The map is stretched to the picture's size first and coloured then: colours would mix.
    shades = _normalise(values, scale or ((low, high) if stretch else (0.0, high)))
    heat = np.asarray(Image.fromarray(shades).resize(base.size, Image.Resampling.BILINEAR))
    colours = Image.fromarray(colorize(heat, (0.0, 1.0), colormap))
    opaque = np.rint(255 * opacity * (np.ones_like(heat) if stretch else heat)).astype(np.uint8)
    # The picture keeps its drawing in grey, so that every colour on it is heat.
    grey = base.convert("L").convert("RGB")
    picture = Image.composite(colours, grey, Image.fromarray(opaque))
    note = f"{low:.2g} to {high:.2g}" if stretch else f"peak {high:.2g}"
    return caption(picture, label, note) if label else picture


def _check_proportions(image: Image.Image, grid: tuple[int, ...]) -> None:
    rows, cols = grid
    width, height = image.size
    if abs(rows - cols * height / width) >= 1 and abs(cols - rows * width / height) >= 1:
        raise InvalidValueError(
            f"A heatmap of {rows}x{cols} cells does not belong to an image of {width}x{height} "
            "pixels (width x height). Pass the image of the same run."
        )


def enlarge(image: Image.Image) -> Image.Image:
    """RGB, enlarged by a whole number until the shorter side has ``SHORTEST_SIDE`` pixels, or the
    longer one ``LONGEST_SIDE``."""
    factor = math.ceil(SHORTEST_SIDE / min(image.size))
    factor = max(1, min(factor, LONGEST_SIDE // max(image.size)))
    return image.convert("RGB").resize(
        (image.width * factor, image.height * factor), Image.Resampling.BICUBIC
    )


def caption(picture: Image.Image, label: str, note: str = "") -> Image.Image:
    """The picture with a strip of text below: ``label`` on the left, ``note`` on the right."""
    size = max(12, min(picture.width // 20, picture.height // 4))
    font = _font(size)
    strip = round(size * 1.7)
    out = Image.new("RGB", (picture.width, picture.height + strip), _PAPER)
    out.paste(picture)
    draw, pad, middle = ImageDraw.Draw(out), size // 2, picture.height + strip // 2
    label = _fit(label, font, picture.width - 3 * pad - font.getlength(note))
    draw.text((pad, middle), label, _INK, font, anchor="lm")
    draw.text((picture.width - pad, middle), note, _FAINT, font, anchor="rm")
    return out


def _fit(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    text = " ".join(text.split())[:200]
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def _font(size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)


def grid(image: Image.Image, overlays: Sequence[Image.Image], title: str = "") -> Image.Image:
    """The image and the overlays of its words side by side, row by row, in the order given.

    Args:
        image: the generated image; it comes first, with ``title`` below.
        overlays: of each word, with a caption, as :func:`overlay` draws them of this image.
        title: usually the prompt.
    """
    tiles = [caption(enlarge(image), title or "image"), *overlays]
    across = min(len(tiles), max(1, round(math.sqrt(len(tiles) * 1.6))))
    return _sheet([tiles[i : i + across] for i in range(0, len(tiles), across)])


def columns(parts: Sequence[tuple[Image.Image, str, Sequence[Image.Image]]]) -> Image.Image:
    """Images side by side, below each its overlays: (image, title, overlays) of each column."""
    heads = [caption(enlarge(image), title or "image") for image, title, _ in parts]
    nothing = Image.new("RGB", (1, 1), _PAPER)
    below = zip_longest(*(tiles for _, _, tiles in parts), fillvalue=nothing)
    return _sheet([heads, *below])


def _sheet(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Tiles of one size in rows."""
    gap = 6
    width, height = (side + gap for side in rows[0][0].size)
    size = max(map(len, rows)) * width + gap, len(rows) * height + gap
    sheet = Image.new("RGB", size, _PAPER)
    for i, row in enumerate(rows):
        for j, tile in enumerate(row):
            sheet.paste(tile, (gap + j * width, gap + i * height))
    return sheet


def bands(
    head: Sequence[Image.Image],
    rows: Sequence[Sequence[Image.Image]],
    lines: Mapping[str, str] | None = None,
) -> Image.Image:
    """Rows of tiles of one size below a head row; many rows go on beside each other.

    Args:
        head: the tiles above the first row; they are repeated where the rows go on.
        rows: tiles, as many in each row as in the head.
        lines: text above all, by what it is about; each is wrapped to three rows at most.
    """
    width, height = head[0].size
    across = 1
    # As many columns of rows as bring the sheet to about two and a half times its width in height.
    while (math.ceil(len(rows) / across) + 1) * height > 2.5 * across * len(head) * width:
        across += 1
    deep = max(1, math.ceil(len(rows) / across))
    parts = [rows[start : start + deep] for start in range(0, max(1, len(rows)), deep)]
    sheets = [_sheet([head, *part]) for part in parts]
    pitch = sheets[0].width + width // 12
    body = Image.new("RGB", (len(sheets) * pitch - width // 12, sheets[0].height), _PAPER)
    for i, sheet in enumerate(sheets):
        body.paste(sheet, (i * pitch, 0))
    return _headed(body, lines) if lines else body


def _headed(body: Image.Image, lines: Mapping[str, str]) -> Image.Image:
    """A picture below lines of text, each with its name on the left."""
    size = min(36, max(14, body.width // 64))
    font = _font(size)
    left = round(max(map(font.getlength, lines))) + 2 * size
    rows = [
        ("" if i else name, row)
        for name, text in lines.items()
        for i, row in enumerate(_wrap(text, font, body.width - left - size))
    ]
    top = round(1.5 * size * (len(rows) + 1))
    out = Image.new("RGB", (body.width, body.height + top), _PAPER)
    out.paste(body, (0, top))
    draw = ImageDraw.Draw(out)
    for i, (name, row) in enumerate(rows):
        middle = 1.5 * size * (i + 1)
        draw.text((size, middle), name, _FAINT, font, anchor="lm")
        draw.text((left, middle), row, _INK, font, anchor="lm")
    return out


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: float) -> list[str]:
    """The text in one to three rows; what has no room there ends in an ellipsis."""
    rows: list[str] = []
    words = text.split()
    while words and len(rows) < 2:
        number = min(len(words), 100)  # more have no room in any font
        # As many words as have room in this row.
        while number > 1 and font.getlength(" ".join(words[:number])) > width:
            number -= 1
        rows.append(_fit(" ".join(words[:number]), font, width))
        words = words[number:]
    return [*rows, _fit(" ".join(words), font, width)] if words or not rows else rows
