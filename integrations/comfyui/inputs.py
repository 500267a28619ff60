"""Inputs that the nodes share: how each is told what was drawn."""

from typing import Any

from PIL import Image
from torch import Tensor

from .reading import NAMES, Asked

CATEGORY = "sdattn"
ATTENTION = "SDATTN_ATTENTION"  # a type of our own: other nodes have an ATTENTION
SECOND_HALF, ALL_STEPS = "second half", "all steps"
MEAN, EVERY_STEP = "mean", "every step"
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
    }
    return {"required": {**required, **more}, "optional": optional}


def asked_for(
    clip: Any,
    image: Tensor,
    prompt: str,
    conditioning: Any = None,
    side: str = NAMES[0],
    spread: bool = False,
) -> Asked:
    return Asked(clip, prompt, image, conditioning, side, spread)


def words_of(text: str) -> list[str]:
    """Return words or phrases between commas or line ends."""
    return [word.strip() for word in text.replace("\n", ",").split(",") if word.strip()]


def as_images(images: Tensor) -> list[Image.Image]:
    data = (images.clamp(0, 1) * 255).round().byte().cpu().numpy()
    return [Image.fromarray(one) for one in data]
