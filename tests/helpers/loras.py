"""Files of small LoRAs, as peft makes and diffusers saves them, and what a pipeline draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def save_lora(
    folder: Path, pipeline: Any, model: torch.nn.Module, targets: Sequence[str] = ("to_q",)
) -> Path:
    """Save a LoRA of rank 2 with random weights for a denoiser's projections; return its file.

    Args:
        folder: where the file goes.
        pipeline: the pipeline or its class.
        model: the denoiser, which gets the LoRA.
        targets: projections that the LoRA is for.
    """
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    model.add_adapter(config)
    pipeline.save_lora_weights(folder, get_peft_model_state_dict(model))
    return folder / "pytorch_lora_weights.safetensors"


def draw(pipe: Any) -> torch.Tensor:
    """Return the latents that a pipeline draws in two steps."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    options = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "latent"}
    images: torch.Tensor = pipe("a red cat", generator=generator, **options).images
    return images
