"""Pictures and colours inside a page."""

import base64
import io
from collections.abc import Mapping
from functools import cache
from itertools import product

import numpy as np
from PIL import Image

from ...maps import render

COLORMAPS = (render.COLORMAP, "viridis", "cividis")  # all readable to colour-blind people
# Okabe and Ito 2008, "Color Universal Design": told apart by colour-blind people too
PIN_COLORS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
MOST_PINS = 3  # words of a page's first view
LARGEST = 420_000  # bytes of a picture
_SIDES = (1536, 768, 384)  # pixels of its longer side at most, the first that does it
_KINDS: list[tuple[str, dict[str, int]]] = [
    ("png", {}),
    *(("webp", {"quality": quality, "method": 2}) for quality in (90, 75, 50, 25)),
]


def as_uri(image: Image.Image, largest: int = LARGEST) -> str:
    """A picture as a data URI: PNG, or WebP and smaller where that has more than ``largest``
    bytes."""
    for side, (kind, options) in product(_SIDES, _KINDS):
        shown, buffer = image.copy(), io.BytesIO()
        shown.thumbnail((side, side))
        shown.save(buffer, kind, **options)
        if buffer.tell() <= largest:
            break
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


@cache
def colour_tables() -> Mapping[str, str]:
    """256 colours of each colour map, red, green and blue, as base64."""
    ramp = np.linspace(0, 1, 256, dtype=np.float32)[None]
    tables = {name: render.colorize(ramp, (0.0, 1.0), name) for name in COLORMAPS}
    return {name: base64.b64encode(table.tobytes()).decode() for name, table in tables.items()}
