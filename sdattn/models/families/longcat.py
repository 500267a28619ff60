"""LongCat-Image: FLUX.1's joint attention with Qwen2.5-VL, quoted text letter by letter."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ...errors import InvalidValueError
from ...prompts.tokenizing import PAD, Token, tokenize
from ...prompts.tokens import Prompt, place_words
from ...prompts.words import Source
from ..denoiser_call import grid_of_ids
from ..encoders import TextCall, refuse_rewriting, refuse_unknown
from ..family import IN_TURN
from .flux import flux_like


def read_longcat(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen2.5-VL inside a template whose columns are all dropped. Source:
    pipeline_longcat_image.py, ``_encode_prompt``."""
    pipe = call.pipe
    how = "Call pipe.rewire_prompt(prompt, pipe.device) yourself"
    refuse_rewriting(call, "enable_prompt_rewrite", how)
    if call.columns not in (None, pipe.tokenizer_max_length):
        raise call.unexplained(f"tokenizer_max_length {pipe.tokenizer_max_length} makes as many")
    before, after = (
        tuple(pipe.tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in (pipe.prompt_template_encode_prefix, pipe.prompt_template_encode_suffix)
    )
    read = []
    for text in texts:
        parts = (tokenize(pipe.tokenizer, part, add_special_tokens=False) for part in _parts(text))
        columns = _filled(call, [token for tokens in parts for token in tokens])
        ids = tuple(token.id for token in columns)
        prompt = place_words(pipe.tokenizer, Source.of(text), columns)
        read.append(replace(prompt, encoded=((*before, *ids, *after),)))
    return read


def _parts(text: str) -> Iterator[Source]:
    """Split a prompt into the parts that are tokenized alone."""
    from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation

    parts = split_quotation(text)
    if "".join(part for part, _ in parts) != text:
        raise InvalidValueError(
            f"LongCat-Image mixes up the apostrophes of {text!r} when it looks for quoted text. "
            "Write all words but one without."
        )
    start = 0
    for part, is_quoted in parts:
        for piece in part if is_quoted else [part]:
            end = start + len(piece)
            yield Source(text, piece, tuple(range(start, end)))
            start = end


def _filled(call: TextCall, tokens: list[Token]) -> list[Token]:
    tokenizer, length = call.pipe.tokenizer, call.pipe.tokenizer_max_length
    kept = tokens[:length]
    pads = [Token(tokenizer.pad_token_id, tokenizer.pad_token, 0, 0, PAD)] * (length - len(kept))
    return pads + kept if tokenizer.padding_side == "left" else kept + pads


FAMILY = flux_like(
    name="LongCat-Image",
    denoisers=("LongCatImageTransformer2DModel",),
    grid=partial(grid_of_ids, made=1),
    readers={"LongCatImage": read_longcat, "LongCatImageEdit": refuse_unknown},
    guidance=dict.fromkeys(("LongCatImagePipeline", "LongCatImageEditPipeline"), IN_TURN),
    text_options=("enable_prompt_rewrite",),
)
