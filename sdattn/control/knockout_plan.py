from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..attention.joint_processor import Queries
from ..errors import InvalidTypeError, InvalidValueError, OptionError, RunError
from ..hooks.run_part import Span
from ..models.call_facts import images_a_prompt
from ..models.denoiser_call import Size
from ..models.layers import LayerSelection, find_denoiser
from ..models.pipeline import Pipeline
from ..models.pipeline_call import (
    call_pipeline,
    checked_options,
    images_of,
    is_of_images,
    named_bar,
)
from ..models.reading import read_prompts
from ..models.values import seeds_of
from ..prompts.tokens import Prompt
from .removal import Columns, Removal, check_removal


@dataclass(frozen=True)
class KnockoutPlan:
    pipe: Pipeline
    prompt: Prompt
    seed: int
    layers: LayerSelection
    steps: Span
    options: dict[str, Any]
    queries: Queries | None = None


def prepare(
    pipe: Pipeline,
    prompt: str,
    seed: int | None,
    layers: LayerSelection,
    steps: Span,
    options: dict[str, Any],
    queries: Queries | None = None,
) -> KnockoutPlan:
    """Check everything that :func:`knockouts` can refuse before the run; see there."""
    if find_denoiser(pipe).pipeline is None or not isinstance(prompt, str):
        raise InvalidTypeError(
            f"A knockout draws images of one prompt, but was given a {type(pipe).__name__} and a "
            f"{type(prompt).__name__}. Pass a pipeline, not its model, and one text."
        )
    options = checked_options(pipe, options)
    if options.get("padding_mask_crop") is not None:
        text = (
            "a knockout draws a batch in which each image has an image of its own, and a "
            f"{type(pipe).__name__} crops one alone. Crop the image and the mask yourself, and "
            "leave it out."
        )
        raise OptionError("padding_mask_crop", options["padding_mask_crop"], text)
    if (made := images_a_prompt(pipe, options)) != 1:
        raise InvalidValueError(
            f"This run makes {made} images per prompt, but a knockout compares one. Leave out "
            "num_images_per_prompt and call it once for each seed; videos are not supported."
        )
    [read] = read_prompts(pipe, prompt, **options)
    check_removal(pipe, layers, steps, queries)
    [seed] = seeds_of(seed)
    return KnockoutPlan(pipe, read, seed, layers, steps, options, queries)


def draw(plan: KnockoutPlan, rows: Sequence[Columns]) -> tuple[list[Image.Image], Size]:
    """Draw one batch, each row without its own columns; return images, and the latent's (rows,
    cols)."""
    n_text = len(plan.prompt.tokens)
    removal = Removal(plan.pipe, rows, n_text, plan.layers, plan.steps, plan.queries)
    options = {name: _for_each(name, option, len(rows)) for name, option in plan.options.items()}
    with removal, named_bar(plan.pipe, "without words"):
        texts, seeds = [plan.prompt.text] * len(rows), [plan.seed] * len(rows)
        result = call_pipeline(plan.pipe, texts, seeds, options)
    if any(getattr(result, "nsfw_content_detected", None) or []):
        raise RunError(
            "The pipeline's safety checker blanked an image, so where it changed is not known. "
            "Choose another seed, or a pipeline without a checker."
        )
    return images_of(result), removal.grid


def _for_each(name: str, value: Any, rows: int) -> Any:
    """Return an option for a batch: a value for one image is repeated for each row. Pipelines do so
    too, but inpainting would take its noise from the first row's generator alone."""
    if not is_of_images(name):
        return value
    if isinstance(value, (np.ndarray, Tensor)) and value.ndim == 4 and len(value) == 1:
        return value.repeat(rows, 0) if isinstance(value, np.ndarray) else torch.cat([value] * rows)
    if isinstance(value, list) and len(value) > 1:
        raise InvalidValueError(
            f"{name} has {len(value)} entries, but a knockout draws one image. Pass a single one."
        )
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    return [value] * rows if isinstance(value, (str, Image.Image)) else value
