"""Qwen2.5-VL's way to read prompts: inside a template, without its first tokens, after images.

An image becomes more or fewer tokens by its size, which moves the columns of the prompt after it.
"""

import math
from dataclasses import replace
from typing import Any

from ..errors import InvalidValueError
from ..prompts.tokenizing import TEMPLATE, Token
from ..prompts.tokens import Prompt
from ..prompts.words import Source
from .encoders import PLACEHOLDER, TextCall, filled_to_longest, read_inside

IMAGE = "<|image_pad|>"  # a token of an image


def read_filled(
    call: TextCall, texts: list[str], templates: list[str], most: int | None = None, **options: Any
) -> list[Prompt]:
    """Read prompts in the place of templates' :data:`PLACEHOLDER`, without the first tokens, filled
    with zeros up to the longest prompt of the batch.

    Args:
        call: call of a pipeline with ``prompt_template_encode_start_idx``, the number of tokens
            left out.
        texts: one prompt each.
        templates: one template per prompt, as the tokenizer gets it.
        most: largest number of columns kept; None for all.
        options: further options of the tokenizer.

    Raises:
        ValueError: the text states have another number of columns.
    """
    drop, read = call.setting("prompt_template_encode_start_idx"), []

    def keep(n: int) -> range:
        return range(drop, n if most is None else min(n, drop + most))

    for text, template in zip(texts, templates, strict=True):
        before, _, after = template.partition(PLACEHOLDER)
        source = Source.of(text).within(before, after)
        read += read_inside(call.pipe.tokenizer, [source], keep=keep, **options)
    if most is None:
        return filled_to_longest(call, read, "these images")
    return filled_to_longest(call, read, f"`max_sequence_length={most}`")


def read_edit(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read whole prompts after an image, which is resized to a megapixel; in a list each prompt has
    its own image, not resized. Source: pipeline_qwenimage_edit.py, ``__call__`` and
    ``_get_qwen_prompt_embeds``."""
    given = _option(call, texts, "image", "prompt_image")
    if isinstance(given, list):
        numbers = [_tokens(call, image.size) for image in given]
    else:
        numbers = [_tokens(call, _resized(given.size, 1024 * 1024))] * len(texts)
    template = call.setting("prompt_template_encode").format(PLACEHOLDER)
    templates = [template.replace(IMAGE, IMAGE * number) for number in numbers]
    return _of_template(read_filled(call, texts, templates))


def read_edit_plus(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read whole prompts after one or more images. Source: pipeline_qwenimage_edit_plus.py,
    likewise."""
    given = _option(call, texts, "image", "condition_images")
    before = ""
    for i, image in enumerate(given if isinstance(given, list) else [given], start=1):
        number = _tokens(call, _resized(image.size, 384 * 384))
        before += f"Picture {i}: <|vision_start|>{IMAGE * number}<|vision_end|>"
    template = call.setting("prompt_template_encode").format(before + PLACEHOLDER)
    return _of_template(read_filled(call, texts, [template] * len(texts)))


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


def _of_template(read: list[Prompt]) -> list[Prompt]:
    """Mark the images' tokens as part of the template; a tokenizer takes them for end tokens."""
    return [replace(prompt, tokens=tuple(map(_named, prompt.tokens))) for prompt in read]


def _named(token: Token) -> Token:
    return replace(token, special=TEMPLATE) if token.text == IMAGE else token
