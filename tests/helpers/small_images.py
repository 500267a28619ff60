"""Images of random colours."""

import torch
from PIL import Image


def new_image(size=(128, 128), seed=0):
    """A smooth coloured image of ``size`` = (width, height)."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8).numpy()
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
