"""Images that a user passes: PIL images, arrays and files."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from ..errors import InvalidTypeError, InvalidValueError, access_error

SUFFIXES: tuple[str, ...] = (
    *(".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".avif", ".heic", ".heif"),  # not read by every Pillow
)
UNREAD: tuple[str, ...] = (  # images too
    *(".jxl", ".jp2", ".psd", ".svg", ".tga", ".ico", ".ppm", ".eps", ".pdf"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf"),
)
_ORIENTATION = 0x0112  # of EXIF
_TURNED = (5, 6, 7, 8)  # width and height are exchanged
AnyImage = Image.Image | np.ndarray | str | Path
# Formats to open: other readers of Pillow start programs, Ghostscript for EPS
PHOTOS = ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "GIF", "TIFF", "HEIF")


def as_image(image: AnyImage) -> Image.Image:
    """Return a PIL image as it is, or from an array ``[height, width(, 3 or 4)]``, uint8 or floats
    in [0, 1], or a file; raise TypeError for anything else, and as :func:`open_image` does."""
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, (str, Path)):
        return open_image(Path(image).expanduser())
    if not isinstance(image, np.ndarray):
        kind = type(image).__name__
        raise InvalidTypeError(
            f"The image is of type {kind}. Pass a PIL image, its array or its file."
        )
    is_share = image.dtype.kind == "f" and image.size and image.min() >= 0 and image.max() <= 1
    values = np.rint(image * 255).astype(np.uint8) if is_share else image
    is_flat = image.ndim == 2 or (image.ndim == 3 and image.shape[-1] in (3, 4))
    if values.dtype != np.uint8 or not is_flat:
        raise InvalidValueError(
            f"The image is an array {list(image.shape)} of {image.dtype}. Pass [height, width, 3], "
            "as uint8 or as floats from 0 to 1."
        )
    return Image.fromarray(values)


def open_image(path: Path) -> Image.Image:
    """Read a whole image file; raise OSError if it cannot be opened, ValueError if it holds no
    image of :data:`PHOTOS`, or a broken one."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise access_error(error) from error
    with file:
        return read_image(file, str(path))


def read_image(file: BinaryIO, name: str) -> Image.Image:
    """Read an image from an open file, as if it were opened by this name; raise as
    :func:`open_image` does."""
    with _opened(file, name) as image:
        image.load()
        image.filename = name  # type: ignore[attr-defined]
        return image


def size_of(data: bytes, name: str) -> tuple[int, int]:
    """Return the upright (width, height) of an image file; raise as :func:`open_image` does, but
    for damage that only decoding finds."""
    with _opened(BytesIO(data), name) as image:
        image.verify()  # and can do nothing else then
    with _opened(BytesIO(data), name) as image:
        width, height = image.size
        turned = image.getexif().get(_ORIENTATION) in _TURNED
    return (height, width) if turned else (width, height)


@cache
def _formats() -> list[str]:
    Image.init()
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    return [name for name in PHOTOS if name in Image.OPEN]  # AVIF is not in every Pillow


@contextmanager
def _opened(file: BinaryIO, name: str) -> Iterator[Image.Image]:
    formats = _formats()
    try:
        yield Image.open(file, formats=formats)
    except UnidentifiedImageError as error:
        advice = f"Pass {', '.join(formats[:-1])} or {formats[-1]}."
        if name.lower().endswith((".heic", ".heif", ".avif")):
            advice = "pip install pillow-heif reads HEIC, a new Pillow AVIF; or convert it to JPEG."
        raise InvalidValueError(f"{name} is not a readable image. {advice}") from error
    except Exception as error:  # decoders raise whatever they like
        reason = str(error) or type(error).__name__
        raise InvalidValueError(f"{name} is not a readable image: {reason}") from error


def png(image: Image.Image, **packing: int) -> bytes:
    """Return an image as the bytes of a PNG file."""
    buffer = BytesIO()
    image.save(buffer, "PNG", **packing)
    return buffer.getvalue()
