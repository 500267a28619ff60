"""`ImageRun`: one image's run, which folders hold, pages show and figures draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..maps.details import Details
from ..maps.heatmap import Heatmap
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMaps

if TYPE_CHECKING:
    from PIL import Image

Further = Mapping[str, tuple[str, Sequence[Heatmap]]]


@dataclass(frozen=True, eq=False)
class ImageRun:
    """One image's run.

    Attributes:
        image: the picture.
        heatmaps: its heatmaps.
        layers: the maps of this one image's layers that they were made of.
        info: the settings, anything JSON can hold.
        details: what was kept of single steps and heads.
        more: further maps of the same picture by what they are, ``"negative"``, ``"asked"``,
            ``"causal"``, each with the text that they are of.
    """

    image: Image.Image
    heatmaps: Heatmaps = field(repr=False)
    layers: LayerMaps = field(repr=False)
    info: Mapping[str, Any] = field(repr=False)
    details: Details = field(default_factory=Details, repr=False)
    more: Further = field(default_factory=dict, repr=False)
