"""CogView4: joint attention, both streams through the same projections; GLM, padded on the left."""

from dataclasses import replace

from ...prompts.tokenizing import PAD, Token
from ...prompts.tokens import Prompt, join_prompts, read_source
from ...prompts.words import Source
from ..denoiser_call import grid_of_patches
from ..encoders import TextCall
from ..family import IN_TURN, Family

UNIT = 16  # tokens: the text is filled up to a multiple, in front


def read_cogview4(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read GLM, padded to the longest prompt of the batch, then on the left to a multiple of 16.
    Source: pipeline_cogview4.py, ``_get_glm_embeds``."""
    tokenizer, most = call.pipe.tokenizer, call.option("max_sequence_length")
    sources = [Source.of(text) for text in texts]
    options = {"truncation": True, "max_length": most}
    longest = max(len(read_source(tokenizer, one, **options).tokens) for one in sources)
    front = -longest % UNIT
    if call.columns not in (None, front + longest):
        raise call.unexplained(
            f"`max_sequence_length={most!r}` makes {front + longest} of {texts}, as many as the "
            "longest needs"
        )
    options = {**options, "padding": "max_length", "max_length": longest}
    pad = Token(tokenizer.pad_token_id, tokenizer.pad_token, 0, 0, PAD)
    read = []
    for source in sources:
        own = read_source(tokenizer, source, **options)
        whole = join_prompts([Prompt(own.text, (), (pad,) * front), own])
        read.append(replace(whole, encoded=((pad.id,) * front + own.encoded[0],)))
    return read


FAMILY = Family(
    name="CogView4",
    denoisers=("CogView4Transformer2DModel",),
    layers={"transformer_blocks.*.attn1": ("double", "joint")},
    joined="text first",
    grid=grid_of_patches,
    readers={"CogView4": read_cogview4},
    guidance=dict.fromkeys(("CogView4Pipeline", "CogView4ControlPipeline"), IN_TURN),
    preset="joint",
)
