"""Heat strips: the attention of each word in each frame of a video, one row per word."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from .heatmap import Heatmap, latent_frames
from .render import FAINT, INK, PAPER, colorize, fit, font_of

_ROW, _GAP, _LABEL, _WIDTH, _NOTE = 28, 6, 150, 640, 110  # pixels


def frame_means(heatmap: Heatmap, frames: int) -> np.ndarray:
    """Return the mean of a word's map in each frame of a video, float64 ``[frames]``; a latent
    frame counts for each video frame that it codes."""
    values = heatmap.values.detach().double().mean((1, 2)).numpy()
    return np.asarray(values[latent_frames(len(values), frames)])


def strips(maps: Sequence[Heatmap], frames: int) -> Image.Image:
    """Draw one strip per word of a video, its colour from 0 to the highest mean of any word in any
    frame; left the word, right its highest mean and that frame, counted from 1."""
    means = [frame_means(heatmap, frames) for heatmap in maps]
    top = max((float(mean.max()) for mean in means), default=0.0)
    wide = max(_WIDTH // frames, 1) * frames
    size = _LABEL + wide + _NOTE, (_ROW + _GAP) * (len(maps) + 1) + _GAP
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    font = font_of(15)
    small = font_of(12)
    for i, (heatmap, mean) in enumerate(zip(maps, means, strict=True)):
        y = _GAP + i * (_ROW + _GAP)
        strip = Image.fromarray(colorize(mean[None], (0.0, top)))
        sheet.paste(strip.resize((wide, _ROW), Image.Resampling.NEAREST), (_LABEL, y))
        label = fit(heatmap.label, font, _LABEL - 2 * _GAP)
        draw.text((_LABEL - _GAP, y + _ROW // 2), label, INK, font, anchor="rm")
        note = f"{mean.max():.2g} in {int(mean.argmax()) + 1}"
        draw.text((_LABEL + wide + _GAP, y + _ROW // 2), note, FAINT, small, anchor="lm")
    y = _GAP + len(maps) * (_ROW + _GAP) + _ROW // 2
    draw.text((_LABEL, y), "frame 1", FAINT, small, anchor="lm")
    draw.text((_LABEL + wide, y), f"frame {frames}", FAINT, small, anchor="rm")
    return sheet
