"""Text states that change inside a run (`TextWatch`), or between calls of a bare model
(`RepeatedCalls`), noticed without reading from the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from torch import Tensor

from ..models.denoiser_call import DenoiserCall, Timestep

Verdict = bool | Tensor  # a bool on the device, read on demand


class TextWatch:
    """Text states of one run's images, pass by pass."""

    def __init__(self, frames: Sequence[int] | None = None):
        self._frames = frames
        self._given: tuple[Tensor, int] | None = None  # from the last pass, and its version
        self._kept: Tensor | None = None  # a copy of the rows that were kept
        self._by_frame: Verdict = False

    def note(
        self, text: Tensor | None, rows: Sequence[int], frame_rows: int
    ) -> tuple[Verdict, Verdict]:
        """Return two flags: the kept rows have other states ``[B, T, width]`` than in the previous
        pass, and a video's frames, ``frame_rows`` rows each, have states of their own."""
        if text is None or text.is_meta or len(text) <= max(rows, default=0):
            return False, False
        version = 0 if text.is_inference() else text._version
        before = self._kept
        given = self._given
        self._given = (text, version)
        same = given is not None and given[0] is text and given[1] == version
        if same and before is not None and len(rows) == len(before):
            return False, self._by_frame
        kept = text.detach()[list(rows)]
        self._kept = kept
        self._by_frame = differs_by_frame(kept, frame_rows, self._frames)
        if before is None:
            return False, self._by_frame
        if kept.shape != before.shape or kept.device != before.device:
            return True, self._by_frame
        return (kept != before).any(), self._by_frame


def differs_by_frame(text: Tensor, frame_rows: int, frames: Sequence[int] | None) -> Verdict:
    """Check whether frames of ``[videos * frame_rows, T, width]`` differ from the first kept."""
    if frame_rows < 2 or len(text) % frame_rows:
        return False
    each = text.unflatten(0, (-1, frame_rows))
    chosen = each if frames is None else each[:, [f for f in frames if f < frame_rows]]
    return (chosen != chosen[:, :1]).any() if chosen.shape[1] else False


class TextsOfRun:
    """Numbers of the texts that the passes of a run were drawn from; the first pass's text is 0."""

    def __init__(self) -> None:
        self._verdicts: list[tuple[Verdict, Verdict]] = []

    def add(self, changed: Verdict, by_frame: Verdict) -> None:
        """Add a pass, with the flags of :meth:`TextWatch.note`."""
        self._verdicts.append((changed, by_frame))

    def of(self, passes: Iterable[int]) -> list[int]:
        """Return the numbers of the texts of some passes, each once; this waits for the device."""
        numbers = list(accumulate(bool(changed) for changed, _ in self._verdicts))
        return sorted({numbers[i] for i in passes if i < len(numbers)})

    def changes(self) -> list[int]:
        """Return the passes, from 0, that begin with another text than the one before; this waits
        for the device."""
        return [i for i, (changed, _) in enumerate(self._verdicts) if changed]

    def by_frame(self, passes: Iterable[int]) -> bool:
        """Check whether a video's frames had their own texts in one of these passes."""
        return any(bool(self._verdicts[i][1]) for i in passes if i < len(self._verdicts))


class RepeatedCalls:
    """Consecutive calls of a model that may belong to two prompts, but count as steps of one.

    Without a pipeline the guidance branch of a call is unknown; two calls at one timestep with
    different text states are likely to be both branches.
    """

    def __init__(self) -> None:
        self._last: tuple[float | Timestep, Tensor | None] | None = None
        self._doubtful: list[tuple[float | Timestep, float | Timestep]] = []

    def note(self, call: DenoiserCall) -> None:
        """Note a call that begins now."""
        before = self._last
        self._last = (call.timestep, call.text)
        # Compared at the end: reading a timestep now would wait for the device.
        if before is not None and before[1] is not call.text:
            self._doubtful.append((before[0], call.timestep))

    def found(self) -> float | None:
        """Return the first timestep at which the model ran twice, or None; each only once."""
        doubtful = self._doubtful
        self._doubtful = []
        same = (float(one) for before, one in doubtful if float(before) == float(one))
        return next(same, None)
