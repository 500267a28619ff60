"""Ovis-Image: FLUX.1's joint attention with Qwen3, prompts inside a chat."""

from dataclasses import replace

from ...prompts.tokenizing import PAD, filled
from ...prompts.tokens import Prompt
from ..encoders import TextCall, in_chat, read_inside, zeros
from ..family import IN_TURN
from .flux import flux_like


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


FAMILY = flux_like(
    name="Ovis-Image",
    denoisers=("OvisImageTransformer2DModel",),
    readers={"OvisImage": read_ovis},
    guidance={"OvisImagePipeline": IN_TURN},
)
