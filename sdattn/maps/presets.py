"""How layers' maps become a heatmap: the methods in the literature, in one table.

Sources: Tang et al. 2022, "What the DAAM: Interpreting Stable Diffusion Using Cross Attention" and
its code (castorini/daam); Hertz et al. 2022, "Prompt-to-Prompt", ``aggregate_attention`` of
google/prompt-to-prompt; Chefer et al. 2023, "Attend-and-Excite"; Marcos-Manchón et al. 2024,
"Open-Vocabulary Attention Maps" (vpulab/ovam); wooyeolBaek/attention-map-diffusers; Helbling et al.
2025, "ConceptAttention" (arXiv:2502.04320); "Seg4Diff" (arXiv:2509.18096); "GoCA"
(arXiv:2603.06178), for the division by the start token's map.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from ..errors import InvalidValueError, refuse
from ..follow.run_part import RunPart
from ..look.output_space import Space
from ..models.denoiser import find_denoiser

UNET = ("down", "mid", "up")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "steps": ("mean", "sum", "last"),
    "heads": ("mean", "sum", "pool"),
    "layers": ("mean", "sum"),
    "resize": ("bilinear", "bicubic"),
    "words": ("sum", "mean"),
    "refine": (None, "self"),
    "space": get_args(Space),
}


@dataclass(frozen=True)
class Preset:
    """A way from the maps of layers ``A_l[step, head, cell, token]`` to one map per token; raise
    ValueError for any other value.

    Attributes:
        places: places of the layers to read.
        or_all: read all layers if there are none at these places.
        cells: read only the grid whose shorter side is nearest to this number (as a ratio).
        least_cells: leave out grids with a shorter side of fewer cells, but not the finest.
        deepest: leave out layers below this level; level 3 is an eighth of the latent's side.
        steps: ``"mean"`` or ``"sum"`` over the model calls that were kept; ``"last"``, only the
            last call; a part of the schedule, to average.
        heads: ``"mean"``: over a layer's heads, then over layers; ``"sum"``: over a layer's heads;
            ``"pool"``: over the heads of all layers, as if they were one layer's.
        each_head: resize each head, and cut it off at 0, before averaging.
        layers: ``"mean"`` or ``"sum"`` over layers, at the finest grid among them.
        resize: ``"bilinear"`` or ``"bicubic"``, which is cut off at 0.
        among_words: the softmax is over the words, ``<sos>`` and the first ``<eos>`` only.
        contrast: if not 0, take the softmax over the words' columns of the maps times this factor.
        sigma: standard deviation, in cells, of a final Gaussian blur over 3x3 cells; 0 for none.
        words: a word of several columns is their ``"sum"`` or their ``"mean"``.
        depth: read only the block at this position, a share in [0, 1) of all blocks; with
            ``refine`` for joint attention, a part of the depth such as (0.5, 1.0), spread maps
            along its blocks only; None for all.
        rescale: divide a map, cell by cell, by the start token's, or the end token's without a
            start (T5).
        space: ``"attention"``, or for joint attention: ``"output"``, the similarity of a word's and
            a cell's outputs, which needs ``contrast``. See :mod:`sdattn.look.output_space`.
        refine: ``"self"``: spread along the image's self-attention, see
            :mod:`sdattn.maps.aggregation`; None: unchanged.
        sharpen: exponent for each map, between 0 for its lowest value and its highest; 1 for none.
    """

    name: str
    places: tuple[str, ...]
    or_all: bool = False
    cells: int | None = None
    least_cells: int = 0
    deepest: int | None = None
    steps: Literal["mean", "sum", "last"] | tuple[float, float] = "mean"
    heads: Literal["mean", "sum", "pool"] = "mean"
    each_head: bool = False
    layers: Literal["mean", "sum"] = "mean"
    resize: Literal["bilinear", "bicubic"] = "bilinear"
    among_words: bool = False
    contrast: float = 0.0
    sigma: float = 0.0
    words: Literal["sum", "mean"] = "sum"
    refine: Literal["self"] | None = None
    space: Space = "attention"
    depth: float | tuple[float, float] | None = None
    rescale: bool = False
    sharpen: float = 1.0

    def __post_init__(self) -> None:
        chosen = {name: getattr(self, name) for name in _CHOICES}
        if not isinstance(self.steps, str):
            part = RunPart.between(self.steps)
            chosen["steps"] = "mean" if part and part.first < part.last else self.steps
        for name, value in chosen.items():
            if value not in _CHOICES[name]:
                steps = "'mean', 'sum', 'last' or a part of the schedule, (0.5, 1.0)"
                raise refuse(name, value, steps if name == "steps" else _CHOICES[name])
        self._check_depth()
        if not 0 < self.sharpen < math.inf:
            raise refuse("sharpen", self.sharpen, "a number above 0, 1 for maps as they are")
        if self.space == "output" and not self.contrast:
            raise InvalidValueError(
                f"The preset {self.name!r} has space='output', whose values may be negative, and "
                "contrast=0. Pass contrast=10.0 for the softmax over the words."
            )
        if not self.places or isinstance(self.places, str):
            raise refuse("places", self.places, "a tuple")

    def _check_depth(self) -> None:
        if isinstance(self.depth, tuple):
            part = RunPart.between(self.depth)
            fits = part is not None and part.first < part.last
        else:
            fits = self.depth is None or 0 <= self.depth < 1
        if not fits:
            known = "a number from 0 to below 1, a part of the depth such as (0.5, 1.0), or None"
            raise refuse("depth", self.depth, known)

    @property
    def title(self) -> str:
        return f"{self.name}, refined" if self.refine else self.name

    @property
    def part(self) -> RunPart | None:
        """The part of the run that it reads, or None if it names none."""
        return None if isinstance(self.steps, str) else RunPart.of(self.steps)

    @property
    def needs_all_columns(self) -> bool:
        """True if a word's map depends on the columns of others."""
        return bool(self.contrast or self.rescale)

    @property
    def unit(self) -> str:
        """Unit of the maps' values, for a colour bar."""
        if self.sharpen != 1:
            return f"{replace(self, sharpen=1.0).unit}, sharpened"
        if self.rescale:
            return "attention as a multiple of the start token's"
        if self.contrast:
            what = "likeness of outputs" if self.space == "output" else "attention"
            return f"softmax over words of {self.contrast:g} \N{MULTIPLICATION SIGN} {what}"
        what = "attention among words" if self.among_words else "attention"
        summed = [name for name in ("steps", "heads", "layers") if getattr(self, name) == "sum"]
        if not summed:
            return f"share of {what}"
        *first, last = summed
        return f"{what}, summed over {', '.join(first)}{' and ' if first else ''}{last}"

    def reads(self, place: str, level: int) -> bool:
        """Check whether a layer is at the places and levels that are read."""
        return place in self.places and (self.deepest is None or level <= self.deepest)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, held: dict[str, Any]) -> Preset:
        """Return the preset that :meth:`to_json` saved; raise ValueError for other attributes."""
        tuples: dict[str, Any] = {}
        for name, value in held.items():
            tuples[name] = tuple(value) if isinstance(value, list) else value
        try:
            return cls(**tuples)
        except TypeError as error:
            raise InvalidValueError(
                f"The preset has attributes that this version does not know: {error}."
            ) from None


