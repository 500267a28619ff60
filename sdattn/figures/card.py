"""`card()`: a run as one image to share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import refuse
from ..maps.glow import WORD_COLORS
from ..maps.heatmap import Heatmap
from ..maps.heatmaps import Heatmaps
from ..runs.card import draw_card, strongest
from ..runs.imagerun import ImageRun
from ..runs.run import Run
from .choosing import chosen, one_image

if TYPE_CHECKING:
    from PIL import Image


def card(run: ImageRun | Run, words: Sequence[str] | None = None) -> Image.Image:
    """Draw one image of a run to share: the image, the heat of its words over it, the prompt with
    these words in their colours, their peaks, and model, seed and steps.

    A long prompt is written smaller, and the images make room for it, so that nothing is cut.

    Args:
        run: a run of one image, from :func:`sdattn.generate` or :func:`sdattn.load_run`; of several
            images one, ``run[0]``. A video is shown by its middle frame.
        words: words or phrases, at most 7 with their repetitions (default: the strongest that name
            a thing).

    Returns:
        RGB, 1200 x 630 pixels.

    Raises:
        ValueError: the run has several images, or too many words.
        KeyError: a word that is not in the prompt.
    """
    run = of_image(run)
    return draw_card(run, shown_words(run.heatmaps, words))


def of_image(run: ImageRun | Run) -> ImageRun:
    """Return the run of one image, of a video its middle frame."""
    run = one_image(run)
    return run if run.video is None else run.frame(run.video.middle)


def shown_words(heatmaps: Heatmaps, words: Sequence[str] | None) -> list[Heatmap]:
    """Return the maps of the words, or of the strongest that name a thing."""
    found = chosen(heatmaps, words)
    if words is None:
        return strongest(found)
    if len(found) > len(WORD_COLORS):
        raise refuse("words", words, f"at most {len(WORD_COLORS)}, which colours tell apart")
    return found
