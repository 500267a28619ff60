"""Wan 2.1 and 2.2: films as one sequence, cross-attention to UMT5."""

from collections.abc import Mapping
from typing import Any

from ...errors import InvalidValueError, Message
from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..encoders import TextCall, zero_filled
from ..family import IN_TURN, Family


def read_wan(call: TextCall, texts: list[str]) -> list[Prompt]:
    """UMT5; behind the prompt zeros, which draw attention, since no mask keeps them out. Source:
    pipeline_wan.py, ``prompt_clean`` and ``_get_t5_prompt_embeds``."""
    length = call.length()
    options: dict[str, Any] = {"truncation": True, "max_length": length}
    read = [read_source(call.pipe.tokenizer, _cleaned(call, text), **options) for text in texts]
    return zero_filled(read, length)


def _cleaned(call: TextCall, text: str) -> Source:
    """The prompt as the pipeline leaves it, if it only cuts off spaces at the ends."""
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    source, cleaned = Source.of(text).strip(), prompt_clean(text)
    if cleaned != source.text:
        advice = "A {0} reads {1!r} for {2!r}. Pass that as the prompt."
        raise InvalidValueError(Message(advice, type(call.pipe).__name__, cleaned, text))
    return source


def _grid(model: Any, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Of a latent ``[B, C, frames, rows, cols]`` that the model cuts into patches itself."""
    sizes = zip(given["hidden_states"].shape[2:], model.config.patch_size, strict=True)
    return tuple(cells // patch for cells, patch in sizes)


FAMILY = Family(
    name="Wan",
    denoisers=("WanTransformer3DModel",),
    layers={"blocks.*.attn1": ("block", "self"), "blocks.*.attn2": ("block", "cross")},
    grid=_grid,
    film=True,
    fps=16,
    patch=2,
    size_unit=16,
    half="bfloat16",
    readers={"Wan": read_wan},
    # Of pictures to film, the layers of Wan 2.1 attend to a picture too.
    guidance={"WanPipeline": IN_TURN},
)
