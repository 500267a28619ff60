"""Heatmap + image -> PIL images. Only here are values normalised, when they are drawn."""

import math
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..errors import InvalidValueError, OptionError, did_you_mean, refuse
from ..files.images import AnyImage, as_image
from .layermaps import fits

OPACITY = 0.85  # at the highest value
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
    table = _table(cmap)
    shades = (_normalise(values, scale) * len(table)).astype(np.int32)
    return table[np.minimum(shades, len(table) - 1)]


def check_colormap(cmap: str) -> None:
    """Raise ValueError for a name that is no colormap's of matplotlib."""
    import matplotlib  # heavy, and needed only here

    if cmap not in matplotlib.colormaps:
        near = did_you_mean(cmap, matplotlib.colormaps)
        text = f"pass the name of a colormap of matplotlib, 'viridis' for example.{near}"
        raise OptionError("cmap", cmap, text)


@cache
def _table(cmap: str) -> np.ndarray:
    import matplotlib

    check_colormap(cmap)
    colours = matplotlib.colormaps[cmap]
    return (colours(np.arange(colours.N))[:, :3] * 255).astype(np.uint8)


def _normalise(values: np.ndarray, scale: tuple[float, float] | None) -> np.ndarray:
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
    shares = _normalise(values, (-most, most) if most > 0 else (-1.0, 1.0))
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


def overlay(
    image: AnyImage,
    values: np.ndarray,
    label: str = "",
    *,
    alpha: float = OPACITY,
    scale: tuple[float, float] | None = None,
    stretch: bool = False,
    cmap: str = COLORMAP,
    own_size: bool = False,
) -> Image.Image:
    """Draw a heatmap in colour over its image, with a caption below; raise ValueError if they
    differ in proportions, or for both ``stretch`` and ``scale``.

    The higher the value, the more opaque the colour over the image, in grey.

    Args:
        values: ``[rows, cols]``, resized to the image bilinearly.
        label: written below, next to the highest value; "" leaves the caption out.
        alpha: opacity of the last colour, in [0, 1]; the others are in proportion.
        scale: the values of the first and the last colour (default: 0 and the highest).
        stretch: scale from the smallest to the largest value, equally opaque: shows the shape of a
            weak map.
        own_size: leave a small image as it is.

    Returns:
        RGB, the size of the image, enlarged as :func:`enlarge` does, plus the caption.
    """
    if stretch and scale:
        raise InvalidValueError(
            f"stretch=True and scale={scale}: both set the scale, leave one out."
        )
    if not 0 <= alpha <= 1:
        raise refuse("alpha", alpha, "a number from 0 to 1")
    image = as_image(image)
    values = np.asarray(values, dtype=np.float32)
    check_proportions(image, values.shape)
    base = image.convert("RGB") if own_size else enlarge(image)
    low = float(values.min())
    high = float(values.max())
    # The map is resized before it is coloured: resizing would mix colours.
    shades = _normalise(values, scale or (low if stretch else 0.0, high))
    heat = np.asarray(Image.fromarray(shades).resize(base.size, Image.Resampling.BILINEAR))
    colours = Image.fromarray(colorize(heat, (0.0, 1.0), cmap))
    opaque = np.rint(255 * alpha * (np.ones_like(heat) if stretch else heat)).astype(np.uint8)
    # The image is grey, so that every colour on it is heat.
    grey = base.convert("L").convert("RGB")
    painted = Image.composite(colours, grey, Image.fromarray(opaque))
    note = f"{low:.2g} to {high:.2g}" if stretch else f"peak {high:.2g}"
    return caption(painted, label, note) if label else painted


def drawn(values: np.ndarray, label: str, top: float) -> Image.Image:
    """Draw a map ``[rows, cols]`` alone, from 0 to ``top``, with label and peak below."""
    image = enlarge(Image.fromarray(colorize(values, (0.0, top))))
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
