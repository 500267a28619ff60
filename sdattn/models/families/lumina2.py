"""Lumina 2: one stream of joint attention, in each row its own text and then the image; Gemma after
a system prompt."""

from collections.abc import Sequence

from ...attention.joint_processor import Spans
from ...prompts.tokens import Prompt
from ...prompts.words import Source
from ..denoiser_call import grid_of_patches
from ..encoders import TextCall, filled_to_longest, read_inside
from ..family import IN_TURN, Family
from ..pipeline import Given, Model


def read_lumina2(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Gemma without its padding, padded again to the longest prompt in the batch; negative
    prompts are read alone. Source: pipeline_lumina2.py, ``encode_prompt`` and
    ``_get_gemma_prompt_embeds``."""
    pipe, most = call.pipe, call.option("max_sequence_length")
    system = call.option("system_prompt")
    system = pipe.system_prompt if system is None else system
    before = "" if call.negative else system + " <Prompt Start> "
    sources = [Source.of(text).within(before, "") for text in texts]
    read = read_inside(pipe.tokenizer, sources, truncation=True, max_length=most)
    return filled_to_longest(call, read, f"`max_sequence_length={most}`")


def _spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    lengths: list[int] = given["encoder_attention_mask"].sum(dim=1).tolist()
    return [(slice(length, length + cells), slice(0, length)) for length in lengths]


FAMILY = Family(
    name="Lumina 2",
    denoisers=("Lumina2Transformer2DModel",),
    layers={
        "noise_refiner.*.attn": ("block", "self"),
        "context_refiner.*.attn": ("block", "text"),
        "layers.*.attn": ("single", "joint"),
    },
    joined="text first",
    grid=grid_of_patches,
    spans=_spans,
    spans_arguments=("encoder_attention_mask",),
    timestep_unit=-1000.0,
    timestep_start=1000.0,
    readers={"Lumina2": read_lumina2},
    guidance={"Lumina2Pipeline": IN_TURN},
    text_options=("max_sequence_length", "system_prompt"),
    preset="joint",
)
