"""Tencent's: HunyuanDiT, HunyuanImage 2.1, HunyuanVideo (Kong et al. 2024) and HunyuanVideo 1.5."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from ...attention.joint_processor import Spans
from ...prompts.tokenizing import PAD, Token, filled, tokenize
from ...prompts.tokens import Prompt, join_prompts, place_words, read_source
from ...prompts.words import Source
from ..denoiser_call import DenoiserCall
from ..encoders import (
    PLACEHOLDER,
    TextCall,
    filled_to_longest,
    refuse_mixed_masks,
    refuse_unknown,
    rendered,
    zeros,
)
from ..family import Family
from ..layers import DOUBLE_THEN_SINGLE
from ..parts import IN_TURN, NEGATIVE_FIRST, Names
from ..pipeline import Given, Model

# Columns of HunyuanDiT, which no option changes
BERT = 77
T5 = 256
# pipeline_hunyuanimage.py, extract_glyph_text, in its order
_QUOTED = (r"\'(.*?)\'", r"\"(.*?)\"", "\u2018(.*?)\u2019", "\u201c(.*?)\u201d")
# pipeline_hunyuan_video1_5.py, extract_glyph_texts
_QUOTED15 = '"(.*?)"|\u201c(.*?)\u201d'


def read_with_glyphs(
    call: TextCall,
    texts: list[str],
    whole: Callable[[str], Source],
    quoted: Callable[[str], Source | None],
    several: str,
) -> list[Prompt]:
    """Read ByT5's tokens of the quoted text, then the whole prompt's without the template's start,
    then the padding of both: the order in which the transformers put them.

    Args:
        whole: function from a prompt to the text that its tokenizer gets.
        quoted: function from a prompt to ByT5's text, or None if it gets none and columns are
            zeros.
        several: option for several images or videos per prompt; refused for prompts whose quoted
            texts differ in length, since columns are ordered by masks.
    """
    pipe = call.pipe
    drop = pipe.prompt_template_encode_start_idx
    read = []
    n_glyphs = set()
    for text in texts:
        every = tokenize(pipe.tokenizer, whole(text), **filled(pipe.tokenizer_max_length + drop))
        encoded = [tuple(token.id for token in every)]
        glyphs = list(zeros(pipe.tokenizer_2_max_length))
        source = quoted(text)
        if source is not None:
            glyphs = tokenize(pipe.tokenizer_2, source, **filled(pipe.tokenizer_2_max_length))
            encoded.append(tuple(token.id for token in glyphs))
        n_glyphs.add(sum(not is_padding(token) for token in glyphs))
        tokens = sorted((*glyphs, *every[drop:]), key=is_padding)  # else in their order
        prompt = place_words(pipe.tokenizer, Source.of(text), tokens)
        read.append(replace(prompt, encoded=tuple(encoded)))
    refuse_mixed_masks(call, several, n_glyphs)
    return read


def is_padding(token: Token) -> bool:
    return token.special == PAD


def glyph_text(text: str, found: Iterable[re.Match[str]]) -> Source | None:
    """Return ByT5's text, ``Text "red". Text "cat". `` for a prompt with two quoted pieces, each
    the non-empty group of its match; None if there is none."""
    joined = ""
    origins = list[int]()
    for match in found:
        group = match.lastindex or 0
        piece = Source(text, match[group], tuple(range(*match.span(group))))
        piece = piece.within('Text "', '". ')
        joined += piece.text
        origins += piece.origins
    return Source(text, joined, tuple(origins)) if joined else None


def read_hunyuan_dit(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read BERT in the first columns, then T5. Source: pipeline_hunyuandit.py,
    ``encode_prompt``."""
    pipe = call.pipe
    call.check(BERT + T5, "its two encoders")
    read = []
    for text in texts:
        bert = read_source(pipe.tokenizer, Source.of(text), **filled(BERT))
        t5 = read_source(pipe.tokenizer_2, Source.of(text), **filled(T5))
        read.append(join_prompts([bert, t5], ("BERT", "T5")))
    return read


