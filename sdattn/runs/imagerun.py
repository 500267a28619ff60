"""`ImageRun`: one image's run, which folders hold, pages show and figures draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..maps.details import Details
from ..maps.heatmap import Heatmap
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMaps
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
