"""`LayerMaps`: the maps of a run's layers, as `aggregation` reads them, from any `Source`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import CaptureError
from ..follow.drawn import DrawnPrompts
from ..follow.text_watch import TextsOfRun
from ..models.denoiser_call import Size
from ..models.guidance import Branch
from .presets import Preset, preset_of


@dataclass(frozen=True, eq=False, repr=False)
class LayerMap:
    """The map of one layer.

    Attributes:
        place, level: position in the model, see :class:`sdattn.models.layers.AttentionLayer`.
        maps: float32 ``[images, (heads,) (frames,) rows, cols, tokens]`` on the CPU, probabilities;
            the mean over the kept steps, with its graph if the store has one.
    """

    place: str
    level: int
    heads: int
    maps: Tensor
    is_video: bool = False

    @property
    def size(self) -> tuple[int, int]:
        return self.maps.shape[-3], self.maps.shape[-2]

    @property
    def grid(self) -> tuple[int, ...]:
        """(rows, cols), or (frames, rows, cols) for a video."""
        return tuple(self.maps.shape[-4 if self.is_video else -3 : -1])


@dataclass(frozen=True, eq=False, repr=False)
class LayerMaps:
    """The maps of a run's layers, in the order in which they run.

    Attributes:
        layers: name to :class:`LayerMap`, for all layers that see the text, read or not.
        passes: number of model calls averaged.
        affinity: float32 ``[images, N, N]``, the mean of the self-attention layers that a refining
            preset reads; ``[images, frames, N, N]`` for videos whose frames attend only to
            themselves (AnimateDiff); else None. Row ``i`` is what cell ``i`` attends to; it sums to
            1.
        affinity_grid: (rows, cols) with ``rows * cols = N``; (frames, rows, cols) for videos whose
            cells attend to all frames.
    """

    layers: Mapping[str, LayerMap]
    columns: tuple[int, ...]
    passes: int
    affinity: Tensor | None = None
    affinity_grid: Size | None = None

    def image(self, number: int) -> LayerMaps:
        some = slice(number, number + 1)
        affinity = None if self.affinity is None else self.affinity[some]
        kept = {name: replace(layer, maps=layer.maps[some]) for name, layer in self.layers.items()}
        return replace(self, layers=kept, affinity=affinity)

    def frame(self, number: int) -> LayerMaps:
        """Return the maps of one frame of a video's latent, without an affinity over all frames."""
        kept = {
            name: replace(layer, maps=layer.maps.select(-4, number), is_video=False)
            for name, layer in self.layers.items()
        }
        if self.affinity is None or self.over_frames:
            return replace(self, layers=kept, affinity=None, affinity_grid=None)
        return replace(self, layers=kept, affinity=self.affinity[:, number])

    @property
    def over_frames(self) -> bool:
        """True if the affinity is over all frames of a video."""
        return self.affinity_grid is not None and len(self.affinity_grid) == 3

    def keep(self, columns: Sequence[int]) -> LayerMaps:
        positions = [self.columns.index(column) for column in columns]
        kept = {
            n: replace(layer, maps=layer.maps[..., positions]) for n, layer in self.layers.items()
        }
        return replace(self, layers=kept, columns=tuple(columns))

    def as_saved(self) -> LayerMaps:
        kept = {n: replace(layer, maps=halved(layer.maps)) for n, layer in self.layers.items()}
        affinity = None if self.affinity is None else halved(self.affinity)
        return replace(self, layers=kept, affinity=affinity)


def halved(maps: Tensor) -> Tensor:
    """Return maps as a file holds them: float16, row-major, on the CPU."""
    return maps.to("cpu", torch.float16).contiguous()


class Source(Protocol):
    """Maps of a run and their texts: a :class:`sdattn.MapStore`, or an attached store's."""

    @property
    def drawn(self) -> DrawnPrompts | None: ...
    @property
    def texts(self) -> TextsOfRun: ...
    @property
    def images(self) -> int | None: ...
    @property
    def branches(self) -> tuple[Branch, ...]: ...
    @property
    def n_text(self) -> int | None: ...
    @property
    def n_keys(self) -> int | None: ...
    @property
    def tokens(self) -> tuple[int, ...] | None: ...
    @property
    def frames(self) -> tuple[int, ...] | None: ...
    @property
    def is_refined(self) -> bool:
        """True if the maps were spread while the model ran."""

    def text_maps(self, preset: Preset) -> tuple[dict[str, LayerMap], int]:
        """Return the map of each layer that sees the text, as a preset reads it, and the number of
        passes averaged; raise CaptureError if it reads more than there is."""

    def self_maps(self, preset: Preset) -> list[Tensor]:
        """Return the self-attention that a refining preset spreads along, a map for each layer of
        the finest grid, ``[images, (frames,) rows, cols, N]``."""

    def read_passes(self, preset: Preset) -> Sequence[int]:
        """Return the passes of the run, counted from 0, that a preset reads."""


def layer_maps(
    source: Source, preset: str | Preset, self_attention: Source | None = None
) -> LayerMaps:
    """Return the maps of a run's layers, averaged over heads and steps as the preset says;
    ``self_attention`` is the source for refining, by default the same. Raise CaptureError if it
    holds no layer that sees the text, or only means of what the preset reads one by one."""
    preset = preset_of(preset)
    found, passes = source.text_maps(preset)
    columns = source.tokens or tuple(range(source.n_keys or 0))
    if preset.refine is None or source.is_refined:
        return LayerMaps(found, columns, passes)
    affinity, grid = _affinity((self_attention or source).self_maps(preset))
    return LayerMaps(found, columns, passes, affinity=affinity, affinity_grid=grid)


def _affinity(maps: Sequence[Tensor]) -> tuple[Tensor, Size]:
    """Return the mean of self-attention maps of one grid, and that grid."""
    total: Tensor = torch.zeros(())
    for one in maps:
        total = total + one.float().cpu()
    mean = total / len(maps)
    grid = tuple(mean.shape[1:-1])
    if mean.shape[-1] == math.prod(grid):
        return mean.flatten(1, -2), grid
    if len(grid) < 3:
        raise CaptureError(
            "`refine='self'` spreads the maps along the self-attention, which has "
            f"{mean.shape[-1]} keys here for {math.prod(grid)} cells: something merges its keys. "
            "Turn that off, or leave it out."
        )
    if mean.shape[-1] != math.prod(grid[-2:]):
        raise CaptureError(
            "`refine='self'` spreads the maps along all frames of a video, and this store holds "
            "some. Capture without `frames`."
        )
    return mean.flatten(2, 3), grid[-2:]  # each frame attends to itself alone


def resize_maps(maps: Tensor, size: tuple[int, int], mode: str = "bilinear") -> Tensor:
    """Resize ``[..., rows, cols]`` to ``size`` = (rows, cols), cell centres aligned."""
    batched = maps.reshape(-1, 1, *maps.shape[-2:])
    resized = torch.nn.functional.interpolate(batched, size=size, mode=mode, align_corners=False)
    return resized.reshape(*maps.shape[:-2], *size)


def fits(size: tuple[int, int], grid: tuple[int, ...]) -> bool:
    """Check whether a map of (rows, cols) can belong to an image of (height, width) pixels."""
    height, width = size
    rows, cols = grid
    return abs(rows - cols * height / width) < 1 or abs(cols - rows * width / height) < 1
