"""AuraFlow: joint attention, eight registers before the text."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, join_prompts, read_source
from ...prompts.words import Source
from ..denoiser_call import DenoiserCall, grid_of_patches, unwrapped
from ..encoders import TextCall, zeros
from ..family import Family, Guidance

REGISTERS = 8  # transformer: AuraFlowTransformer2DModel.register_tokens


def read_auraflow(call: TextCall, texts: list[str]) -> list[Prompt]:
    """The model's registers, which are of no token, and Pile-T5. Source: pipeline_aura_flow.py,
    ``encode_prompt``; auraflow_transformer_2d.py, ``forward``."""
    options = filled(call.length(before=REGISTERS))
    tokenizer = call.pipe.tokenizer
    return [
        join_prompts(
            [
                Prompt(text, (), zeros(REGISTERS)),
                read_source(tokenizer, Source.of(text), **options),
            ]
        )
        for text in texts
    ]


class AuraFlow(Family):
    """The blocks get the registers and the text as one."""

    def read_call(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> DenoiserCall:
        call = super().read_call(model, args, kwargs)
        return replace(call, n_before=unwrapped(model).register_tokens.shape[1])


FAMILY = AuraFlow(
    name="AuraFlow",
    denoisers=("AuraFlowTransformer2DModel",),
    layers={
        "joint_transformer_blocks.*.attn": ("double", "joint"),
        "single_transformer_blocks.*.attn": ("single", "joint"),
    },
    joined="text first",
    grid=grid_of_patches,
    timestep_unit=1000.0,
    size_unit=16,
    readers={"AuraFlow": read_auraflow},
    preset="joint",
    # Whether a run is guided is only a variable of __call__, which hands it to encode_prompt.
    guidance={
        "AuraFlowPipeline": Guidance(("unconditional", "conditional"), known_by="encode_prompt")
    },
)
