"""Qwen-Image and its variants for editing: joint attention; prompts inside a template."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...errors import InvalidTypeError, InvalidValueError, Message
from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..encoders import PLACEHOLDER, TextCall, refuse_unknown, zeros
from ..family import IN_TURN, Edits, Family
from ..image_latents import ImageLatents, packed, vae_latents


def read_qwen(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Qwen2.5-VL inside a template, without its first tokens, cut, and filled with zeros up to the
    longest prompt of the batch. Source: pipeline_qwenimage.py, ``_get_qwen_prompt_embeds``."""
    pipe, tokenizer = call.pipe, call.pipe.tokenizer
    drop, most = pipe.prompt_template_encode_start_idx, call.option("max_sequence_length")
    before, _, after = pipe.prompt_template_encode.format(PLACEHOLDER).partition(PLACEHOLDER)
    read = [
        read_source(
            tokenizer,
            Source.of(text).within(before, after),
            keep=lambda n: range(drop, min(n, drop + most)),
            truncation=True,
            max_length=pipe.tokenizer_max_length + drop,
        )
        for text in texts
    ]
    longest = max(len(prompt.tokens) for prompt in read)
    if call.columns not in (None, longest):
        found = "{max_sequence_length} makes {0} of {1}, as many as the longest needs"
        raise call.unexplained(Message(found, longest, texts, max_sequence_length=most))
    return [
        replace(prompt, tokens=prompt.tokens + zeros(longest - len(prompt.tokens)))
        for prompt in read
    ]


def refuse_images(call: TextCall, texts: list[str]) -> list[Prompt]:
    """The reader of pipelines whose columns depend on pictures."""
    raise InvalidTypeError(
        f"A {type(call.pipe).__name__} has its text encoder read images before the prompt, so the "
        f"columns of {texts[0]!r} depend on them. Pass labels, {{'cat': [2]}} say, and columns=."
    )


def _grid_of_shapes(_model: Any, given: Mapping[str, Any]) -> tuple[int, ...]:
    """The grid of packed patches with ``img_shapes``: for each row of the batch the shapes
    (frames, rows, cols) of its pictures, the one that is made first, or that one alone.

    Raises:
        ValueError: several frames, which are layers of one picture.
    """
    shape = given["img_shapes"][0]
    frames, rows, cols = shape if isinstance(shape[0], int) else shape[0]
    if frames != 1:
        raise InvalidValueError(
            f"A QwenImageTransformer2DModel was called with a grid of {frames} layers of "
            f"{rows}x{cols} cells in one sequence. Maps are of single pictures: make one."
        )
    return rows, cols


def _encode(pipe: Any, pixels: Tensor) -> Tensor:
    """One frame of a VAE for videos, ``(z - mean) / std`` by channel, packed. Source:
    pipeline_qwenimage_img2img.py, ``_encode_vae_image``."""
    latents, config = vae_latents(pipe.vae, pixels[:, :, None])[:, :, 0], pipe.vae.config
    known = latents.new_tensor([config.latents_mean, config.latents_std])
    mean, std = known[..., None, None]  # [C, 1, 1] each
    return packed(pipe, (latents - mean) / std)


_PIPELINES = """
QwenImagePipeline QwenImageImg2ImgPipeline QwenImageInpaintPipeline QwenImageControlNetPipeline
QwenImageControlNetInpaintPipeline QwenImageEditPipeline QwenImageEditInpaintPipeline
QwenImageEditPlusPipeline
"""

FAMILY = Family(
    name="Qwen-Image",
    denoisers=("QwenImageTransformer2DModel",),
    layers={"transformer_blocks.*.attn": ("double", "joint")},
    joined="text first",
    grid=_grid_of_shapes,
    timestep_unit=1000.0,
    patch=2,  # cut by the pipelines
    readers={"QwenImage": read_qwen, "QwenImage21": refuse_unknown, "QwenImageEdit": refuse_images},
    preset="joint",
    guidance=dict.fromkeys(_PIPELINES.split(), IN_TURN),
    image_latents=ImageLatents(
        pipelines={"QwenImagePipeline": {"true_cfg_scale": 1.0}}, encode=_encode, noise="flow"
    ),
    edits=Edits(pipelines=("QwenImagePipeline",), cross=0.3, self_=0.3),  # SD3's
)
