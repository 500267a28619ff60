"""AuraFlow: joint attention, with eight registers before the text."""

from collections.abc import Sequence

from ...attention.joint_processor import Spans
from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, join_prompts, read_source
from ...prompts.words import Source
from ..denoiser_call import grid_of_patches, unwrapped
from ..encoders import TextCall, zeros
from ..family import NEGATIVE_FIRST_IN_CALL, Family
from ..pipeline import Given, Model

REGISTERS = 8  # transformer: AuraFlowTransformer2DModel.register_tokens


def read_auraflow(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read the model's registers, which belong to no token, then Pile-T5. Source:
    pipeline_aura_flow.py, ``encode_prompt``; auraflow_transformer_2d.py, ``forward``."""
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


def _spans(model: Model, given: Given, cells: int) -> Sequence[Spans]:
    """Return the spans: registers, then text, as one stream."""
    states = given["encoder_hidden_states"]
    n_text = unwrapped(model).register_tokens.shape[1] + states.shape[1]
    return [(slice(n_text, n_text + cells), slice(0, n_text))] * len(states)


FAMILY = Family(
    name="AuraFlow",
    denoisers=("AuraFlowTransformer2DModel",),
    layers={
        "joint_transformer_blocks.*.attn": ("double", "joint"),
        "single_transformer_blocks.*.attn": ("single", "joint"),
    },
    joined="text first",
    grid=grid_of_patches,
    spans=_spans,
    timestep_unit=1000.0,
    half="float16",
    readers={"AuraFlow": read_auraflow},
    preset="joint",
    guidance={"AuraFlowPipeline": NEGATIVE_FIRST_IN_CALL},
)