_ALL = (
    # Its accuracy is measured by demos/evaluation/evaluate_heatmaps.py: the way up, on grids
    # fine enough to point with, once the image has formed.
    Preset("default", ("up",), or_all=True, least_cells=16, steps=(0.5, 1.0)),
    Preset(
        "daam",
        ("down", "up"),
        deepest=2,
        steps="sum",
        heads="pool",
        each_head=True,
        resize="bicubic",
        words="mean",
    ),
    Preset("p2p", ("down", "up"), cells=16, heads="pool"),
    Preset(
        "attend-and-excite",
        UNET,
        cells=16,
        steps="last",
        heads="pool",
        contrast=100.0,
        sigma=math.sqrt(0.5),  # its ".5" is squared into the exponent without the factor of 2
    ),
    Preset("ovam", ("down", "up"), steps="sum", heads="sum", layers="sum", among_words=True),
    Preset("sum", (*UNET, "block", "double"), heads="sum"),
    Preset("output", ("double", "single"), space="output", contrast=10.0),
    # in SD3-medium block 9 of 24, counted from 0, and step 20 of 28: the eighth from the end
    Preset("seg4diff", ("double",), depth=9 / 24, steps=(0.7, 0.76), words="mean"),
    Preset("rescaled", ("double", "single"), rescale=True),
    # For joint attention, the cheapest that demos/evaluation/joint_search.py cannot tell from the
    # best, on a model of six blocks. Spread maps have a wide slope around their object; raised to
    # the fifth power, half of their range is a good place to cut.
    Preset(
        "joint",
        ("double", "single"),
        steps=(0.75, 1.0),
        refine="self",
        depth=(0.5, 1.0),
        sharpen=5.0,
    ),
    Preset("columns", ("double", "single"), steps=(0.5, 1.0)),
)
PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})


def nothing_read(preset: Preset, found: Iterable[tuple[str, int]]) -> str:
    """Return the message for a preset that reads none of the layers, (place, level) each."""
    is_deep = preset.deepest is not None
    found = list(found)
    there = {f"{place} at level {level}" if is_deep else place for place, level in found}
    levels = f" down to level {preset.deepest}" if is_deep else ""
    others = [p.name for p in _ALL if p.or_all or any(p.reads(*layer) for layer in found)]
    return (
        f"The preset {preset.name!r} reads layers of the places {', '.join(preset.places)}{levels},"
        f" and there are only: {', '.join(sorted(there))}. Choose other layers, or another preset: "
        f"{', '.join(others)}."
    )


def preset_of(preset: str | Preset, refine: str | None = None, default: str = "default") -> Preset:
    """Return a preset by its name, or as it is, with ``refine`` if given; raise ValueError for an
    unknown name."""
    if refine not in (None, "self"):
        raise refuse("refine", refine, "'self', or None for the maps as they are")
    if not isinstance(preset, Preset):
        if not isinstance(preset, str) or preset not in PRESETS:
            raise refuse("preset", preset, PRESETS)
        preset = PRESETS[preset]
    if preset == PRESETS["default"]:
        preset = PRESETS[default]
    return replace(preset, refine="self") if refine else preset


def preset_for(target: Any, preset: str | Preset, refine: str | None = None) -> Preset:
    """Return :func:`preset_of`; ``"default"`` is the most accurate preset for the pipeline's
    family."""
    return preset_of(preset, refine, find_denoiser(target).family.preset)
