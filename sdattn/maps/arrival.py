"""Did a word arrive in the image? Its map tells, see :meth:`sdattn.Heatmaps.score`.

The cells of an object attend strongly to its word. A forgotten word's map has no high peak, where
it peaks another word may be higher, and it is nearly as high in several places; so is the map of a
word that was drawn twice. A word whose peak hardly leads over the other words there is "weak", or
"missing" where a :class:`Calibration` gives the model's own threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch.nn.functional import max_pool2d

from ..errors import InvalidValueError, MissingFileError
from ..files.records import Record, read_document, read_sealed, sealed
from ..files.writing import write_whole
from ..models.demos import DEMOS
from .heatmap import Heatmap
from .masks import components

Verdict = Literal["missing", "weak"]
FORMAT = "sdattn-calibration-1"
WEAK = 2.0  # the demo's threshold, rounded, see demos/evaluation/evaluate_arrival.py
CALIBRATION = "calibration.json"  # next to a demo's weights
_DO = "Make it again with `python -m scripts.calibrate`."


@dataclass(frozen=True)
class Arrival(Record):
    """A word that probably did not arrive in the image.

    Attributes:
        word: the word.
        columns: its token columns.
        verdict: ``"missing"``: its lead is below the model's threshold; ``"weak"``: the model is
            not calibrated, and it is below :data:`WEAK`.
        lead: its peak as a multiple of the highest value that another judged word has there.
        below: the threshold.
        peak: highest value of its map, in the unit of the maps.
        instead: the content word whose map is highest where it peaks, perhaps itself.
    """

    word: str
    columns: tuple[int, ...]
    verdict: Verdict
    lead: float
    below: float
    peak: float
    instead: str


@dataclass(frozen=True)
class Calibration(Record):
    """The lead below which a word is missing from one model's images, see :func:`leads`.

    Attributes:
        model: the model's name.
        preset: title of the preset of its maps.
        lead: the threshold.
        words, missing: number of words that it was chosen by, and of those that were missing.
        auc: probability that a missing word's lead is below the lead of another word.
    """

    model: str
    preset: str
    lead: float
    words: int
    missing: int
    auc: float

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """Read what :meth:`write` wrote; raise FileNotFoundError, or ValueError if it was
        changed."""
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            raise MissingFileError(f"There is no calibration {path}. {_DO}") from None
        return read_document(cls, read_sealed(data, path, FORMAT, _DO, "checksum"), path, _DO)

    def write(self, path: str | Path) -> None:
        """Write it as JSON, with a checksum."""
        write_whole(Path(path), sealed({"format": FORMAT, **self.to_json()}))

    def check(self, preset: str) -> None:
        """Raise ValueError if it is for maps of another preset."""
        if preset != self.preset:
            raise InvalidValueError(
                f"The calibration of {self.model!r} is for the preset {self.preset!r}, and these "
                f"maps are of {preset!r}. Calibrate the model with that preset."
            )


@cache
def calibration_of(model: str | None) -> Calibration | None:
    """Return the calibration of a demo model, by its name, or None."""
    path = DEMOS[model] / CALIBRATION if model in DEMOS else None
    return Calibration.read(path) if path and path.exists() else None


def peak_of(heatmap: Heatmap) -> float:
    return float(heatmap.values.detach().max())


def rival_of(heatmap: Heatmap) -> float:
    """Return the highest value away from a map's peak, as a share of the peak in [0, 1]: near 1 for
    two objects or none, 0 for an all-zero map.

    Away from it are the cells outside its patch, which is what is connected to it above half of the
    peak, and outside a margin around the patch, a sixteenth of the grid's shorter side. In a video
    the frame with the peak counts.
    """
    values = heatmap.values.detach()
    if values.ndim == 3:
        values = values[values.flatten(1).amax(1).argmax()]
    peak = values.max()
    if not peak:
        return 0.0
    patches = components(values >= peak / 2)
    patch = patches == patches.flatten()[values.argmax()]
    margin = max(1, round(min(values.shape) / 16))
    near = max_pool2d(patch[None].float(), 2 * margin + 1, stride=1, padding=margin)[0] > 0
    return float(values.masked_fill(near, 0).max() / peak)


def mean_strength(maps: Sequence[Heatmap]) -> float:
    """Return the mean over maps of ``ln(peak) - rival``, see :func:`rival_of`; a peak of 0 counts
    as the smallest float32."""
    least = torch.finfo(torch.float32).tiny
    each = (math.log(max(peak_of(one), least)) - rival_of(one) for one in maps)
    return math.fsum(each) / len(maps)


def leads(maps: Sequence[Heatmap]) -> list[float]:
    """Return each map's peak as a multiple of the highest value that another map has there: below 1
    where another word is higher, infinite without others. Maps of the same word, and those that
    share token columns, are no others."""
    found = []
    for one in maps:
        others = [0.0]
        for other in maps:
            if other.label != one.label and not set(other.columns) & set(one.columns):
                others.append(_at_peak(one, other))
        peak = peak_of(one)
        highest = max(others)
        found.append(peak / highest if highest else math.inf if peak else 0.0)
    return found


def arrivals(
    maps: Sequence[Heatmap], words: Sequence[Heatmap], calibration: Calibration | None
) -> list[Arrival]:
    """Return the ``maps`` whose words probably did not arrive, the smallest lead first;
    ``words`` are all that may stand in their place."""
    verdict: Verdict = "weak" if calibration is None else "missing"
    below = calibration.lead if calibration else WEAK
    found = []
    for one, lead in zip(maps, leads(maps), strict=True):
        if lead < below:
            instead = max(words, key=lambda word: _at_peak(one, word)).label
            found.append(
                Arrival(one.label, one.columns, verdict, lead, below, peak_of(one), instead)
            )
    return sorted(found, key=lambda arrival: arrival.lead)


def _at_peak(one: Heatmap, other: Heatmap) -> float:
    """Return the value of another map where ``one`` is highest."""
    return float(other.values.detach().flatten()[int(one.values.argmax())])
