"""PixArt Alpha and Sigma: cross-attention to T5."""

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ..denoiser_call import grid_of_patches
from ..encoders import TextCall, cleaned
from ..family import NEGATIVE_FIRST_IN_CALL, Family


def read_pixart(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read T5, in lower case. Source: pipeline_pixart_alpha.py, ``encode_prompt``."""
    options = filled(call.length())
    return [read_source(call.pipe.tokenizer, cleaned(call, text), **options) for text in texts]


_PIPELINES = ("PixArtAlphaPipeline", "PixArtSigmaPipeline", "PixArtSigmaPAGPipeline")

FAMILY = Family(
    name="PixArt",
    denoisers=("PixArtTransformer2DModel",),
    layers={
        "transformer_blocks.*.attn1": ("block", "self"),
        "transformer_blocks.*.attn2": ("block", "cross"),
    },
    grid=grid_of_patches,
    half="float16",
    readers={"PixArt": read_pixart},
    guidance=dict.fromkeys(_PIPELINES, NEGATIVE_FIRST_IN_CALL),
    text_options=("max_sequence_length", "clean_caption"),
)
