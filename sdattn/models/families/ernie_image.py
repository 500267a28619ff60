"""ERNIE-Image: one stream of joint attention, the image first, with Ministral."""

from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..denoiser_call import grid_of_patches
from ..encoders import TextCall, refuse_rewriting, zero_filled
from ..family import NEGATIVE_FIRST, Family
from ..parts import Names


def read_ernie(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read each prompt alone, then zeros up to the longest in the batch, negative prompts included.
    Source: pipeline_ernie_image.py, ``encode_prompt`` and ``_pad_text``."""
    pipe = call.pipe
    if None not in (pipe.pe, pipe.pe_tokenizer):
        refuse_rewriting(call, "use_pe", "Take its revised_prompts of a run")
    read = [read_source(pipe.tokenizer, Source.of(text), truncation=True) for text in texts]
    longest = max(len(prompt.tokens) for prompt in read)
    columns = longest if call.columns is None else call.columns
    if columns < longest:
        raise call.unexplained(f"the longest of {texts} makes {longest}, or more")
    return zero_filled(read, columns)


FAMILY = Family(
    name="ERNIE-Image",
    denoisers=("ErnieImageTransformer2DModel",),
    layers={"layers.*.self_attention": ("single", "joint")},
    joined="image first",
    grid=grid_of_patches,
    half="float16",
    readers={"ErnieImage": read_ernie},
    preset="joint",
    guidance={"ErnieImagePipeline": NEGATIVE_FIRST},
    text_options=("use_pe",),
    names=Names(text="text_bth"),
)