def read_hunyuan_image(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read ByT5's tokens of the quoted text, Qwen2.5-VL's tokens of the prompt inside a template,
    then the padding of both. Source: pipeline_hunyuanimage.py, ``encode_prompt``;
    transformer_hunyuanimage.py, ``forward``."""
    columns = call.pipe.tokenizer_max_length + call.pipe.tokenizer_2_max_length
    call.check(columns, "its tokenizer_max_length plus tokenizer_2_max_length")
    template = call.pipe.prompt_template_encode.format(PLACEHOLDER)
    before, _, after = template.partition(PLACEHOLDER)

    def whole(text: str) -> Source:
        return Source.of(text).within(before, after)

    def quoted(text: str) -> Source | None:
        found = list[re.Match[str]]()
        for pattern in _QUOTED:
            found += re.finditer(pattern, text)
        return glyph_text(text, found)

    return read_with_glyphs(call, texts, whole, quoted, "num_images_per_prompt")


class HunyuanImage(Family):
    """A family whose two text encoders share one sequence of columns."""

    def read_call(self, model: Model, args: tuple[object, ...], kwargs: Given) -> DenoiserCall:
        call = super().read_call(model, args, kwargs)
        if model.context_embedder_2 is None:
            return replace(call, text_2=None)
        return call

    def cell(self, model: Model) -> int:
        return int(model.config.patch_size[-1])


def read_hunyuan_video15(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read ByT5's tokens of the quoted text, then Qwen2.5-VL's tokens of the chat without its first
    ones, padded to the longest prompt in the batch; negative prompts are read alone. Source:
    pipeline_hunyuan_video1_5.py, ``encode_prompt``; transformer_hunyuan_video15.py, ``forward``."""
    pipe = call.pipe

    def render(text: str) -> str:
        roles = {"system": pipe.system_message, "user": text}
        chat = [{"role": role, "content": content} for role, content in roles.items()]
        whole = pipe.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return str(whole)

    whole = partial(rendered, render=render)
    read = read_with_glyphs(call, texts, whole, _quoted15, "num_videos_per_prompt")
    # padding is masked, and its columns are nobody's: see _spans15
    without_padding = []
    for one in read:
        tokens = tuple(token for token in one.tokens if not is_padding(token))
        without_padding.append(replace(one, tokens=tokens))
    return filled_to_longest(call, without_padding)


def _quoted15(text: str) -> Source | None:
    found: dict[str, re.Match[str]] = {}
    for one in re.finditer(_QUOTED15, text):
        found.setdefault(one[1] or one[2] or "", one)
    return glyph_text(text, found.values())


def _spans15(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    """Return the spans: the video, for image-to-video its image, then both texts' real tokens."""
    image = given["image_embeds"]
    start = cells + (image.shape[1] if image.any() else 0)
    masks = [given["encoder_attention_mask"], given["encoder_attention_mask_2"]]
    lengths = sum(mask.bool().sum(dim=1) for mask in masks).tolist()
    return [(slice(0, cells), slice(start, start + length)) for length in lengths]


FAMILIES = (
    # cross-attention, with rotated queries
    Family(
        name="HunyuanDiT",
        denoisers=("HunyuanDiT2DModel",),
        layers={"blocks.*.attn1": ("block", "self"), "blocks.*.attn2": ("block", "cross")},
        half="float16",
        readers={"HunyuanDiT": read_hunyuan_dit},
        guidance=dict.fromkeys(
            ("HunyuanDiTPipeline", "HunyuanDiTControlNetPipeline"), NEGATIVE_FIRST
        ),
        text_options=(),
        names=Names(text_2="encoder_hidden_states_t5"),
    ),
    HunyuanImage(
        name="HunyuanImage",
        denoisers=("HunyuanImageTransformer2DModel",),
        layers={"context_embedder.*.attn": ("block", "text"), **DOUBLE_THEN_SINGLE},
        joined="image first",
        readers={"HunyuanImage": read_hunyuan_image, "HunyuanImageRefiner": refuse_unknown},
        preset="joint",
        names=Names(text_2="encoder_hidden_states_2"),
        guidance={"HunyuanImagePipeline": IN_TURN},  # its guiders name the branch of each call
    ),
    Family(
        name="HunyuanVideo",
        denoisers=("HunyuanVideoTransformer3DModel",),
        layers={
            "context_embedder.token_refiner.refiner_blocks.*.attn": ("block", "text"),
            **DOUBLE_THEN_SINGLE,
        },
        joined="image first",
        video=True,
        fps=24,
        readers={
            "HunyuanVideoImageToVideo": refuse_unknown,  # Llava's, behind the tokens of an image
            "HunyuanVideoFramepack": refuse_unknown,
        },
        guidance=dict.fromkeys(
            ("HunyuanVideoPipeline", "HunyuanSkyreelsImageToVideoPipeline"), IN_TURN
        ),
        text_options=("max_sequence_length", "prompt_template"),
    ),
    Family(
        name="HunyuanVideo 1.5",
        denoisers=("HunyuanVideo15Transformer3DModel",),
        layers={
            "context_embedder.token_refiner.refiner_blocks.*.attn": ("block", "text"),
            "transformer_blocks.*.attn": ("double", "joint"),
        },
        joined="image first",
        video=True,
        fps=24,
        spans=_spans15,
        spans_arguments=("encoder_attention_mask", "encoder_attention_mask_2", "image_embeds"),
        readers={"HunyuanVideo15": read_hunyuan_video15},
        # its guiders name the branch of each call
        guidance={"HunyuanVideo15Pipeline": IN_TURN},
        text_options=(),
    ),
)
