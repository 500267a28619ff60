"""Kandinsky 5, images and videos: cross-attention to Qwen2.5-VL, which the model first encodes
further."""

import re
from dataclasses import replace
from functools import partial

from ...errors import InvalidValueError
from ...prompts.tokens import Prompt
from ...prompts.words import Source
from ..denoiser_call import grid_of_patches
from ..encoders import PLACEHOLDER, TextCall, as_cleaned, read_inside
from ..family import IN_TURN, Family
from ..pipeline import Pipeline


def read_kandinsky5(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen2.5-VL inside a template, without its first tokens, padded to the longest prompt in
    the batch; CLIP gives one pooled vector. Source: pipeline_kandinsky_t2i.py,
    ``_encode_prompt_qwen``."""
    pipe, tokenizer = call.pipe, getattr(call.pipe.tokenizer, "tokenizer", call.pipe.tokenizer)
    drop, most = pipe.prompt_template_encode_start_idx, call.option("max_sequence_length")
    before, _, after = pipe.prompt_template.format(PLACEHOLDER).partition(PLACEHOLDER)
    sources = [_cleaned(call, text).within(before, after) for text in texts]
    longest = max(len(tokenizer(source.text)["input_ids"]) for source in sources)
    if longest > drop + most:
        raise InvalidValueError(
            f"A {type(pipe).__name__} cuts prompts of more than {most} tokens in a way that is not "
            f"known, and the longest of {texts} makes {longest - drop}. Write less."
        )
    if call.columns not in (None, longest - drop):
        raise call.unexplained(f"these prompts makes {longest - drop}")
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
        return replace(self, video=True) if is_video else self


_OF_VIDEOS = ("Kandinsky5T2VPipeline", "Kandinsky5I2VPipeline")

FAMILY = Kandinsky5(
    name="Kandinsky 5",
    denoisers=("Kandinsky5Transformer3DModel",),
    layers={
        "text_transformer_blocks.*.self_attention": ("block", "text"),
        "visual_transformer_blocks.*.self_attention": ("block", "self"),
        "visual_transformer_blocks.*.cross_attention": ("block", "cross"),
    },
    grid=partial(grid_of_patches, first=1),  # latents [B, frames, rows, cols, C]
    patch=2,
    fps=24,
    readers=dict.fromkeys(("Kandinsky5T2IPipeline", *_OF_VIDEOS), read_kandinsky5),
    guidance=dict.fromkeys(("Kandinsky5T2IPipeline", *_OF_VIDEOS), IN_TURN),
)
