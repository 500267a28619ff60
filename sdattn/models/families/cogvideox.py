"""CogVideoX (Yang et al. 2024): films as one sequence, joint attention with T5, the text first."""

from collections.abc import Mapping
from typing import Any

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..encoders import TextCall
from ..family import Family, Guidance


def read_cogvideox(call: TextCall, texts: list[str]) -> list[Prompt]:
    """T5, filled up. Source: pipeline_cogvideox.py, ``_get_t5_prompt_embeds``."""
    tokenizer, options = call.pipe.tokenizer, filled(call.length())
    return [read_source(tokenizer, Source.of(text), **options) for text in texts]


def _grid(model: Any, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Of a latent ``[B, frames, C, rows, cols]`` that the model cuts into patches itself, over
    several frames in CogVideoX 1.5."""
    frames, _, rows, cols = given["hidden_states"].shape[1:]
    config = model.config
    return (
        frames // (config.patch_size_t or 1),
        rows // config.patch_size,
        cols // config.patch_size,
    )


# The pipeline decides from the guidance scale at the beginning of a run, which then changes.
_NEGATIVE_FIRST = Guidance(("unconditional", "conditional"), known_by="encode_prompt")

FAMILY = Family(
    name="CogVideoX",
    denoisers=("CogVideoXTransformer3DModel",),
    layers={"transformer_blocks.*.attn1": ("double", "joint")},
    joined="text first",
    grid=_grid,
    film=True,
    size_unit=16,
    readers={"CogVideoX": read_cogvideox},
    guidance={"CogVideoXPipeline": _NEGATIVE_FIRST},
)
