"""Ovis-Image: FLUX.1's joint attention with Qwen3, prompts inside a chat."""

from dataclasses import replace

from ...prompts.tokenizing import PAD, filled
from ...prompts.tokens import Prompt
from ..attention_layer import DOUBLE_THEN_SINGLE
from ..denoiser_call import grid_of_ids
from ..encoders import TextCall, in_chat, read_inside, zeros
from ..family import IN_TURN, Family


def read_ovis(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3's chat format after an instruction, without its first tokens, the padding zeroed.
    Source: pipeline_ovis_image.py, ``_get_ovis_prompt_embeds``."""
    pipe, drop = call.pipe, call.pipe.user_prompt_begin_id
    options = {**filled(call.length() + drop), "add_special_tokens": False}
    inside = in_chat(pipe.tokenizer, before=pipe.system_prompt, enable_thinking=False)
    (zero,) = zeros(1)
    return [
        replace(one, tokens=tuple(zero if token.special == PAD else token for token in one.tokens))
        for one in read_inside(pipe.tokenizer, map(inside, texts), drop, **options)
    ]


FAMILY = Family(
    name="Ovis-Image",
    denoisers=("OvisImageTransformer2DModel",),
    layers=DOUBLE_THEN_SINGLE,
    joined="text first",
    grid=grid_of_ids,
    grid_argument="img_ids",
    timestep_unit=1000.0,
    patch=2,  # cut by the pipeline; the model's own patches are of 1
    size_unit=16,
    half="bfloat16",
    readers={"OvisImage": read_ovis},
    preset="joint",
    guidance={"OvisImagePipeline": IN_TURN},
)
