"""Images of the user's own, opened as what they are."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from ..errors import InvalidValueError

if TYPE_CHECKING:
    from PIL import Image

# Formats to open: other readers of Pillow start programs, Ghostscript for EPS
PHOTOS = ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "GIF", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff")
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF: width and height are exchanged


def open_photo(file: BinaryIO, name: str) -> Image.Image:
    """Read a whole image file as a PIL image with this file name.

    Raises:
        ValueError: it holds no image of :data:`PHOTOS`, or a broken one.
    """
    with _opened(file, name) as image:
        image.load()
        image.filename = name  # type: ignore[attr-defined]  # as if it were opened by its name
        return image


def photo_size(data: bytes, name: str) -> tuple[int, int]:
    """Return an image's upright (width, height) from its header; raise as :func:`open_photo` does,
    but for damage that only decoding finds."""
    with _opened(io.BytesIO(data), name) as image:
        image.verify()  # and can do nothing else then
    with _opened(io.BytesIO(data), name) as image:
        width, height = image.size
        turned = image.getexif().get(_ORIENTATION) in _TURNED
    return (height, width) if turned else (width, height)


@contextmanager
def _opened(file: BinaryIO, name: str) -> Iterator[Image.Image]:
    from PIL import Image, UnidentifiedImageError

    Image.init()
    formats = [name for name in PHOTOS if name in Image.OPEN]  # AVIF is not in every Pillow
    try:
        yield Image.open(file, formats=formats)
    except UnidentifiedImageError as error:
        choice = f"{', '.join(formats[:-1])} or {formats[-1]}"
        raise InvalidValueError(f"{name} is not a readable image. Pass {choice}.") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidValueError(f"{name} is not a readable image: {error}") from error
