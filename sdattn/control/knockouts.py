"""Causes, not correlations: what an image loses when the model may not look at a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..attention.joint_processor import Queries
from ..errors import InvalidTypeError, InvalidValueError, RunError
from ..files.terminal import shorter
from ..follow.run_part import Span
from ..maps.heatmap import Heatmap
from ..maps.notebook import figures_of
from ..maps.requirements import columns_of
from ..models.denoiser import find_denoiser
from ..models.denoiser_call import Size
from ..models.facts import images_a_prompt
from ..models.layers import LayerSelection
from ..models.pipeline import Pipeline
from ..models.pipeline_call import (
    call_pipeline,
    checked_options,
    images_of,
    is_of_images,
    named_bar,
    one_at_a_time,
)
from ..models.reading import read_prompts
from ..models.threads import few_threads
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
    queries: Queries | None
    options: dict[str, Any]


def prepare(
    pipe: Pipeline,
    prompt: str,
    seed: int | None,
    *,
    layers: LayerSelection = None,
    steps: Span,
    queries: Queries | None = None,
    options: dict[str, Any],
) -> KnockoutPlan:
    """Check everything that :func:`knockout` can refuse before the run; see there."""
    if find_denoiser(pipe).pipeline is None or not isinstance(prompt, str):
        raise InvalidTypeError(
            f"A knockout draws images of one prompt, but was given a {type(pipe).__name__} and a "
            f"{type(prompt).__name__}. Pass a pipeline, not its model, and one text."
        )
    options = checked_options(pipe, options)
    if (made := images_a_prompt(pipe, options)) != 1:
        raise InvalidValueError(
            f"This run makes {made} images per prompt, but a knockout compares one. Leave out "
            "num_images_per_prompt and call it once for each seed; videos are not supported."
        )
    [read] = read_prompts(pipe, prompt, **options)
    check_removal(pipe, layers, steps, queries)
    [seed] = seeds_of(seed)
    return KnockoutPlan(
        pipe=pipe,
        prompt=read,
        seed=seed,
        layers=layers,
        steps=steps,
        queries=queries,
        options=options,
    )


def draw(plan: KnockoutPlan, rows: Sequence[Columns]) -> tuple[list[Image.Image], Size]:
    """Draw one batch, each row without its own columns; return images, and the latent's (rows,
    cols)."""
    n_text = len(plan.prompt.tokens)
    removal = Removal(
        plan.pipe, rows, n_text, layers=plan.layers, steps=plan.steps, queries=plan.queries
    )
    options = {name: _for_each(name, option, len(rows)) for name, option in plan.options.items()}
    with few_threads(plan.pipe), removal, named_bar(plan.pipe, "without words"):
        texts = [plan.prompt.text] * len(rows)
        result = call_pipeline(plan.pipe, texts, [plan.seed] * len(rows), options)
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


@dataclass(frozen=True, eq=False, repr=False)
class Knockout:
    """Image with and without the attention to a word, see :func:`knockout`.

    Attributes:
        prompt: the text.
        word: the word or phrase, as given.
        columns: token columns of all its occurrences.
        seed: seed of both images.
        image: PIL image with full attention.
        without: PIL image from the same noise, with the word's attention removed.
        heatmap: where the two differ, float32 ``[rows, cols]`` at latent cells, in [0, 1]: the mean
            absolute difference of RGB; 1 is the difference between black and white.
    """

    prompt: str
    word: str
    columns: Columns
    seed: int
    image: Image.Image
    without: Image.Image
    heatmap: Heatmap

    def __repr__(self) -> str:
        low, high = self.heatmap.range
        prompt = shorter(self.prompt, 60)
        change = f"changes by {low:.2g} to {high:.2g}"
        return f"Knockout({self.word!r} of {prompt!r}, seed {self.seed}, {change})"

    def _repr_html_(self) -> str:
        low, high = self.heatmap.range
        apart = self.heatmap.overlay(self.image, caption=False)
        drawn = [
            (self.image, "with everything", f"seed {self.seed}"),
            (self.without, f"without “{self.word}”", f"seed {self.seed}"),
            (apart, "where they differ", f"{low:.2g} to {high:.2g}"),
        ]
        return f"<p><bdi>{escape(self.prompt)}</bdi></p>{figures_of(drawn)}"


@one_at_a_time
def knockout(
    pipe: Pipeline,
    prompt: str,
    word: str,
    seed: int = 0,
    *,
    layers: LayerSelection = None,
    steps: Span = (0.0, 1.0),
    queries: Queries | None = None,
    **options: Any,
) -> Knockout:
    """Draw an image again without the attention to a word, and map where it changes.

        found = sdattn.knockout(pipe, "a cat left of a pizza", "cat")
        found.heatmap.overlay(found.image)

    In the chosen layers and steps the word's keys are masked out of the softmax. Both images are
    rows of one batch and share their noise, so they differ only by the removal.

    This removes the attention to the word's own columns, not the word. The text encoder has read
    the whole prompt before: the columns after the word, "<eos>" and the padding among them, carry
    information about it (and the columns before it too, if the encoder is not causal, as T5).
    SDXL's pooled text embedding still holds it, and a ControlNet has its own cross-attention. So a
    small change means only that the image does not need these columns.

    The map shows what is gone and what was drawn instead. Without a word the composition may change
    all over; with ``steps=(0.5, 1.0)`` it mostly stays.

    Source: Hertz et al. 2022, for the edit of the probabilities during sampling.

    Args:
        pipe: a pipeline whose denoiser has cross-attention (Stable Diffusion 1, 2 and XL with their
            variants, PixArt, Sana) or joint attention (Stable Diffusion 3, FLUX, Qwen-Image).
        prompt: one text.
        word: a word or phrase of it, all occurrences together; ``"<sos>"``, ``"<eos>"`` and
            ``"<pad>"`` are the special columns.
        seed: seed of the noise, which is drawn on the CPU.
        layers: layers that see the text, see :func:`sdattn.models.layers.select_layers`; None for
            all. The others keep their processors.
        steps: part of the run, 0.5 for the first half, ``(0.5, 1.0)`` for the second; counted in
            the model's calls for the prompt. With an odd number the middle one is in both halves.
        queries: for joint attention, which queries may not look at the word: ``"all"`` (the
            default) or the ``"image"`` alone, which can still read the word from the prompt's other
            words.
        options: further options of the pipeline, as for :func:`sdattn.generate`.

    Raises:
        KeyError: the word is empty, not in the prompt, or was cut off.
        TypeError: joint attention of another kind, or no pipeline.
        ValueError: an impossible option, layer or part of the run; a processor with weights of its
            own (IP-Adapter) in a chosen layer. All before the first step.
        CaptureError: the given latents or images differ from row to row; the run ended early, or
            its processors were replaced meanwhile.
        RuntimeError: the safety checker blanked an image.
    """
    plan = prepare(pipe, prompt, seed, layers=layers, steps=steps, queries=queries, options=options)
    return draw_without(plan, [word])[0]


def draw_without(plan: KnockoutPlan, words: Sequence[str], batch_size: int = 4) -> list[Knockout]:
    """Return :func:`knockout` for each of several words; the full image is drawn once.

    It takes the memory of a run of ``batch_size`` images plus one image and one map per word. On a
    device that rounds batches of different sizes differently, images of other batches differ by
    that too.
    """
    columns = [tuple(columns_of([word], [plan.prompt])) for word in words]
    rows = [(), *columns]  # the first loses nothing
    images: list[Image.Image] = []
    for start in range(0, len(rows), batch_size):
        drawn, grid = draw(plan, rows[start : start + batch_size])
        images += drawn
    whole = images[0]
    found = []
    for word, removed, without in zip(words, columns, images[1:], strict=True):
        one = Knockout(
            prompt=plan.prompt.text,
            word=word,
            columns=removed,
            seed=plan.seed,
            image=whole,
            without=without,
            heatmap=Heatmap(word, change(whole, without, grid), removed),
        )
        found.append(one)
    return found


def change(image: Image.Image, other: Image.Image, grid: tuple[int, ...]) -> Tensor:
    """Return where two images differ: float32 ``[rows, cols]`` in [0, 1], absolute differences of
    RGB, averaged over channels and a cell's pixels; cells overlap if a size does not divide
    evenly."""
    first = np.asarray(image.convert("RGB"), dtype=np.float32)
    second = np.asarray(other.convert("RGB"), dtype=np.float32)
    difference = torch.from_numpy(abs(first - second)).mean(-1) / 255  # [height, width]
    return torch.nn.functional.adaptive_avg_pool2d(difference[None], (grid[0], grid[1]))[0]
