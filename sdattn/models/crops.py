"""`Crop`: the part of an image that a run drew, if the pipeline pastes it back into the image.

Inpainting "only masked" (``padding_mask_crop``) draws the mask's surroundings at the size of the
call and puts the result back in its place, so the latent covers only that part of the image.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

from ..errors import InvalidValueError
from ..files.records import Record
from .pipeline import Given, Pipeline

_PASTES = "apply_overlay"  # the image processor's; without it the crop itself is the image


@dataclass(frozen=True)
class Crop(Record):
    """Part of an image that was drawn.

    Attributes:
        box: (left, top, right, bottom) in pixels of the image; right and bottom are outside.
        image: (width, height) of the image in pixels.
        drawn: (width, height) in pixels at which the model drew the box. If its proportions differ,
            the box lies in the middle, and its surroundings were cut off.

    Raises:
        ValueError: the box is empty or not inside the image, or a drawn side is below 1.
    """

    box: tuple[int, int, int, int]
    image: tuple[int, int]
    drawn: tuple[int, int]

    def __post_init__(self) -> None:
        (left, top, right, bottom), (width, height) = self.box, self.image
        if not (0 <= left < right <= width and 0 <= top < bottom <= height) or min(self.drawn) < 1:
            raise InvalidValueError(
                f"the box {self.box} is no part of an image of {width}x{height} pixels that was "
                f"drawn at {self.drawn[0]}x{self.drawn[1]}."
            )

    def __str__(self) -> str:
        left, top, right, bottom = self.box
        return (
            f"{right - left}x{bottom - top} pixels, {left} from the left and {top} from the top, "
            f"drawn at {self.drawn[0]}x{self.drawn[1]}"
        )

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """Box in fractions of the image's width and height."""
        (left, top, right, bottom), (width, height) = self.box, self.image
        return left / width, top / height, right / width, bottom / height

    @property
    def kept(self) -> tuple[float, float]:
        """Fractions of the drawn (rows, cols) that the box shows; at least one of them is 1."""
        left, top, right, bottom = self.box
        sides = right - left, bottom - top
        scale = max(side / full for side, full in zip(sides, self.drawn, strict=True))
        # the box has whole pixels: less than one is no cut
        cols, rows = (
            side / (scale * full) if scale * full - side >= 1 else 1.0
            for side, full in zip(sides, self.drawn, strict=True)
        )
        return rows, cols


def crop_in(pipeline: Pipeline, variables: Given | None) -> Crop | None:
    """Return the crop of a pipeline's call, from the call's variables as the model is called; None
    if the whole image is drawn, or if the crop itself is the result (Chroma, FLUX's Kontext and
    ControlNet inpainting)."""
    found = variables or {}
    box, size = found.get("crops_coords"), getattr(found.get("original_image"), "size", None)
    if box is None or size is None or not _pastes(pipeline):
        return None
    left, top, right, bottom = map(int, box)
    drawn = int(found["width"]), int(found["height"])
    try:
        return Crop((left, top, right, bottom), (size[0], size[1]), drawn)
    except InvalidValueError:  # the pipeline itself fails where it pastes
        return None


def _pastes(pipeline: Pipeline) -> bool:
    calls = [vars(kind)["__call__"] for kind in type(pipeline).__mro__ if "__call__" in vars(kind)]
    codes = (getattr(inspect.unwrap(call), "__code__", None) for call in calls)
    return any(_PASTES in names for code in codes if code for names in _names(code))


def _names(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the names that a function uses, then the names in its comprehensions."""
    yield code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names(part)
