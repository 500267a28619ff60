"""`ImageRun`: one image's run, which is saved in a folder, shown on a page and drawn in figures,
and further views of it: a group of layers, a step, a layer's heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from ..attention.core import grid_text
from ..errors import InvalidValueError, refuse
from ..files.tables import along
from ..files.terminal import shorter
from ..files.videos import Video
from ..maps.aggregation import aggregate, finish, read_by
from ..maps.arrival import Arrival, calibration_of
from ..maps.details import Details
from ..maps.heatmap import Heatmap, check_frame, latent_frames
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMap, LayerMaps
from ..maps.presets import PRESETS, Preset
from .info import RunSettings

if TYPE_CHECKING:
    import xarray as xr
    from PIL import Image


class Further(NamedTuple):
    """Further maps of an image.

    Attributes:
        text: the text that the maps belong to.
        maps: one per word of the text.
    """

    text: str
    maps: Sequence[Heatmap]


@dataclass(frozen=True, eq=False, repr=False)
class ImageRun:
    """One image's run.

    Attributes:
        image: the image; the middle frame of a video.
        heatmaps: its heatmaps.
        layers: maps of this image's layers, from which the heatmaps were made.
        settings: how the run was made; for a folder, all of its ``run.json``, see
            :class:`sdattn.runs.info.RunInfo`.
        details: what was kept of single steps and heads.
        more: further maps of the same image by kind: ``"negative"``, ``"asked"``, ``"causal"``.
        texts: the further texts' heatmaps, in a run that was just made; a folder holds only the
            maps of their words.
        video: the video, or None for an image.
    """

    image: Image.Image
    heatmaps: Heatmaps
    layers: LayerMaps
    settings: RunSettings
    details: Details = field(default_factory=Details)
    more: Mapping[str, Further] = field(default_factory=dict)
    texts: Mapping[str, Heatmaps] = field(default_factory=dict)
    video: Video | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({described([self])})"

    @property
    def info(self) -> dict[str, Any]:
        """Settings as in ``run.json``."""
        return self.settings.to_json()

    def missing(self, words: Sequence[str] | None = None) -> list[Arrival]:
        """Return the words that probably did not arrive in the image, the weakest first: as
        :meth:`sdattn.Heatmaps.missing` does, with the calibration of the demo if it drew the image
        and the maps are of its preset."""
        is_drawn = self.settings.explained is None and self.settings.edited is None
        found = calibration_of(self.settings.model) if is_drawn else None
        fits = found is not None and found.preset == self.heatmaps.preset.title
        return self.heatmaps.missing(words, calibration=found if fits else None)

    def keep(self, columns: Sequence[int]) -> ImageRun:
        """Return the run with only the maps of some token columns of the prompt. The layers' maps
        stay whole where a preset compares words with each other."""
        heatmaps = self.heatmaps.keep(columns)
        layers = self.layers
        if not heatmaps.preset.needs_all_columns:
            layers = layers.keep(columns)
        return replace(self, heatmaps=heatmaps, layers=layers)

    def frame(self, number: int) -> ImageRun:
        """Return one frame of a video as an image's run, on the scale of the whole video.

        Maps that were refined along all frames stay so; single steps belong to the video alone.

        Args:
            number: number of the frame, counted from 0.

        Raises:
            ValueError: it is an image, or there is no such frame.
        """
        check_frame(len(self.video or ()), number, repr(self))
        video = self.video or ()
        at = latent_frames(len(self.heatmaps.maps), len(video))[number]
        details = self.details.frame(at)
        if self.layers.over_frames:
            details = replace(details, steps=None, calls=())
        more = {}
        for name, (text, maps) in self.more.items():
            more[name] = Further(text, [heatmap.frame(at) for heatmap in maps])
        return replace(
            self,
            image=video[number],
            heatmaps=self.heatmaps.frame(at),
            layers=self.layers.frame(at),
            details=details,
            more=more,
            texts={name: maps.frame(at) for name, maps in self.texts.items()},
            video=None,
        )

    def to_xarray(self, each: Literal["steps", "heads"] | None = None) -> xr.DataArray:
        """Return the words' maps as an xarray array, with single steps or heads if they were kept.

        Args:
            each: None for :meth:`sdattn.Heatmaps.to_xarray`, ``(word, row, col)``. ``"steps"``:
                ``(word, row, col, step)``, model calls counted from 0, with ``timestep`` as a
                further coordinate; each made by :func:`step_heatmaps`. ``"heads"``: ``(word, row,
                col, head, layer)``, the mean over the steps that the preset reads, with the model's
                head numbers (``found["head"]``, from 0) and the layers of :func:`head_heatmaps`.

        Returns:
            float32; NaN for heads that a layer does not have.

        Raises:
            ImportError: xarray is not installed.
            ValueError: the run kept only a mean over steps or heads.
        """
        if each is None:
            return self.heatmaps.to_xarray()
        if each == "heads":
            layers = head_heatmaps(self)
            if not layers:
                raise not_kept(each)
            arrays = []
            for heads in layers.values():
                each_head = (head.to_xarray() for head in heads.values())
                arrays.append(along(each_head, "head", [*heads]))
            return along(arrays, "layer", [*layers])
        if each != "steps":
            raise refuse("each", each, ("steps", "heads", None))
        maps = step_heatmaps(self)
        calls = self.details.calls
        times = self.settings.timesteps or ()
        if not maps:
            raise not_kept(each)
        array = along((step.to_xarray() for step in maps), "step", calls)
        if max(calls) < len(times):
            array = array.assign_coords(timestep=("step", [times[call] for call in calls]))
        return array


def not_kept(what: str) -> ValueError:
    """Return the error for a run without ``"steps"`` or ``"heads"``."""
    return InvalidValueError(
        f"This run kept no single {what}, only their mean. To keep them draw with `generate()` and "
        f"`capture_options={ {what: 'all'}!r}`."
    )


def described(runs: Sequence[ImageRun]) -> str:
    """Describe the images of one call in a line: how many, their size and text, how they were
    made."""
    settings = runs[0].settings
    preset = runs[0].heatmaps.preset
    video = runs[0].video
    kind = "images" if video is None else "videos"
    number = f"{len(runs)} {kind} " if len(runs) > 1 else ""
    sizes = " and ".join(dict.fromkeys(f"{r.image.width}x{r.image.height}" for r in runs))
    texts = [*dict.fromkeys(run.settings.prompt for run in runs)]
    text = repr(shorter(texts[0], 60)) if len(texts) == 1 else f"{len(texts)} prompts"
    seeds = list(dict.fromkeys(run.settings.seed for run in runs if run.settings.seed is not None))
    if len(seeds) > 1 and seeds == [*range(seeds[0], seeds[-1] + 1)]:
        seed = f"{seeds[0]} to {seeds[-1]}"
    else:
        seed = shorter(", ".join(map(str, seeds)), 60)
    frames = "" if video is None else f", {len(video)} frames,"
    said = [
        f"{number}{sizes}{frames} of {text}",
        settings.model or settings.pipeline,
        f"{len(settings.timesteps)} steps" if settings.timesteps else None,
        settings.stopped and f"stopped of {settings.stopped.steps}",
        seed and f"seed {seed}",
        f"preset {preset.title}",
    ]
    return ", ".join(part for part in said if part)


def made(run: ImageRun) -> str:
    """Return model, seed and number of steps in a line."""
    settings = run.settings
    told = [
        settings.model or settings.pipeline,
        None if settings.seed is None else f"seed {settings.seed}",
        f"{len(settings.timesteps)} steps" if settings.timesteps else None,
    ]
    return " · ".join(filter(None, told))


def plain(preset: Preset) -> Preset:
    """Return the preset for groups of layers and heads, whatever the run's preset: words are sums
    of columns, values are shares of attention."""
    return replace(PRESETS["default"], among_words=preset.among_words)


def step_names(run: ImageRun) -> list[tuple[str, ...]]:
    """Return the number, from 1, of each kept step, with its timestep if known."""
    times = run.settings.timesteps or []
    names: list[tuple[str, ...]] = []
    for call in run.details.calls:
        step = f"step {call + 1}"
        names.append((step, f"t = {times[call]:.4g}") if call < len(times) else (step,))
    return names


def group_heatmaps(run: ImageRun) -> dict[str, Heatmaps]:
    """Return the mean over the layers of each place and grid, ``"up 64x64"``, rows x cols, in the
    order in which they run, whatever the run's preset."""
    return {name: heads[0] for name, heads in _grouped(run.layers, run.heatmaps).items()}


