"""Stable Diffusion 3 and 3.5 (Esser et al. 2024): joint attention, the image first."""

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, join_prompts, read_source
from ...prompts.words import Source
from ..denoiser_call import grid_of_patches
from ..encoders import TextCall, read_clip, zeros
from ..family import NEGATIVE_FIRST, Family
from ..parts import Edits, ImageLatents, shifted_latents


def read_sd3(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read two CLIPs in the first 77 columns, then T5, whose columns are zeros if it is left out.
    Source: pipeline_stable_diffusion_3.py, ``encode_prompt``."""
    pipe, before = call.pipe, call.pipe.tokenizer.model_max_length
    clip = read_clip(TextCall(pipe, before, call.options), texts)
    # CLIP's columns are known; the rest of the text states is T5's, or zeros.
    length = call.length(before=before, most=512)
    if pipe.text_encoder_3 is None:
        t5 = [Prompt(text, (), zeros(length)) for text in texts]
    else:
        t5 = [read_source(pipe.tokenizer_3, Source.of(text), **filled(length)) for text in texts]
    return [join_prompts(parts, ("CLIP", "T5")) for parts in zip(clip, t5, strict=True)]


_PIPELINES = """
StableDiffusion3Pipeline StableDiffusion3Img2ImgPipeline StableDiffusion3InpaintPipeline
StableDiffusion3ControlNetPipeline StableDiffusion3ControlNetInpaintingPipeline
"""

FAMILY = Family(
    name="Stable Diffusion 3",
    denoisers=("SD3Transformer2DModel",),
    layers={
        "transformer_blocks.*.attn": ("double", "joint"),
        "transformer_blocks.*.attn2": ("double", "self"),
    },
    joined="image first",
    grid=grid_of_patches,
    half="float16",
    readers={"StableDiffusion3": read_sd3},
    text_stream=lambda model, states: model.context_embedder(states),
    preset="joint",
    guidance=dict.fromkeys(_PIPELINES.split(), NEGATIVE_FIRST),
    image_latents=ImageLatents(
        pipelines={"StableDiffusion3Pipeline": {"guidance_scale": 1.0}},
        encode=shifted_latents,
        noise="flow",
        invertible=True,
    ),
    # Measured on demo-mmdit, docs/editing.md: in the first half it has no effect there.
    edits=Edits(pipelines=("StableDiffusion3Pipeline",), depth=(0.5, 1.0), cross=0.3, self_=0.3),
)
