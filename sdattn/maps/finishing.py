from collections.abc import Sequence

from torch import Tensor

from ..prompts.tokens import Prompt
from .aggregation import contrast, rescaled, sharpened
from .heatmaps import Heatmaps
from .masks import smooth
from .presets import Preset


def finish(
    maps: Tensor,
    prompt: Prompt,
    preset: Preset,
    columns: Sequence[int] | None = None,
    frames: Sequence[int] | None = None,
) -> Heatmaps:
    """Return the heatmaps of one image from its aggregated maps ``[(frames,) rows, cols,
    columns]``; ``columns`` and ``frames`` are the ones that there are, None for all."""
    if preset.contrast:
        columns = [i for i, token in enumerate(prompt.tokens) if not token.special]
        maps = contrast(maps, columns, preset.contrast)
    if preset.rescale:
        maps = rescaled(maps, prompt)
    if preset.sharpen != 1:
        maps = sharpened(maps, preset.sharpen)
    if preset.sigma:
        maps = smooth(maps.movedim(-1, 0), preset.sigma, radius=1).movedim(0, -1)
    return Heatmaps(prompt, maps, columns, preset=preset, frames=frames)
