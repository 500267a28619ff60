"""LongCat-Image: FLUX.1's joint attention to Qwen2.5-VL, quoted text letter by letter."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ...errors import InvalidValueError
from ...prompts.tokenizing import PAD, Token, tokenize
from ...prompts.tokens import Prompt, place_words
from ...prompts.words import Source
from ..attention_layer import DOUBLE_THEN_SINGLE
from ..denoiser_call import grid_of_ids
from ..encoders import TextCall, refuse_unknown
from ..family import IN_TURN, Family


def read_longcat(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Qwen2.5-VL inside a template of which no column is kept. Source: pipeline_longcat_image.py,
    ``_encode_prompt``.

    Raises:
        ValueError: the pipeline would rewrite the prompt.
    """
    pipe = call.pipe
    if call.option("enable_prompt_rewrite"):
        raise InvalidValueError(
            f"A {type(pipe).__name__} rewrites the prompt before it is read. Call "
            "pipe.rewire_prompt(prompt, pipe.device) yourself, pass what it gives as the prompt, "
            "and enable_prompt_rewrite=False, to the run and here."
        )
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
    """The parts of a prompt that are tokenized by themselves."""
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


FAMILY = Family(
    name="LongCat-Image",
    denoisers=("LongCatImageTransformer2DModel",),
    layers=DOUBLE_THEN_SINGLE,
    joined="text first",
    grid=partial(grid_of_ids, made=1),
    grid_argument="img_ids",
    timestep_unit=1000.0,
    patch=2,  # cut by the pipelines; the model's own patches are of 1
    size_unit=16,
    half="bfloat16",
    readers={"LongCatImage": read_longcat, "LongCatImageEdit": refuse_unknown},
    preset="joint",
    guidance=dict.fromkeys(("LongCatImagePipeline", "LongCatImageEditPipeline"), IN_TURN),
    text_options=("enable_prompt_rewrite",),
)
