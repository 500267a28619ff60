"""HunyuanImage 2.1: joint attention, the picture first, to Qwen2.5-VL and to ByT5, which reads
quoted text."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import OptionError
from ...prompts.tokenizing import PAD, Token, filled, tokenize
from ...prompts.tokens import Prompt, place_words
from ...prompts.words import Source
from ..attention_layer import DOUBLE_THEN_SINGLE
from ..denoiser_call import DenoiserCall, arguments
from ..encoders import PLACEHOLDER, TextCall, refuse_unknown, zeros
from ..family import IN_TURN, Family

# pipeline_hunyuanimage.py, extract_glyph_text, in its order
_QUOTED = (r"\'(.*?)\'", r"\"(.*?)\"", "\u2018(.*?)\u2019", "\u201c(.*?)\u201d")


def read_hunyuan_image(call: TextCall, texts: list[str]) -> list[Prompt]:
    """ByT5's tokens of the quoted text, Qwen2.5-VL's of the prompt inside a template, then the
    padding of both. Source: pipeline_hunyuanimage.py, ``encode_prompt``;
    transformer_hunyuanimage.py, ``forward``.

    Raises:
        ValueError: several images of each of several prompts whose quoted texts differ in length.
            ``encode_prompt`` repeats the masks in another order than the text states, and the
            transformer orders the columns by the masks.
    """
    pipe = call.pipe
    drop = pipe.prompt_template_encode_start_idx
    lengths = pipe.tokenizer_max_length, pipe.tokenizer_2_max_length
    if call.columns not in (None, sum(lengths)):
        raise call.unexplained(
            f"its tokenizer_max_length and tokenizer_2_max_length make {lengths}"
        )
    before, _, after = pipe.prompt_template_encode.format(PLACEHOLDER).partition(PLACEHOLDER)
    read, n_glyphs = [], set()
    for text in texts:
        source = Source.of(text).within(before, after)
        every = tokenize(pipe.tokenizer, source, **filled(lengths[0] + drop))
        encoded = [tuple(token.id for token in every)]
        glyphs, quoted = list(zeros(lengths[1])), _quoted(text)
        if quoted is not None:
            glyphs = tokenize(pipe.tokenizer_2, quoted, **filled(lengths[1]))
            encoded.append(tuple(token.id for token in glyphs))
        n_glyphs.add(sum(not _is_padding(token) for token in glyphs))
        tokens = sorted((*glyphs, *every[drop:]), key=_is_padding)  # else in their order
        prompt = place_words(pipe.tokenizer, Source.of(text), tokens)
        read.append(replace(prompt, encoded=tuple(encoded)))
    images = call.options.get("num_images_per_prompt") or 1
    if len(n_glyphs) > 1 and images > 1:
        advice = "a {0} gives images of prompts whose quoted texts differ in length, as those of "
        advice += "{1}, each other's columns. Draw one image a prompt, or each prompt by itself."
        raise OptionError("num_images_per_prompt", images, advice, type(pipe).__name__, texts)
    return read


def _is_padding(token: Token) -> bool:
    return token.special == PAD


def _quoted(text: str) -> Source | None:
    """What ByT5 gets: ``Text "red". Text "cat". `` of a prompt with two pieces in quotes."""
    found = [match for pattern in _QUOTED for match in re.finditer(pattern, text)]
    parts = [
        Source(text, match[1], tuple(range(*match.span(1)))).within('Text "', '". ')
        for match in found
    ]
    if not parts:
        return None
    joined = "".join(part.text for part in parts)
    return Source(text, joined, tuple(origin for part in parts for origin in part.origins))


def _grid(model: Any, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Of latents ``[B, C, (frames,) rows, cols]``."""
    sizes, patches = given["hidden_states"].shape[2:], model.config.patch_size
    return tuple(size // patch for size, patch in zip(sizes, patches, strict=True))


class HunyuanImage(Family):
    """The columns of both text encoders are one sequence."""

    def read_call(
        self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> DenoiserCall:
        call = super().read_call(model, args, kwargs)
        if model.context_embedder_2 is None:
            return call
        return replace(call, text_2=arguments(model, args, kwargs).get("encoder_hidden_states_2"))

    def cell(self, model: Any) -> int:
        return int(model.config.patch_size[-1])


FAMILY = HunyuanImage(
    name="HunyuanImage",
    denoisers=("HunyuanImageTransformer2DModel",),
    layers={
        "context_embedder.*.attn": ("block", "text"),
        **DOUBLE_THEN_SINGLE,
    },
    joined="picture first",
    grid=_grid,
    half="bfloat16",
    readers={"HunyuanImage": read_hunyuan_image, "HunyuanImageRefiner": refuse_unknown},
    preset="joint",
    guidance={"HunyuanImagePipeline": IN_TURN},  # its guiders name the branch of each call
)
