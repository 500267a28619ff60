"""Values -> colours, and images with captions. Only here are values normalised, when drawn."""

import math
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..errors import InvalidValueError, OptionError, did_you_mean
from .layermaps import fits

COLORMAP = "inferno"  # perceptually uniform, readable to colour-blind people
DIVERGING = "RdBu_r"  # blue below zero, red above: distinct to colour-blind people too
SHORTEST_SIDE = 256  # pixels; a smaller image is enlarged so that its label can be read
LONGEST_SIDE = 4096  # pixels; a long and thin image is not enlarged beyond this
INK = (235, 235, 235)
FAINT = (170, 170, 170)
PAPER = (20, 20, 20)


def colorize(
    values: np.ndarray, scale: tuple[float, float] | None = None, cmap: str = COLORMAP
) -> np.ndarray:
    """Map values ``[rows, cols]`` to colours, uint8 ``[rows, cols, 3]``, from the first colour to
    the last on ``scale`` (default: the values' range). Raise ValueError for values that are not
    finite."""
    table = color_table(cmap)
    shades = (normalised(values, scale) * len(table)).astype(np.int32)
    return table[np.minimum(shades, len(table) - 1)]


def check_colormap(cmap: str) -> None:
    """Raise ValueError for a name that is no colormap's of matplotlib."""
    import matplotlib  # heavy, and needed only here

    if cmap not in matplotlib.colormaps:
        near = did_you_mean(cmap, matplotlib.colormaps)
        text = f"pass the name of a colormap of matplotlib, 'viridis' for example.{near}"
        raise OptionError("cmap", cmap, text)


@cache
def color_table(cmap: str) -> np.ndarray:
    """Return a colormap's colours, uint8 ``[colours, 3]``; raise as :func:`check_colormap`."""
    import matplotlib

    check_colormap(cmap)
    colours = matplotlib.colormaps[cmap]
    return (colours(np.arange(colours.N))[:, :3] * 255).astype(np.uint8)


def normalised(values: np.ndarray, scale: tuple[float, float] | None) -> np.ndarray:
    """Return the values' places on a scale (default: their range), float32 in [0, 1]; raise
    ValueError for values that are not finite."""
    values = np.asarray(values, dtype=np.float32)
    if not np.isfinite(values).all():
        raise InvalidValueError("The heatmap holds values that are not finite; it cannot be drawn.")
    low, high = scale or (float(values.min()), float(values.max()))
    return ((values - low) / (high - low) if high > low else np.zeros_like(values)).clip(0, 1)


def colorize_signed(values: np.ndarray, most: float | None = None) -> np.ndarray:
    """Map values ``[rows, cols]`` of both signs to colours, uint8 ``[rows, cols, 3]``: blue below
    zero, red above, from ``-most`` to ``most`` (default: the largest size). Raise ValueError for
    values that are not finite."""
    import matplotlib

    most = float(np.abs(values).max()) if most is None else most
    shares = normalised(values, (-most, most) if most > 0 else (-1.0, 1.0))
    colours = matplotlib.colormaps[DIVERGING].resampled(257)  # odd, so that zero has one of its own
    return np.rint(colours(shares)[..., :3] * 255).astype(np.uint8)


def signed(
    values: np.ndarray, size: tuple[int, int], label: str = "", most: float | None = None
) -> Image.Image:
    """Draw a map of differences ``[rows, cols]``, as :func:`colorize_signed`, at (width, height)
    pixels, with ``label`` and scale below ("" for none). The neutral colour is no difference."""
    values = np.asarray(values, dtype=np.float32)
    most = float(np.abs(values).max()) if most is None else most
    fine = Image.fromarray(values).resize(size, Image.Resampling.BILINEAR)
    image = Image.fromarray(colorize_signed(np.asarray(fine), most))
    note = f"-{most:.2g} to +{most:.2g}" if most > 0 else "0 everywhere"
    return caption(image, label, note) if label else image


def drawn(values: np.ndarray, label: str, scale: tuple[float, float]) -> Image.Image:
    """Draw a map ``[rows, cols]`` alone on a scale, with label and peak below."""
    image = enlarge(Image.fromarray(colorize(values, scale)))
    return caption(image, label, f"peak {values.max():.2g}")


def check_proportions(image: Image.Image, grid: tuple[int, ...]) -> None:
    width, height = image.size
    if fits((height, width), grid):
        return
    rows, cols = grid
    raise InvalidValueError(
        f"A heatmap of {rows}x{cols} cells does not belong to an image of {width}x{height} "
        "pixels (width x height). Pass the image of the same run."
    )


def enlarge(image: Image.Image) -> Image.Image:
    """Return it as RGB, enlarged by a whole number until the shorter side has ``SHORTEST_SIDE``
    pixels, or the longer one ``LONGEST_SIDE``."""
    factor = math.ceil(SHORTEST_SIDE / min(image.size))
    factor = max(1, min(factor, LONGEST_SIDE // max(image.size)))
    return image.convert("RGB").resize(
        (image.width * factor, image.height * factor), Image.Resampling.BICUBIC
    )


def caption(image: Image.Image, label: str, note: str = "") -> Image.Image:
    size = max(12, min(image.width // 20, image.height // 4))
    font = font_of(size)
    strip = round(size * 1.7)
    out = Image.new("RGB", (image.width, image.height + strip), PAPER)
    out.paste(image)
    draw = ImageDraw.Draw(out)
    pad = size // 2
    middle = image.height + strip // 2
    label = fit(label, font, image.width - 3 * pad - font.getlength(note))
    draw.text((pad, middle), label, INK, font, anchor="lm")
    draw.text((image.width - pad, middle), note, FAINT, font, anchor="rm")
    return out


def fit(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """Return the text on one line, at most ``width`` pixels wide, ending in an ellipsis if cut."""
    text = " ".join(text.split())[:200]
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def font_of(size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", size)


def fonts_for(text: str) -> list[str]:
    """Return the font families for a text: the settings' (DejaVu Sans by default), then installed
    fonts for its missing glyphs. The first draws a box for a letter that none of them has."""
    from matplotlib import font_manager

    first = font_manager.findfont(font_manager.FontProperties())
    families = [font_manager.get_font(first).family_name]
    missing = _lacks(first, {c for c in text if not c.isspace()})
    fonts = font_manager.fontManager.ttflist if missing else []
    usual = [font for font in fonts if font.style == "normal" and font.weight == 400]
    usual = [font for font in usual if not font.name.startswith("Last Resort")]  # has boxes only
    for font in sorted(usual, key=lambda f: (not f.name.startswith("Noto Sans"), f.name, f.fname)):
        lacks = _lacks(font.fname, missing) if missing else missing
        if len(lacks) < len(missing):
            families.append(font.name)
            missing = lacks
    return list(dict.fromkeys(families))


def _lacks(path: str, letters: set[str]) -> set[str]:
    from matplotlib.ft2font import FT2Font

    font = FT2Font(path)
    return {letter for letter in letters if not font.get_char_index(ord(letter))}
