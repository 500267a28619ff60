"""HunyuanVideo 1.5: videos as one sequence, joint attention, the video first, with Qwen2.5-VL and
with ByT5, which reads quoted text."""

import re
from collections.abc import Sequence
from dataclasses import replace

from ...attention.joint_processor import Spans
from ...prompts.tokens import Prompt
from ...prompts.words import Source
from ..denoiser_call import grid_of_patches
from ..encoders import TextCall, filled_to_longest, in_chat
from ..family import IN_TURN, Family
from ..glyphs import glyph_text, is_padding, read_with_glyphs
from ..pipeline import Given, Model

# pipeline_hunyuan_video1_5.py, extract_glyph_texts
_QUOTED = '"(.*?)"|\u201c(.*?)\u201d'


def read_hunyuan_video15(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read ByT5's tokens of the quoted text, then Qwen2.5-VL's tokens of the chat without its first
    ones, padded to the longest prompt in the batch; negative prompts are read alone. Source:
    pipeline_hunyuan_video1_5.py, ``encode_prompt``; transformer_hunyuan_video15.py, ``forward``."""
    whole = in_chat(call.pipe.tokenizer, system=call.pipe.system_message)
    read = read_with_glyphs(call, texts, whole, _quoted, "num_videos_per_prompt")
    # padding is masked, and its columns are nobody's: see _spans
    read = [
        replace(one, tokens=tuple(token for token in one.tokens if not is_padding(token)))
        for one in read
    ]
    return filled_to_longest(call, read)


def _quoted(text: str) -> Source | None:
    found: dict[str, re.Match[str]] = {}
    for one in re.finditer(_QUOTED, text):
        found.setdefault(one[1] or one[2] or "", one)
    return glyph_text(text, found.values())


def _spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    """Return the spans: the video, for image-to-video its image, then both texts' real tokens."""
    image = given["image_embeds"]
    start = cells + (image.shape[1] if image.any() else 0)
    masks = given["encoder_attention_mask"], given["encoder_attention_mask_2"]
    lengths = sum(mask.bool().sum(dim=1) for mask in masks).tolist()
    return [(slice(0, cells), slice(start, start + length)) for length in lengths]


FAMILY = Family(
    name="HunyuanVideo 1.5",
    denoisers=("HunyuanVideo15Transformer3DModel",),
    layers={
        "context_embedder.token_refiner.refiner_blocks.*.attn": ("block", "text"),
        "transformer_blocks.*.attn": ("double", "joint"),
    },
    joined="image first",
    grid=grid_of_patches,
    video=True,
    fps=24,
    spans=_spans,
    spans_arguments=("encoder_attention_mask", "encoder_attention_mask_2", "image_embeds"),
    readers={"HunyuanVideo15": read_hunyuan_video15},
    # its guiders name the branch of each call
    guidance={"HunyuanVideo15Pipeline": IN_TURN},
    text_options=(),
)
