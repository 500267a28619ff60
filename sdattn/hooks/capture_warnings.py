"""What a capture warns of when it begins to watch a model."""

import warnings
from collections.abc import Sequence
from typing import Any

from ..models.denoiser_call import innermost
from ..models.layers import AttentionLayer, unwrapped
from .passes import CaptureWarning


def warn_of_image_prompts(layers: Sequence[AttentionLayer]) -> None:
    """Warn where some of these layers attend to image prompts that are not captured."""
    processors = (innermost(la.module.processor) for la in layers if la.kind == "joint")
    if any(hasattr(processor, "to_k_ip") for processor in processors):
        warnings.warn(
            "Image prompts (IP-Adapter) of joint attention are not captured: the maps have the "
            "columns of the text only.",
            CaptureWarning,
            stacklevel=6,
        )


def warn_of_running_eagerly(model: Any) -> None:
    """Warn that a compiled model runs as if it were not."""
    warnings.warn(
        f"The {type(unwrapped(model)).__name__} is compiled, and in its graph can be recorded "
        "only means over heads of a UNet's own processors. Inside capture() it runs eagerly, "
        "so the picture can differ from the compiled model's in its last bits. To keep it "
        "compiled, enter capture() first and compile inside: each watched layer is then a "
        "graph break.",
        CaptureWarning,
        stacklevel=6,
    )
