"""Maps as prompt-to-prompt code holds them, heads folded into the rows, as a `Source`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..attention import level_grids, query_grid
from ..errors import CaptureError, InvalidTypeError, InvalidValueError, OptionError
from ..follow.drawn import DrawnPrompts
from ..follow.text_watch import TextsOfRun
from ..models.guidance import Branch
from ..models.layers import PLACES
from .aggregation import PLACE
from .layermaps import LayerMap, LayerMaps, layer_maps
from .presets import Preset

Maps = dict[str, list[Tensor]]  # by place and kind: {"down_cross": [[images*heads, N, T], ...]}
StepChoice = str | int | tuple[float, float]


class MeanMaps(NamedTuple):
    """Mean maps of some steps: those steps, from 0, and the number of passes averaged."""

    maps: Maps
    steps: Sequence[int]
    passes: int


class StepStore:
    """Base of a store whose steps heatmaps are read from."""

    latent_size: tuple[int, int] | None
    levels: int | None
    images: int | None
    drawn: DrawnPrompts | None
    texts: TextsOfRun

    def step_maps(self, steps: StepChoice) -> MeanMaps:
        """Return mean maps of ``"mean"``, ``"last"``, a step or a part of the run."""
        raise NotImplementedError


# a store, one of its dictionaries, maps of some layers, or of one
Folded = StepStore | Mapping[str, Sequence[Tensor]] | Sequence[Tensor] | Tensor


@dataclass(frozen=True, eq=False, repr=False)
class FoldedMaps:
    """Maps ``[images*heads, N, T]``, row ``image * heads + head``.

    Attributes:
        cross, self_attention: (place, map) of each layer, in running order.
        images, passes: images that share the rows, and steps averaged; None if unknown.
        latent_size: (rows, cols) of the latent, with ``levels`` resolutions.
        name: what they are, for messages.
        steps: steps of the run that were averaged, counted from 0.
    """

    cross: list[tuple[str, Tensor]]
    self_attention: list[tuple[str, Tensor]]
    latent_size: tuple[int, int]
    name: str
    images: int | None = None
    levels: int = 4
    passes: int | None = None
    drawn: DrawnPrompts | None = None
    texts: TextsOfRun = field(default_factory=TextsOfRun)
    steps: Sequence[int] = ()
    tokens: None = None  # every column is there
    frames: None = None

    @property
    def branches(self) -> tuple[Branch, ...]:
        branch: Branch = "conditional"
        return (branch,) * (self.images or 1)

    def of_images(self, number: int | None) -> "FoldedMaps":
        return replace(self, images=self.images or number)

    def read_passes(self, preset: Preset) -> Sequence[int]:
        """Return the steps averaged, whatever the preset."""
        return self.steps

    @property
    def n_keys(self) -> int:
        return self.cross[0][1].shape[-1]

    is_refined = False

    n_text = n_keys

    def layer_maps(self, preset: Preset) -> LayerMaps:
        """Return each layer's maps as a preset reads them; raise CaptureError if it needs more."""
        return layer_maps(self, preset)

    def text_maps(self, preset: Preset) -> tuple[dict[str, LayerMap], int]:
        """See :meth:`sdattn.maps.layermaps.Source.text_maps`."""
        self._check(preset)
        grids = level_grids(self.latent_size, self.levels)
        found = {}
        for i, (place, folded) in enumerate(self.cross):
            maps = self._unfolded(folded)  # [images, heads, rows, cols, T]
            heads = maps.shape[1]
            level = grids.index((maps.shape[2], maps.shape[3]))
            kept = maps if preset.each_head else maps.mean(1)
            found[f"{place}_cross[{i}]"] = LayerMap(place, level, heads, kept.float().cpu())
        return found, self.passes or 1

    def self_maps(self, preset: Preset) -> list[Tensor]:
        """See :meth:`sdattn.maps.layermaps.Source.self_maps`."""
        # The finest that the store has kept: max_queries limits it.
        refining = self._refining()
        most = max(len(maps[0]) for maps in refining)
        return [self._unfolded(maps).mean(1) for maps in refining if len(maps[0]) == most]

    def _check(self, preset: Preset) -> None:
        missing = ""
        if preset.among_words:
            missing = "the softmax over the words alone, at each step"
        elif preset.space != "attention":
            missing = "the attention's outputs"
        elif preset.steps == "sum" and self.passes is None:
            missing = "the number of steps, which an AttentionStore knows"
        elif preset.steps == "last" and (self.passes or 1) > 1:
            missing = 'the last step: pass the store with steps="last", or its last_step'
        elif preset.refine and not self._refining():
            missing = "self-attention of the way up, which the means of an AttentionStore hold"
        if missing:
            refined = " refined" * bool(preset.refine)
            raise CaptureError(
                f"The preset {preset.name!r}{refined} reads what {self.name} does not hold: "
                f"{missing}. Or use `capture()`, or `generate()` with `preset={preset.name!r}`."
            )

    def _unfolded(self, maps: Tensor) -> Tensor:
        if self.images is None:
            raise InvalidValueError(
                f"How many images share the {len(maps)} rows of a map of {self.name} is unknown. "
                "Pass images=, or attach the store to the pipeline before the run."
            )
        if maps.ndim != 3 or len(maps) % self.images:
            raise InvalidValueError(
                f"A map of shape {list(maps.shape)} is not [images*heads, queries, tokens] of "
                f"{self.images} image(s). Pass only the prompts' rows, without the unconditional "
                "half, and one prompt for each image."
            )
        grid = query_grid(maps.shape[1], self.latent_size, self.levels)
        return maps.unflatten(0, (self.images, -1)).unflatten(2, grid)

    def _refining(self) -> list[Tensor]:
        return [maps for place, maps in self.self_attention if place == PLACE]


