"""Heatmaps of a recorder's run: which run and which text are meant, and its words' maps."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sdattn import PRESETS, Heatmap, Heatmaps
from sdattn.errors import CaptureError, InvalidValueError
from sdattn.maps.aggregation import aggregate

from .columns import read
from .layers import area_of, by_head, in_latent, layer_maps, self_attention, sums_of
from .recording import Recorder
from .runs import Conditioning, Run

NAMES = ("positive", "negative")
POOLED = replace(PRESETS["default"], heads="pool")  # a weight for each layer in a sum


@dataclass(frozen=True)
class Asked:
    """What a node asks for.

    Attributes:
        clip, prompt: how the text was encoded.
        images: decoded images, ``[B, H, W, 3]``.
        conditioning: the CONDITIONING meant, where several were drawn.
        name: the sampler's input, ``"positive"`` or ``"negative"``.
        spread: spread maps along the image's self-attention.
        step: a step that was kept, counted from 0; None for all together.
        head: a head that was kept, counted from 0; None for the mean.
    """

    clip: Any
    prompt: str
    images: Tensor
    conditioning: Any = None
    name: str = "positive"
    spread: bool = False
    step: int | None = None
    head: int | None = None


def heatmaps(recorder: Recorder, asked: Asked) -> list[Heatmaps]:
    """Return the heatmaps of each image.

    Raises:
        CaptureError: the recorder saw no such run, text, step or head, or could not follow it.
        ValueError: another prompt than was encoded, or other images.
    """
    text = drawn_text(recorder, asked)
    assert text.facts is not None
    prompt = read(asked.clip, asked.prompt, text.facts, text.text)
    preset = replace(POOLED, refine="self") if asked.spread else POOLED
    layers = layer_maps(
        sums_of(text, asked.step), asked.head, text.affinity if asked.spread else None
    )
    return [
        Heatmaps(prompt, in_latent(maps, text), preset=preset) for maps in aggregate(layers, preset)
    ]


def cell_maps(recorder: Recorder, asked: Asked, x: float, y: float) -> Tensor:
    """Return what a spot of each image attends to in the image itself, ``[images, rows, cols]``.

    Args:
        recorder, asked: as for :func:`heatmaps`, but for the CLIP and the prompt.
        x, y: the spot, as shares of the width and the height, in [0, 1).

    Raises:
        CaptureError: as for :func:`heatmaps`, or the self-attention was not kept.
        ValueError: other images, or a spot outside the part that was drawn from the text.
    """
    text = drawn_text(recorder, asked)
    affinity, grid = self_attention(text.affinity)
    rows, cols, top, left = area_of(text)
    row = (y * text.latent[0] - top) / rows
    col = (x * text.latent[1] - left) / cols
    if not (0 <= row < 1 and 0 <= col < 1):
        raise InvalidValueError(
            "The spot is outside the area that was drawn from this text. Choose another spot, or "
            "connect the conditioning of the area meant."
        )
    cell = int(row * grid[0]) * grid[1] + int(col * grid[1])
    maps = affinity[:, cell].unflatten(-1, grid)
    return torch.stack([in_latent(of_image[..., None], text)[..., 0] for of_image in maps])


def drawn_text(recorder: Recorder, asked: Asked) -> Conditioning:
    """Return the text that is asked for, of the run that the images come from."""
    run = _run(recorder, asked)
    text = _text(run, asked)
    if len(asked.images) != text.images:
        raise InvalidValueError(
            f"The sampler drew {text.images} image(s), and {len(asked.images)} were passed. "
            "Connect the decoded images of the sampler whose model has Watch attention."
        )
    return text


def steps_kept(recorder: Recorder, asked: Asked) -> list[int]:
    """Return the steps whose maps were kept one by one, counted from 0."""
    run = _run(recorder, asked)
    kept = sorted(_text(run, asked).by_step)
    if not kept:
        raise CaptureError(
            "The maps of single steps were not kept. Choose 'every step' in Watch attention, with "
            "enough megabytes, and sample again."
        )
    if run.over_budget:
        logging.warning(
            "sdattn: %d of %d steps did not fit into the megabytes of Watch attention: %s.",
            len(run.over_budget),
            run.n_steps,
            sorted(run.over_budget),
        )
    return kept


def heads_kept(recorder: Recorder, asked: Asked) -> list[int]:
    """Return the heads whose maps were kept one by one, counted from 0; those of the layers that
    have the most."""
    kept = by_head(sums_of(drawn_text(recorder, asked), asked.step))
    return list(range(max(maps.shape[1] for maps in kept.values())))


def of_word(maps: Heatmaps, word: str) -> Heatmap:
    """Return a word's map; an embedding is found by its name too. Raise KeyError for none."""
    embedding = f"embedding:{word}"
    known = {of_prompt.text: of_prompt for of_prompt in maps.prompt.words}
    named = known.get(word if word.startswith("embedding:") else embedding)
    if named is None:
        return maps[word]
    if not named.columns:
        raise InvalidValueError(
            f"The text encoder has no {named.text}: ComfyUI found no such file, or it is of "
            "another encoder."
        )
    return maps[named.text]