def step_groups(run: ImageRun) -> dict[str, list[Heatmaps]]:
    """Return :func:`group_heatmaps` for each kept step."""
    steps = run.details.steps
    return {} if steps is None else _grouped(steps, run.heatmaps)


def step_heatmaps(run: ImageRun) -> list[Heatmaps]:
    """Return the heatmaps of each kept step, as the run's preset makes them, except that heads are
    averaged before a grid is resized, and a sum over steps covers this step alone."""
    steps = run.details.steps
    if steps is None:
        return []
    affinity = run.layers.affinity
    if affinity is not None:
        shared = affinity.expand(len(run.details.calls), *affinity.shape[1:])
        steps = replace(steps, affinity=shared, affinity_grid=run.layers.affinity_grid)
    preset = replace(run.heatmaps.preset, steps="mean", each_head=False)
    prompt = run.heatmaps.prompt
    return [finish(maps, prompt, preset, steps.columns) for maps in aggregate(steps, preset)]


def head_heatmaps(run: ImageRun) -> dict[str, dict[int, Heatmaps]]:
    """Return the heatmaps of each head, by layer and number, for the layers on the finest grid that
    the preset reads: each a share of the head's attention. Empty without single heads."""
    preset = run.heatmaps.preset
    maps = run.layers if preset.each_head else run.details.heads
    if maps is None:
        return {}
    read = read_by(maps, preset)
    # Heads of coarse layers say little on a fine grid: those of the finest are shown.
    finest = max(layer.size for layer in read.values())
    heads_of: dict[str, dict[int, Heatmaps]] = {}
    for name, layer in read.items():
        if layer.size == finest:
            heads = []
            for head in layer.maps[0]:
                heads.append(finish(head, run.heatmaps.prompt, plain(preset), maps.columns))
            chosen = "all" if preset.each_head else run.details.head_numbers
            numbers = range(len(heads)) if chosen == "all" else chosen
            heads_of[name] = dict(zip(numbers, heads, strict=True))
    return heads_of


def short_name(run: ImageRun, layer: str) -> str:
    """Shorten ``up_blocks.3.attentions.0.transformer_blocks.1.attn2`` to ``up 3.0.1``."""
    numbers = ".".join(part for part in layer.split(".") if part.isdigit())
    return f"{run.layers.layers[layer].place} {numbers}"


def _grouped(maps: LayerMaps, of: Heatmaps) -> dict[str, list[Heatmaps]]:
    prompt = of.prompt
    preset = plain(of.preset)
    groups: dict[str, list[LayerMap]] = {}
    for layer in maps.layers.values():
        groups.setdefault(f"{layer.place} {grid_text(layer.size)}", []).append(layer)
    found = {}
    for name, layers in groups.items():
        over_heads = []
        for layer in layers:
            has_heads = layer.maps.dim() == 2 + len(layer.grid) + 1
            over_heads.append(layer.maps.mean(1) if has_heads else layer.maps)
        mean = torch.stack(over_heads).mean(0)  # [images, (frames,) rows, cols, tokens]
        found[name] = [finish(image, prompt, preset, maps.columns) for image in mean]
    return found