def folded_maps(
    x: Folded,
    preset: Preset,
    latent_size: tuple[int, int] | None = None,
    steps: StepChoice | None = None,
) -> FoldedMaps:
    """Read maps that :func:`sdattn.heatmaps` got in place of a ``MapStore``."""
    name = f"a {type(x).__name__} of maps"
    passes = None
    by_place: Mapping[str, Sequence[Tensor]]
    if isinstance(x, StepStore):
        name = f"this {type(x).__name__}"
        steps = "last" if steps is None and preset.steps == "last" else steps
        by_place, numbers, passes = x.step_maps("mean" if steps is None else steps)
        latent_size = latent_size or x.latent_size
    elif steps is not None:
        raise OptionError("steps", steps, f"{name} has no steps to choose from. Leave it out.")
    else:
        by_place = _by_place(x)
    cross = _of_kind(by_place, "cross")
    if not cross:
        raise InvalidValueError(
            f"There are no maps of cross-attention in {name}. Run the pipeline with the store "
            "attached (store.attach(pipe)) and its processor set, or pass one map at least."
        )
    if latent_size is None:
        raise InvalidValueError(
            f"The image cells of the {cross[0][1].shape[1]} queries of a map are unknown. "
            "Pass latent_size=(rows, cols), the image's height and width divided by the VAE's "
            "scale factor (64, 64 for 512x512), or call store.attach(pipe) before the run."
        )
    maps = FoldedMaps(cross, _of_kind(by_place, "self"), latent_size=latent_size, name=name)
    if isinstance(x, StepStore):
        return replace(
            maps,
            images=x.images,
            levels=x.levels or 4,
            passes=passes,
            drawn=x.drawn,
            texts=x.texts,
            steps=numbers,
        )
    _refuse_sums(cross[0][1], name)
    return maps


def _by_place(x: Any) -> Mapping[str, Sequence[Tensor]]:
    if isinstance(x, Tensor):
        return {"block_cross": [x]}
    if isinstance(x, Mapping) and all(isinstance(maps, Sequence) for maps in x.values()):
        return x
    if isinstance(x, Sequence) and x and all(isinstance(maps, Tensor) for maps in x):
        return {"block_cross": x}
    raise InvalidTypeError(
        "Pass heatmaps() what capture() gave (a MapStore), an AttentionStore, one of its "
        'dictionaries ({"down_cross": [...], ...}), a list of [images*heads, queries, tokens] '
        f"tensors or one of them, not a {type(x).__name__}."
    )


def _of_kind(by_place: Mapping[str, Sequence[Tensor]], kind: str) -> list[tuple[str, Tensor]]:
    places = (*PLACES, "double", "single", "block")
    return [(place, maps) for place in places for maps in by_place.get(f"{place}_{kind}", ())]


def _refuse_sums(maps: Tensor, name: str) -> None:
    total = float(maps.detach().float().sum(-1).mean())
    if not total < 1.5:  # edited maps need not sum to 1, but sums over steps do to 2 and more
        raise InvalidValueError(
            f"The columns of a map in {name} add up to {total:.3g}, so these are sums over steps "
            "and not probabilities. Pass the store itself, or its get_average_attention()."
        )
