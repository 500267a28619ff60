"""Fitting the user's image to a pipeline, and its latent."""

import math
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ..errors import InvalidValueError
from ..files.images import AnyImage, as_image
from ..models.facts import default_size, size_unit
from ..models.families import image_latents_of
from ..models.pipeline import Pipeline

LONGEST_SIDE = 1536  # pixels of an image kept for display


def fit(pipe: Pipeline, image: AnyImage) -> Image.Image:
    """Return the image upright by its EXIF tag, RGB (transparency is dropped), in proportion at
    about as many pixels as the pipeline makes by default, cropped evenly to sides that it can make.
    Raise as :func:`~sdattn.files.images.as_image` does, or ValueError if it is empty or its mode
    has no known white."""
    image = as_image(image)
    if not all(image.size):
        raise InvalidValueError(f"The image is {image.size} pixels. Pass one that has some.")
    image = upright(image)
    return ImageOps.fit(image, fitted_size(pipe, image.size), Image.Resampling.LANCZOS)


def fitted_size(pipe: Pipeline, size: tuple[int, int]) -> tuple[int, int]:
    """Return the (width, height) in pixels that :func:`fit` makes of an upright image's."""
    unit = size_unit(pipe)
    # As many pixels as the model was trained on; the crop to whole units takes the middle.
    scale = math.sqrt(math.prod(default_size(pipe)) / math.prod(size))
    width, height = (max(1, round(side * scale / unit)) * unit for side in size)
    return width, height


def upright(image: Image.Image) -> Image.Image:
    """Return an image as RGB, turned by its EXIF tag."""
    if image.mode in ("I", "F"):
        raise InvalidValueError(
            f"The image has mode {image.mode}, in which white is not defined. Pass one of 8 or "
            "16 bits: mode L, I;16 or RGB."
        )
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow would cut off all above 255
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    return image.convert("RGB")


def at_own_size(image: Image.Image, fitted: Image.Image) -> Image.Image:
    """Return the part of an image that :func:`fit` used, at its original resolution: at least the
    size of ``fitted`` and at most ``LONGEST_SIDE`` pixels long."""
    image = upright(image)
    scale = min(image.width / fitted.width, image.height / fitted.height)
    scale = max(1.0, min(scale, LONGEST_SIDE / max(fitted.size)))
    size = round(fitted.width * scale), round(fitted.height * scale)
    return ImageOps.fit(image, size, Image.Resampling.LANCZOS)


@torch.no_grad()
def encode(pipe: Pipeline, images: Sequence[Image.Image]) -> Tensor:
    """Return the latents that the pipeline decodes to the images, all of one size: float32 ``[B, C,
    rows, cols]`` or packed ``[B, patches, C]``, as its call takes them."""
    vae = pipe.vae
    dtype = pipe.vae.dtype
    encoded = image_latents_of(pipe).encode
    with ExitStack() as undo:
        if dtype != torch.float32:  # SDXL's overflows in float16
            undo.callback(vae.to, dtype)
            vae.to(torch.float32)
        found = []
        for image in images:  # one at a time, to save memory
            pixels = pipe.image_processor.preprocess(image)  # [1, 3, H, W]
            found.append(encoded(pipe, pixels.to(pipe._execution_device)))
    return torch.cat(found)
