"""Inputs that the nodes share: how each is told what was drawn."""

from typing import Any

from PIL import Image
from torch import Tensor

from .reading import NAMES, Asked

CATEGORY = "sdattn"
ATTENTION = "SDATTN_ATTENTION"  # a type of our own: other nodes have an ATTENTION
SECOND_HALF = "second half"
ALL_STEPS = "all steps"
MEAN = "mean"
EVERY_STEP = "every step"
EVERY_HEAD = "every head"
COLORMAPS = ["inferno", "viridis", "jet", "magma", "turbo", "gray"]
Inputs = dict[str, dict[str, Any]]


def reader_inputs(**more: Any) -> Inputs:
    """Return the inputs by which each node is told what was drawn, and its own."""
    required = {
        "attention": (ATTENTION, {"tooltip": "From Watch attention of the sampler meant."}),
        "clip": ("CLIP", {"tooltip": "The CLIP that encoded the prompt."}),
        "image": ("IMAGE", {"tooltip": "The decoded images of that sampler, not yet cropped."}),
        "prompt": (
            "STRING",
            {
                "multiline": True,
                "tooltip": "The prompt as encoded, weights and embeddings included. Between the "
                "prompts of Conditioning (Concat) write a line of ---.",
            },
        ),
    }
    optional = {
        "conditioning": (
            "CONDITIONING",
            {
                "tooltip": "Where the sampler draws from several texts (combined, by area, by "
                "mask, by time): the text encoder's output for the one meant."
            },
        ),
        "side": (
            list(NAMES),
            {"tooltip": "The sampler's input whose words are asked for.", "advanced": True},
        ),
        "spread": (
            "BOOLEAN",
            {
                "default": False,
                "advanced": True,
                "tooltip": "Spread maps along the image's self-attention, which Watch attention "
                "must keep. Edges become sharper.",
            },
        ),
        "step": _number("Step to read, counted from 0, which Watch attention must keep; -1: all."),
        "head": _number(
            "Head to read, counted from 0, which Watch attention must keep; -1: the mean. Layers "
            "with fewer heads are left out."
        ),
    }
    return {"required": {**required, **more}, "optional": optional}


def _number(tooltip: str) -> tuple[str, dict[str, Any]]:
    told = {"default": -1, "min": -1, "max": 9999, "advanced": True, "tooltip": tooltip}
    return "INT", told


def asked_for(
    image: Tensor,
    clip: Any = None,
    prompt: str = "",
    conditioning: Any = None,
    side: str = NAMES[0],
    spread: bool = False,
    step: int = -1,
    head: int = -1,
) -> Asked:
    return Asked(
        clip=clip,
        prompt=prompt,
        images=image,
        conditioning=conditioning,
        name=side,
        spread=spread,
        step=None if step < 0 else step,
        head=None if head < 0 else head,
    )


def words_of(text: str) -> list[str]:
    """Return words or phrases between commas or line ends."""
    return [word.strip() for word in text.replace("\n", ",").split(",") if word.strip()]


def as_images(images: Tensor) -> list[Image.Image]:
    data = (images.clamp(0, 1) * 255).round().byte().cpu().numpy()
    return [Image.fromarray(pixels) for pixels in data]
