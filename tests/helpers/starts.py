"""A model of shapes that training can begin with, for its scripts' tests."""

from pathlib import Path

import torch

from scripts.training.mmdit import parts_of
from scripts.training.models import assemble, new_unet
from scripts.training.train_demo_model import name_as_before
from sdattn.models.demos import DEMOS


def write_start(folder: Path) -> Path:
    """Write a pipeline whose UNet is untrained around the MM-DiT's encoders; return its folder."""
    torch.manual_seed(0)
    made = assemble(*parts_of(DEMOS["demo-mmdit"]), new_unet())
    made.to(dtype=torch.float16).save_pretrained(folder)
    name_as_before(folder / "text_encoder" / "model.safetensors")
    return folder
