"""HunyuanImage 2.1: joint attention, the image first, with Qwen2.5-VL and with ByT5, which reads
quoted text."""

import re
from dataclasses import replace

from ...prompts.tokens import Prompt
from ...prompts.words import Source
from ..attention_layer import DOUBLE_THEN_SINGLE
from ..denoiser_call import DenoiserCall, grid_of_patches
from ..encoders import TextCall, in_template, refuse_unknown
from ..family import IN_TURN, Family
from ..glyphs import glyph_text, read_with_glyphs
from ..parts import Names
from ..pipeline import Given, Model

# pipeline_hunyuanimage.py, extract_glyph_text, in its order
_QUOTED = (r"\'(.*?)\'", r"\"(.*?)\"", "\u2018(.*?)\u2019", "\u201c(.*?)\u201d")


def read_hunyuan_image(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read ByT5's tokens of the quoted text, Qwen2.5-VL's tokens of the prompt inside a template,
    then the padding of both. Source: pipeline_hunyuanimage.py, ``encode_prompt``;
    transformer_hunyuanimage.py, ``forward``."""
    lengths = call.pipe.tokenizer_max_length, call.pipe.tokenizer_2_max_length
    if call.columns not in (None, sum(lengths)):
        raise call.unexplained(
            f"its tokenizer_max_length and tokenizer_2_max_length make {lengths}"
        )
    whole = in_template(call.pipe.prompt_template_encode)

    def quoted(text: str) -> Source | None:
        return glyph_text(text, (one for pattern in _QUOTED for one in re.finditer(pattern, text)))

    return read_with_glyphs(call, texts, whole, quoted, "num_images_per_prompt")


class HunyuanImage(Family):
    """A family whose two text encoders share one sequence of columns."""

    def read_call(self, model: Model, args: tuple[object, ...], kwargs: Given) -> DenoiserCall:
        call = super().read_call(model, args, kwargs)
        return call if model.context_embedder_2 is not None else replace(call, text_2=None)

    def cell(self, model: Model) -> int:
        return int(model.config.patch_size[-1])


FAMILY = HunyuanImage(
    name="HunyuanImage",
    denoisers=("HunyuanImageTransformer2DModel",),
    layers={
        "context_embedder.*.attn": ("block", "text"),
        **DOUBLE_THEN_SINGLE,
    },
    joined="image first",
    grid=grid_of_patches,
    readers={"HunyuanImage": read_hunyuan_image, "HunyuanImageRefiner": refuse_unknown},
    preset="joint",
    names=Names(text_2="encoder_hidden_states_2"),
    guidance={"HunyuanImagePipeline": IN_TURN},  # its guiders name the branch of each call
)