def _run(recorder: Recorder, asked: Asked) -> Run:
    """Return the run that the images come from."""
    if not recorder.runs:
        raise CaptureError(
            "No sampler has run with this model. Connect the model of Watch attention to the "
            "sampler, and that sampler's decoded images to this node."
        )
    runs = list(recorder.runs.values())
    fitting = [run for run in runs if any(map(_fits(asked.images), run.conditionings.values()))]
    candidates = fitting or runs
    if len(candidates) > 1:
        samplers = ", ".join(str(run.node) for run in candidates)
        raise CaptureError(
            f"Samplers {samplers} ran with this model, and whose images these are cannot be told. "
            "Put a Watch attention of its own in front of each."
        )
    (run,) = candidates
    if run.problem:
        raise CaptureError(run.problem)
    if not fitting and run.conditionings:
        rows, cols = next(iter(run.conditionings.values())).latent
        raise InvalidValueError(
            f"The images have {asked.images.shape[1]}x{asked.images.shape[2]} pixels (height x "
            f"width), and the sampler drew a latent of {rows}x{cols}. Connect the images of the "
            "sampler whose model has Watch attention, before they are cropped."
        )
    return run


def _fits(images: Tensor) -> Any:
    """Return a check whether a text's latent has the proportions of images."""

    def check(text: Conditioning) -> bool:
        rows, cols = text.latent
        tall = images.shape[1] / rows
        wide = images.shape[2] / cols
        return abs(tall - wide) <= max(tall, wide) / min(rows, cols)

    return check


def _text(run: Run, asked: Asked) -> Conditioning:
    """Return the text of a run that is asked for."""
    if not run.calls:
        raise CaptureError("The model was not called: no steps, or a model without text.")
    named = [text for text in run.conditionings.values() if text.name == asked.name]
    if not named:
        names = ", ".join({text.name for text in run.conditionings.values()})
        raise CaptureError(
            f"Nothing was drawn from a {asked.name} text (a guidance scale of 1 leaves out the "
            f"negative one). There are: {names}."
        )
    if asked.conditioning is not None:
        encoded = [states for states, _ in asked.conditioning]
        named = [text for text in named if any(_is_same(text.text, states) for states in encoded)]
        if not named:
            raise CaptureError(
                f"The sampler drew nothing {asked.name} from the conditioning that is connected. "
                "Connect the output of the text encoder whose words are asked for."
            )
    seen = [text for text in named if text.sums.totals or text.by_step]
    if not seen:
        raise CaptureError(_unseen(run, named))
    if len(seen) > 1:
        raise CaptureError(
            f"The sampler drew from {len(seen)} {asked.name} texts (combined, by area, by mask or "
            "by time). Connect the conditioning of the one that is meant, as its text encoder "
            "made it."
        )
    for note in run.notes:
        logging.warning("sdattn: %s", note)
    return seen[0]


def _is_same(drawn: Tensor, text: Tensor) -> bool:
    """Check whether text states are those that were drawn, which may be filled up on the left."""
    tail = drawn[:, drawn.shape[1] - text.shape[1] :].cpu()
    return tail.shape == text.shape and torch.equal(tail, text.cpu().to(tail.dtype))


def _unseen(run: Run, texts: Sequence[Conditioning]) -> str:
    if not any(text.facts for text in texts):
        steps = sorted(set.union(*(text.steps for text in texts)))
        return (
            f"This text was drawn in steps {steps[0]} to {steps[-1]} of {run.n_steps} alone, and "
            "Watch attention kept the second half. Choose 'all steps' there."
        )
    return (
        f"The model was called {run.calls} times with its attention watched, and {run.attended} "
        "attention calls came by, but none of them to the text: another node computes the "
        "attention, or the model does not hand its transformer_options to it."
    )
