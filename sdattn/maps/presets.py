"""How a heatmap is made of the layers' maps: what each tool of the field does, in one table.

Sources: Tang et al. 2022, "What the DAAM: Interpreting Stable Diffusion Using Cross Attention" and
its code (castorini/daam); Hertz et al. 2022, "Prompt-to-Prompt", ``aggregate_attention`` of
google/prompt-to-prompt; Chefer et al. 2023, "Attend-and-Excite"; Marcos-Manchón et al. 2024,
"Open-Vocabulary Attention Maps" (vpulab/ovam); wooyeolBaek/attention-map-diffusers; Helbling et al.
2025, "ConceptAttention" (arXiv:2502.04320); "Seg4Diff" (arXiv:2509.18096); "GoCA"
(arXiv:2603.06178), for the division by the start token's map; Jun et al. 2026, "I'm a Map!
Interpretable Motion-Attentive Maps" (arXiv:2603.02919).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from ..errors import InvalidValueError, OptionError
from ..hooks.keep import Z_SCORES, Space
from ..hooks.run_part import RunPart
from ..models.layers import find_denoiser

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


_LIKENESS: dict[Space, str] = {
    "output": "likeness of outputs",
    **dict.fromkeys(Z_SCORES, "likeness of outputs, z-score among words"),
}


@dataclass(frozen=True)
class Preset:
    """A way from the maps of layers ``A_l[step, head, cell, token]`` to one map a token.

    Attributes:
        name: what it is called.
        places: the layers that are read, by place.
        or_all: where there are none of these places, read all layers there are.
        cells: read only the grid whose shorter side is nearest to so many cells (in proportion).
        least_cells: leave out grids of fewer cells on their shorter side; where all have fewer,
            all but the finest.
        deepest: leave out layers below this level; level 3 is an eighth of the latent's side.
        steps: ``"mean"`` or ``"sum"`` over the calls of the model that were kept; ``"last"``, the
            last call alone; a part of the schedule, whose mean it is.
        heads: ``"mean"``: over a layer's heads, then over layers; ``"sum"``: over a layer's heads;
            ``"pool"``: over the heads of all layers, as if they were of one.
        each_head: each head is resized, and cut off at 0, before it is averaged.
        layers: ``"mean"`` or ``"sum"`` over layers, at the finest grid among them.
        resize: ``"bilinear"`` or ``"bicubic"``, which is cut off at 0.
        among_words: the softmax is over the words, ``<sos>`` and the first ``<eos>`` only.
        contrast: if not 0: the softmax over the words' columns of the maps times this factor.
        sigma: of a Gaussian over 3x3 cells at the end, in cells; 0 for none.
        words: a word of several columns is their ``"sum"`` or their ``"mean"``.
        depth: read only the block at this part of the way through them, in [0, 1); None for all.
        rescale: a map is divided, cell by cell, by that of the start token, which takes what a cell
            has to give away; by that of the end token where a text has no start (T5).
        space: ``"attention"``; ``"output"``: of joint attention, how alike what a word and a cell
            get is, see :mod:`sdattn.hooks.output_space`, which needs ``contrast``; ``"gramcol"``
            and ``"imap"``: of joint attention, how much more like the cell that a word is looked
            for by than like those of other words, see :mod:`sdattn.hooks.output_space`. Without
            ``contrast`` such a map is cut off at 0, the mean of the words.
        refine: ``"self"``: spread along the image's self-attention, see
            :mod:`sdattn.maps.aggregation`; None for as they are.
        sharpen: if not 1: a map's way from its lowest value, which becomes 0, to its highest, which
            stays what it is, is raised to this power.

    Raises:
        ValueError: a value that is none of these.
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
    depth: float | None = None
    rescale: bool = False
    sharpen: float = 1.0

    def __post_init__(self) -> None:
        chosen = {name: getattr(self, name) for name in _CHOICES}
        if not isinstance(self.steps, str):
            part = RunPart.between(self.steps)
            chosen["steps"] = "mean" if part and part.first < part.last else self.steps
        for name, value in chosen.items():
            if value not in _CHOICES[name]:
                choices = ", ".join(map(repr, _CHOICES[name]))
                more = ", or a part of the schedule, (0.5, 1.0)" if name == "steps" else ""
                raise InvalidValueError(
                    f"The preset {self.name!r} has {name}={value!r}: pass {choices}{more}."
                )
        if self.depth is not None and not 0 <= self.depth < 1:
            raise InvalidValueError(
                f"The preset {self.name!r} has depth={self.depth!r}: pass a number from 0 to below "
                "1, or None for all blocks."
            )
        if not 0 < self.sharpen < math.inf:
            raise InvalidValueError(
                f"The preset {self.name!r} has sharpen={self.sharpen!r}: pass a number above 0, 1 "
                "for maps as they are."
            )
        if self.space == "output" and not self.contrast:
            raise InvalidValueError(
                f"The preset {self.name!r} has space='output', whose values are of any sign, and "
                "contrast=0. Pass contrast=10.0 for the softmax over the words."
            )
        if not self.places or isinstance(self.places, str):
            raise InvalidValueError(
                f"Preset {self.name!r} has places={self.places!r}: pass a tuple."
            )

    @property
    def title(self) -> str:
        """The name, and whether its maps are refined."""
        return f"{self.name}, refined" if self.refine else self.name

    @property
    def part(self) -> RunPart | None:
        """The part of the run that it reads; None where it names none."""
        return None if isinstance(self.steps, str) else RunPart.of(self.steps)

    @property
    def needs_all_columns(self) -> bool:
        """Whether a word's map depends on the columns of others."""
        return bool(self.contrast or self.rescale)

    @property
    def compares_words(self) -> bool:
        """Whether values are z-scores among the words of a prompt, of any sign."""
        return self.space in Z_SCORES

    @property
    def unit(self) -> str:
        """What the values of its maps are, for a colour bar."""
        if self.sharpen != 1:
            return f"{replace(self, sharpen=1.0).unit}, sharpened"
        if self.rescale:
            return "attention as a multiple of the start token's"
        if self.contrast:
            what = _LIKENESS.get(self.space, "attention")
            return f"softmax over words of {self.contrast:g} \N{MULTIPLICATION SIGN} {what}"
        if self.compares_words:
            return _LIKENESS[self.space]
        what = "attention among words" if self.among_words else "attention"
        summed = [name for name in ("steps", "heads", "layers") if getattr(self, name) == "sum"]
        if not summed:
            return f"share of {what}"
        *first, last = summed
        return f"{what}, summed over {', '.join(first)}{' and ' if first else ''}{last}"

    def reads(self, place: str, level: int) -> bool:
        """Whether a layer is of the places and levels that are read."""
        return place in self.places and (self.deepest is None or level <= self.deepest)

    def to_json(self) -> dict[str, Any]:
        """Its attributes as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_json(cls, held: dict[str, Any]) -> Preset:
        """What :meth:`to_json` gave.

        Raises:
            ValueError: it has other attributes.
        """
        tuples: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in held.items()
        }
        try:
            return cls(**tuples)
        except TypeError as error:
            raise InvalidValueError(
                f"The preset has attributes that this version does not know: {error}."
            ) from None


_ALL = (
    # Where it points is measured by scripts/evaluation/evaluate_heatmaps.py: the way up, on grids
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
    # of SD3-medium block 9 of 24, counted from 0, and step 20 of 28: the eighth from the end
    Preset("seg4diff", ("double",), depth=9 / 24, steps=(0.7, 0.76), words="mean"),
    Preset("rescaled", ("double", "single"), rescale=True),
    # Of joint attention what points best, by the same script. Spread maps have a wide slope around
    # what they point at; raised to the fifth power, half of their range is a good place to cut.
    Preset("joint", ("double", "single"), steps=(0.5, 1.0), refine="self", sharpen=5.0),
    Preset("columns", ("double", "single"), steps=(0.5, 1.0)),
    Preset("gramcol", ("double", "single"), space="gramcol", words="mean"),
    Preset("imap", ("double", "single"), space="imap", words="mean"),
)
PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})


def nothing_read(preset: Preset, found: Iterable[tuple[str, int]]) -> str:
    """What to say where none of the layers, (place, level) each, is one that a preset reads."""
    there = ", ".join(sorted({f"{place} at level {level}" for place, level in found}))
    levels = "" if preset.deepest is None else f" down to level {preset.deepest}"
    return (
        f"The preset {preset.name!r} reads layers of the places {', '.join(preset.places)}{levels},"
        f" and there are only: {there}. Choose other layers, or another preset."
    )


def preset_of(preset: str | Preset, refine: str | None = None, default: str = "default") -> Preset:
    """A preset by its name, or as it is; ``refine`` is put in where it is given.

    Args:
        default: what ``"default"`` stands for, by name.

    Raises:
        ValueError: no preset is called that, or ``refine`` is not ``"self"``.
    """
    if refine not in (None, "self"):
        raise OptionError("refine", refine, "pass 'self', or None for the maps as they are.")
    if not isinstance(preset, Preset):
        if preset not in PRESETS:
            raise OptionError("preset", preset, "choose one of {0}.", ", ".join(PRESETS))
        preset = PRESETS[preset]
    if preset == PRESETS["default"]:
        preset = PRESETS[default]
    return replace(preset, refine="self") if refine else preset


def preset_for(target: Any, preset: str | Preset, refine: str | None = None) -> Preset:
    """:func:`preset_of` for a run of a pipeline, where ``"default"`` is what points best in models
    of its family."""
    return preset_of(preset, refine, find_denoiser(target).family.preset)
