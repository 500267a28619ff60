"""Images that a user passes: PIL images, arrays and files."""

from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from ..errors import InvalidTypeError, InvalidValueError, access_error

AnyImage = Image.Image | np.ndarray | str | Path
# Formats to open: other readers of Pillow start programs, Ghostscript for EPS
PHOTOS = ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "GIF", "TIFF")


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
    """Read a whole image file.

    Raises:
        OSError: it cannot be opened.
        ValueError: it holds no image of :data:`PHOTOS`, or a broken one.
    """
    Image.init()
    formats = [name for name in PHOTOS if name in Image.OPEN]  # AVIF is not in every Pillow
    try:
        file = path.open("rb")
    except OSError as error:
        raise access_error(error) from error
    with file:
        try:
            image = Image.open(file, formats=formats)
            image.load()
            image.filename = str(path)  # as if it were opened by its name
        except UnidentifiedImageError as error:
            choice = f"{', '.join(formats[:-1])} or {formats[-1]}"
            raise InvalidValueError(f"{path} is not a readable image. Pass {choice}.") from error
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InvalidValueError(f"{path} is not a readable image: {error}") from error
    return image
