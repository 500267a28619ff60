"""Qwen-Image, its variants for editing, and Qwen-Image 2.1; prompts inside a template.

In variants for editing the text encoder reads images before the prompt. An image becomes more or
fewer tokens by its size, which moves the columns of the prompt after it.
"""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...errors import InvalidTypeError, InvalidValueError
from ...prompts.tokenizing import TEMPLATE
from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..call_options import setting_of
from ..encode_prompt import read_encoded
from ..encoders import TextCall, filled_to_longest
from ..family import Family
from ..parts import IN_TURN, Edits, ImageLatents, packed, standardised, text_then_image, vae_latents
from ..pipeline import Given, Model, Pipeline

IMAGE = "<|image_pad|>"  # a token of an image


def _read_filled(call: TextCall, texts: list[str], templates: list[str]) -> list[Prompt]:
    """Read prompts in their templates' ``{}``, without the first tokens, filled with zeros up to
    the longest; mark the images' tokens, which a tokenizer takes for end tokens."""
    drop = setting_of(call.pipe, "prompt_template_encode_start_idx")
    read = []
    for text, template in zip(texts, templates, strict=True):
        before, _, after = template.partition("{}")
        source = Source.of(text).within(before, after)
        prompt = read_source(call.pipe.tokenizer, source, keep=lambda n: range(drop, n))
        tokens = []
        for token in prompt.tokens:
            tokens.append(replace(token, special=TEMPLATE) if token.text == IMAGE else token)
        read.append(replace(prompt, tokens=tuple(tokens)))
    return filled_to_longest(call, read, "these images")


def read_edit(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read whole prompts after an image, which is resized to a megapixel; in a list each prompt has
    its own image, not resized. Source: pipeline_qwenimage_edit.py, ``__call__`` and
    ``_get_qwen_prompt_embeds``."""
    given = _option(call, texts, "image", "prompt_image")
    if isinstance(given, list):
        numbers = [_tokens(call, image.size) for image in given]
    else:
        numbers = [_tokens(call, _resized(given.size, 1024 * 1024))] * len(texts)
    template = setting_of(call.pipe, "prompt_template_encode")
    templates = [template.replace(IMAGE, IMAGE * number) for number in numbers]
    return _read_filled(call, texts, templates)


def read_edit_plus(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read whole prompts after one or more images. Source: pipeline_qwenimage_edit_plus.py,
    likewise."""
    given = _option(call, texts, "image", "condition_images")
    before = ""
    for i, image in enumerate(given if isinstance(given, list) else [given], start=1):
        number = _tokens(call, _resized(image.size, 384 * 384))
        before += f"Picture {i}: <|vision_start|>{IMAGE * number}<|vision_end|>"
    template = setting_of(call.pipe, "prompt_template_encode").replace("{}", before + "{}")
    return _read_filled(call, texts, [template] * len(texts))


def _option(call: TextCall, texts: list[str], *names: str) -> Any:
    """Return a call's images: its argument, or the running call's variable of that name."""
    given = next((call.options[name] for name in names if call.options.get(name) is not None), None)
    if given is None:
        raise InvalidValueError(
            f"The text encoder of a {type(call.pipe).__name__} reads images before the prompt, so "
            f"the columns of {texts[0]!r} depend on their size. Pass image=, the images of the "
            "run; or labels, for example {'cat': [2]}, and columns=."
        )
    return given


def _resized(size: tuple[int, int], area: int) -> tuple[int, int]:
    """Return the (width, height) to which an image is resized, about ``area`` pixels
    (``calculate_dimensions`` of pipeline_qwenimage_edit.py)."""
    ratio = size[0] / size[1]
    width = math.sqrt(area * ratio)
    return round(width / 32) * 32, round(width / ratio / 32) * 32


def _tokens(call: TextCall, size: tuple[int, int]) -> int:
    """Return the number of tokens for (width, height) (processing_qwen2_5_vl.py,
    ``replace_image_token``)."""
    processor = call.pipe.processor.image_processor
    patches = processor.get_number_of_image_patches(size[1], size[0], {})
    return int(patches // processor.merge_size**2)


def _grid_of_shapes(_model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid from ``img_shapes``: per row the (frames, rows, cols) of its images, the
    generated one first, or of that one alone."""
    shape = given["img_shapes"][0]
    return tuple(shape if isinstance(shape[0], int) else shape[0])


def _encode(pipe: Pipeline, pixels: Tensor) -> Tensor:
    """Encode to one frame of a video VAE, packed (pipeline_qwenimage_img2img.py,
    ``_encode_vae_image``)."""
    latents = vae_latents(pipe.vae, pixels[:, :, None])[:, :, 0]
    return packed(pipe, standardised(pipe, latents))


def read_qwen21(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read prompts without images."""
    if call.options.get("image") is not None:
        raise _of_images(type(call.pipe).__name__)
    return read_encoded(call, texts)


def _of_images(name: str) -> InvalidTypeError:
    return InvalidTypeError(
        f"A {name} was given images, whose tokens stand among the text's, so which column is which "
        "token is not known. Draw from the text alone."
    )


def _last_grid(model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid from ``img_shapes``, per row the (frames, rows, cols) of its images, the
    generated one last."""
    *images, own = given["img_shapes"][0]
    if images:
        raise _of_images(type(model).__name__)
    return tuple(own)


_PIPELINES = """
QwenImagePipeline QwenImageImg2ImgPipeline QwenImageInpaintPipeline QwenImageControlNetPipeline
QwenImageControlNetInpaintPipeline QwenImageEditPipeline QwenImageEditInpaintPipeline
QwenImageEditPlusPipeline
"""

FAMILIES = (
    Family(
        name="Qwen-Image",
        denoisers=("QwenImageTransformer2DModel",),
        layers={"transformer_blocks.*.attn": ("double", "joint")},
        joined="text first",
        grid=_grid_of_shapes,
        timestep_unit=1000.0,
        patch=2,  # cut by the pipelines
        readers={
            "QwenImageEdit": read_edit,
            "QwenImageEditPlus": read_edit_plus,
        },
        # the images that the text encoder gets are variables of the running call
        text_options=("max_sequence_length", "prompt_image", "condition_images"),
        preset="joint",
        guidance=dict.fromkeys(_PIPELINES.split(), IN_TURN),
        image_latents=ImageLatents(
            pipelines={"QwenImagePipeline": {"true_cfg_scale": 1.0}}, encode=_encode, noise="flow"
        ),
        edits=Edits(pipelines=("QwenImagePipeline",), cross=0.3, self_=0.3),  # SD3's
    ),
    # One stream, in which the image attends to the text and itself, and the text to itself alone;
    # after the first step the text's keys come from a cache. No other layer of the text is watched.
    Family(
        name="Qwen-Image 2.1",
        denoisers=("QwenImage21Transformer2DModel",),
        layers={"transformer_blocks.*.attn": ("single", "joint")},
        joined="text first",
        grid=_last_grid,
        spans=text_then_image,
        caches_text=True,
        timestep_unit=1000.0,
        patch=1,
        size_unit=32,
        readers={"QwenImage21": read_qwen21},
        guidance=dict.fromkeys(("QwenImage21Pipeline", "QwenImage21TurboModularPipeline"), IN_TURN),
        text_options=("image",),
        preset="joint",
    ),
)
