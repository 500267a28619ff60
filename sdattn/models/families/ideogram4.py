"""Ideogram 4: one stream of joint attention, in each row padding, its own text and then the image;
the negative branch is another model, which gets no text."""

from collections.abc import Sequence

from ...attention.joint_processor import Spans
from ...prompts.tokens import Prompt
from ..denoiser_call import grid_of_ids
from ..encoders import (
    TextCall,
    filled_to_longest,
    padded_in_front,
    read_inside,
    refuse_rewriting,
    rendered,
)
from ..family import IN_TURN, Family
from ..pipeline import Given, Model

# transformer_ideogram4.py
TEXT = 3  # LLM_TOKEN_INDICATOR
OFFSET = 65536  # IMAGE_POSITION_OFFSET: of the image's position ids, on each axis


def read_ideogram4(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3-VL's chat format without its padding, zeros in front that the model masks.
    Source: pipeline_ideogram4.py, ``encode_prompt``."""
    refuse_rewriting(call, "prompt_upsampling", "Make that caption first")
    tokenizer, length = call.pipe.tokenizer, call.option("max_sequence_length")

    def render(text: str) -> str:
        chat = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return str(whole)

    sources = [rendered(text, render) for text in texts]
    read = read_inside(tokenizer, sources, add_special_tokens=False)
    return filled_to_longest(call, padded_in_front(read, length, 0))


def _grid(model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid from ``position_ids`` ``[B, S, (time, row, col)]`` of text and image."""
    return grid_of_ids(model, {"img_ids": given["position_ids"]}, made=OFFSET)


def _spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    kinds = given["indicator"]  # [B, S]
    start = kinds.shape[1] - cells
    lengths = (kinds == TEXT).sum(dim=1).tolist()
    return [(slice(start, start + cells), slice(start - length, start)) for length in lengths]


FAMILY = Family(
    name="Ideogram 4",
    denoisers=("Ideogram4Transformer2DModel",),
    layers={"layers.*.attention": ("single", "joint")},
    joined="text first",
    grid=_grid,
    grid_argument="position_ids",
    spans=_spans,
    spans_arguments=("indicator",),
    timestep_unit=-1000.0,
    timestep_start=1000.0,
    patch=2,  # cut by the pipelines
    readers={"Ideogram4": read_ideogram4},
    guidance=dict.fromkeys(("Ideogram4Pipeline", "Ideogram4ModularPipeline"), IN_TURN),
    text_options=("max_sequence_length", "prompt_upsampling"),
    reads_ids="language_model.embed_tokens",
    preset="joint",
)
