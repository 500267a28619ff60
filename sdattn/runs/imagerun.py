"""`ImageRun`: one image's run, which folders hold, pages show and figures draw; and other looks at
it than its heatmaps: a group of layers, a step, a layer's heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..maps.aggregation import aggregate, read_by
from ..maps.details import Details
from ..maps.heatmap import Heatmap, Heatmaps
from ..maps.heatmaps import finish
from ..maps.layermaps import LayerMap, LayerMaps
from ..maps.presets import PRESETS, Preset
from ..prompts.tokens import Prompt
from .info import RunSettings

if TYPE_CHECKING:
    from PIL import Image


class Further(NamedTuple):
    """Further maps of a picture.

    Attributes:
        text: that they are of.
        maps: one a word of it.
    """

    text: str
    maps: Sequence[Heatmap]


@dataclass(frozen=True, eq=False)
class ImageRun:
    """One image's run.

    Attributes:
        image: the picture.
        heatmaps: its heatmaps.
        layers: the maps of this one image's layers that they were made of.
        settings: how it was made; of a folder that was read all of its ``run.json``, see
            :class:`sdattn.runs.info.RunInfo`.
        details: what was kept of single steps and heads.
        more: further maps of the same picture by what they are, ``"negative"``, ``"asked"``,
            ``"causal"``.
        texts: the heatmaps of the texts among these, of a run that was just made; a folder holds
            the maps of their words only.
    """

    image: Image.Image
    heatmaps: Heatmaps = field(repr=False)
    layers: LayerMaps = field(repr=False)
    settings: RunSettings = field(repr=False)
    details: Details = field(default_factory=Details, repr=False)
    more: Mapping[str, Further] = field(default_factory=dict, repr=False)
    texts: Mapping[str, Heatmaps] = field(default_factory=dict, repr=False)

    @property
    def info(self) -> dict[str, Any]:
        """The settings as ``run.json`` holds them."""
        return self.settings.to_json()

    def keep(self, columns: Sequence[int]) -> ImageRun:
        """With the maps of some token columns of the prompt only; those of the layers stay whole
        where a preset has words stand against each other."""
        heatmaps, layers = self.heatmaps.keep(columns), self.layers
        if not heatmaps.preset.contrast:
            layers = layers.keep(columns)
        return replace(self, heatmaps=heatmaps, layers=layers)


def plain(preset: Preset) -> Preset:
    """What groups of layers and heads are read by, whatever the run's preset: words are sums of
    columns, values are shares of the attention."""
    return replace(PRESETS["default"], among_words=preset.among_words)


def step_names(run: ImageRun) -> list[tuple[str, ...]]:
    """Of each step that was kept its number, from 1, and its timestep where the run tells it."""
    times = run.settings.timesteps or []
    return [
        (f"step {call + 1}", *(f"t = {time:.4g}" for time in times[call : call + 1]))
        for call in run.details.calls
    ]


def group_heatmaps(run: ImageRun) -> dict[str, Heatmaps]:
    """The mean of the layers of each place and grid, in the order in which they run.

    Returns:
        ``"up 64x64"`` to heatmaps on that grid, rows x cols, whatever the run's preset.
    """
    return {name: heads[0] for name, heads in _grouped(run.layers, run.heatmaps.prompt).items()}


def step_groups(run: ImageRun) -> dict[str, list[Heatmaps]]:
    """:func:`group_heatmaps` of each step that was kept; nothing where none was."""
    steps = run.details.steps
    return {} if steps is None else _grouped(steps, run.heatmaps.prompt)


def step_heatmaps(run: ImageRun) -> list[Heatmaps]:
    """The heatmaps of each step that was kept, as the run's preset makes them; but the heads are
    averaged before a grid is resized, and a sum over steps is of this one alone."""
    steps, preset = run.details.steps, run.heatmaps.preset
    if steps is None:
        return []
    number = len(run.details.calls)
    if run.layers.affinity is not None:
        shared = run.layers.affinity.expand(number, -1, -1)
        steps = replace(steps, affinity=shared, affinity_grid=run.layers.affinity_grid)
    averaged = replace(preset, steps="mean", each_head=False)
    prompt = run.heatmaps.prompt
    return [finish(maps, prompt, averaged, steps.columns) for maps in aggregate(steps, averaged)]


def head_heatmaps(run: ImageRun) -> dict[str, dict[int, Heatmaps]]:
    """Each head of the layers that the preset reads, of those on their finest grid.

    Returns:
        The layer's name to the heatmaps of its heads by number, a share of the head's attention
        each; nothing where the run kept a mean over heads only.
    """
    preset, prompt = run.heatmaps.preset, run.heatmaps.prompt
    maps = run.layers if preset.each_head else run.details.heads
    if maps is None:
        return {}
    read = read_by(maps, preset)
    finest = max(layer.grid for layer in read.values())
    chosen = "all" if maps is run.layers else run.details.head_numbers
    heads = {name: layer.maps[0] for name, layer in read.items() if layer.grid == finest}
    return {
        name: {
            number: Heatmaps(prompt, head, maps.columns)
            for number, head in zip(range(len(of)) if chosen == "all" else chosen, of, strict=True)
        }
        for name, of in heads.items()
    }


def short_name(run: ImageRun, layer: str) -> str:
    """``up 3.0.1`` of ``up_blocks.3.attentions.0.transformer_blocks.1.attn2``."""
    numbers = ".".join(part for part in layer.split(".") if part.isdigit())
    return f"{run.layers.layers[layer].place} {numbers}"


def _grouped(maps: LayerMaps, prompt: Prompt) -> dict[str, list[Heatmaps]]:
    groups: dict[str, list[LayerMap]] = {}
    for layer in maps.layers.values():
        groups.setdefault(f"{layer.place} {layer.grid[0]}x{layer.grid[1]}", []).append(layer)
    return {
        name: [Heatmaps(prompt, image, maps.columns) for image in _mean(layers)]
        for name, layers in groups.items()
    }


def _mean(layers: Sequence[LayerMap]) -> Tensor:
    """``[images, rows, cols, tokens]``."""
    over_heads = [layer.maps.mean(1) if layer.maps.dim() == 5 else layer.maps for layer in layers]
    return torch.stack(over_heads).mean(0)
