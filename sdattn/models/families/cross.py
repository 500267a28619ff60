"""Cross-attention to the text: PixArt, Sana and Kandinsky 5."""

import math
import re
from dataclasses import replace
from functools import cached_property, partial

from ...errors import InvalidValueError
from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..denoiser_call import Timestep, grid_of_patches
from ..encoders import (
    PLACEHOLDER,
    TextCall,
    as_cleaned,
    cleaned,
    read_captions,
    read_inside,
    refuse_unknown,
)
from ..family import Family
from ..layers import SELF_THEN_CROSS
from ..parts import IN_TURN, NEGATIVE_FIRST, NEGATIVE_FIRST_IN_CALL
from ..pipeline import Given, Model, Pipeline


def read_sana(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Gemma after an instruction; its start is kept, and as much of its end as fits. Source:
    pipeline_sana.py, ``_get_gemma_prompt_embeds`` and ``encode_prompt``."""
    tokenizer = call.pipe.tokenizer
    length = call.length()
    lines = None if call.negative else call.option("complex_human_instruction")
    if not lines:
        return read_captions(call, texts, padding_side="right")
    instruction = "\n".join(lines)
    options = filled(len(tokenizer.encode(instruction)) + length - 2)
    return [
        read_source(
            tokenizer,
            cleaned(call, text).within(instruction, ""),
            keep=lambda n: [0, *range(n - length + 1, n)],
            padding_side="right",
            **options,
        )
        for text in texts
    ]


class SprintTimestep(Timestep):
    """SanaSprint's timestep: its scheduler has angles ``a`` in [0, pi / 2], and the model gets
    ``sin a / (cos a + sin a)``. Source: pipeline_sana_sprint.py, ``__call__``."""

    @cached_property
    def _read(self) -> float:
        given = super()._read
        return math.atan2(given, 1 - given)


class Sana(Family):
    """Sana, and SanaSprint, which has the same class with an embedding of the guidance."""

    def timestep(self, model: Model, given: Given) -> Timestep:
        if model.config.guidance_embeds:
            return SprintTimestep(given["timestep"])
        return Timestep(given["timestep"], 1 / getattr(model.config, "timestep_scale", 1.0))


def read_kandinsky5(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen2.5-VL inside a template, without its first tokens, padded to the longest prompt in
    the batch; CLIP gives one pooled vector. Source: pipeline_kandinsky_t2i.py,
    ``_encode_prompt_qwen``."""
    pipe = call.pipe
    tokenizer = getattr(pipe.tokenizer, "tokenizer", pipe.tokenizer)
    drop = pipe.prompt_template_encode_start_idx
    most = call.option("max_sequence_length")
    before, _, after = pipe.prompt_template.format(PLACEHOLDER).partition(PLACEHOLDER)
    sources = [_cleaned(call, text).within(before, after) for text in texts]
    longest = max(len(tokenizer(source.text)["input_ids"]) for source in sources)
    if longest > drop + most:
        raise InvalidValueError(
            f"A {type(pipe).__name__} cuts prompts of more than {most} tokens in a way that is not "
            f"known, and the longest of {texts} makes {longest - drop}. Write less."
        )
    call.check(longest - drop, "these prompts")
    return read_inside(tokenizer, sources, drop, padding="max_length", max_length=longest)


def _cleaned(call: TextCall, text: str) -> Source:
    """Return the prompt with single spaces; refuse it if ``prompt_clean`` would change more."""
    from diffusers.pipelines.kandinsky5.pipeline_kandinsky_t2i import prompt_clean

    source = Source.of(text).strip()
    kept = [match.start() for match in re.finditer(r"\S|\s(?!\s)", source.text)]
    spaced = "".join(" " if source.text[i].isspace() else source.text[i] for i in kept)
    source = Source(text, spaced, tuple(source.origins[i] for i in kept))
    return as_cleaned(call, source, prompt_clean(text), "prompt_clean")


class Kandinsky5(Family):
    """One class of models for images and videos, which have pipelines of their own."""

    def within(self, pipeline: Pipeline) -> Family:
        is_video = any(cls.__name__ in _OF_VIDEOS for cls in type(pipeline).__mro__)
        if is_video:
            return replace(self, video=True)
        return self


_OF_VIDEOS = ("Kandinsky5T2VPipeline", "Kandinsky5I2VPipeline")
_KANDINSKY5 = ("Kandinsky5T2IPipeline", *_OF_VIDEOS)

FAMILIES = (
    # T5, in lower case: pipeline_pixart_alpha.py, encode_prompt.
    Family(
        name="PixArt",
        denoisers=("PixArtTransformer2DModel",),
        layers=SELF_THEN_CROSS,
        half="float16",
        readers={"PixArt": read_captions},
        guidance=dict.fromkeys(
            ("PixArtAlphaPipeline", "PixArtSigmaPipeline", "PixArtSigmaPAGPipeline"),
            NEGATIVE_FIRST_IN_CALL,
        ),
        text_options=("max_sequence_length", "clean_caption"),
    ),
    Sana(
        name="Sana",
        denoisers=("SanaTransformer2DModel",),
        layers={
            "transformer_blocks.*.attn1": ("block", "linear"),
            "transformer_blocks.*.attn2": ("block", "cross"),
        },
        readers={"Sana": read_sana, "SanaWM": refuse_unknown},
        guidance={
            **dict.fromkeys(("SanaPipeline", "SanaControlNetPipeline"), NEGATIVE_FIRST),
            # distilled: the guidance is an input of the model
            **dict.fromkeys(("SanaSprintPipeline", "SanaSprintImg2ImgPipeline"), IN_TURN),
        },
        text_options=("max_sequence_length", "clean_caption", "complex_human_instruction"),
    ),
    # The model first encodes the text further.
    Kandinsky5(
        name="Kandinsky 5",
        denoisers=("Kandinsky5Transformer3DModel",),
        layers={
            "text_transformer_blocks.*.self_attention": ("block", "text"),
            "visual_transformer_blocks.*.self_attention": ("block", "self"),
            "visual_transformer_blocks.*.cross_attention": ("block", "cross"),
        },
        grid=partial(grid_of_patches, axes=(1, 2, 3)),  # latents [B, frames, rows, cols, C]
        patch=2,
        fps=24,
        readers=dict.fromkeys(_KANDINSKY5, read_kandinsky5),
        guidance=dict.fromkeys(_KANDINSKY5, IN_TURN),
    ),
)
