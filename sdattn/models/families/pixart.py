"""PixArt Alpha and Sigma: cross-attention to T5."""

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ..denoiser_call import grid_of_patches
from ..encoders import TextCall, cleaned
from ..family import Family, Guidance


def read_pixart(call: TextCall, texts: list[str]) -> list[Prompt]:
    """T5, in lower case. Source: pipeline_pixart_alpha.py, ``encode_prompt``."""
    options = filled(call.length())
    return [read_source(call.pipe.tokenizer, cleaned(call, text), **options) for text in texts]


# Whether a run is guided is only a variable of __call__, which hands it to encode_prompt.
_GUIDANCE = Guidance(("unconditional", "conditional"), known_by="encode_prompt")

FAMILY = Family(
    name="PixArt",
    denoisers=("PixArtTransformer2DModel",),
    layers={
        "transformer_blocks.*.attn1": ("block", "self"),
        "transformer_blocks.*.attn2": ("block", "cross"),
    },
    grid=grid_of_patches,
    readers={"PixArt": read_pixart},
    guidance=dict.fromkeys(("PixArtAlphaPipeline", "PixArtSigmaPipeline"), _GUIDANCE),
    text_options=("max_sequence_length", "clean_caption"),
)
