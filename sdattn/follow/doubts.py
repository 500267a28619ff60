"""`Doubts`: what a run did not show for sure, noted while it runs and told when maps are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import CaptureError, warn
from ..models.denoiser import Denoiser
from ..models.denoiser_call import DenoiserCall, unwrapped
from .passes import CaptureWarning, Pass
from .text_watch import RepeatedCalls

_is_own: ContextVar[bool] = ContextVar("_is_own", default=False)


@contextmanager
def own_calls() -> Iterator[None]:
    """Mark calls of models in the block as sdattn's own, for a loss: captures around it leave them
    alone, as any stray, without a warning."""
    before = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(before)


def is_own_call() -> bool:
    """Check whether a call of a model that runs now is sdattn's own, see :func:`own_calls`."""
    return _is_own.get()


class Doubts:
    """Doubts about a run.

    Attributes:
        repeats: calls that may belong to two prompts, where no pipeline tells the branch.
    """

    def __init__(self, denoiser: Denoiser, branch: str | None, step_call: int | None = None):
        self._model = type(unwrapped(denoiser.model)).__name__
        self._pipeline = type(denoiser.pipeline).__name__
        self._is_bare = denoiser.pipeline is None
        self._is_both = branch == "both"
        self._is_told = step_call is not None  # which call of a step counts
        self._strays: Counter[str] = Counter()  # calls of the model outside the run, by caller
        self._most = 1  # calls in one step, for the same branch
        self._of_one_branch = 0  # passes without guidance, where both branches were asked for
        self._has_kept = False
        self.repeats = RepeatedCalls()

    def note(self, begun: Pass, call: DenoiserCall | None) -> None:
        """Note a pass that begins now; ``call`` is None if nothing of it is kept."""
        self._most = max(self._most, begun.again + 1)
        self._has_kept |= bool(begun.rows)
        if self._is_both and not begun.rows and "conditional" in (begun.order or ()):
            self._of_one_branch += 1
        if call is not None and (self._is_bare or begun.order is None):
            self.repeats.note(call)

    def note_stray(self, who: str) -> None:
        """Note a call of the model outside the run, by its caller."""
        if not is_own_call():
            self._strays[who] += 1

    def strays(self) -> str:
        """Return the warning about calls outside the run; empty if there were none."""
        if not self._strays:
            return ""
        return (
            f"{self._strays.total()} call(s) of the {self._model} were not part of this run: from "
            f"{', '.join(self._strays)}. They ran untouched and were not counted."
        )

    def take_strays(self) -> str:
        """Return that warning, and forget the calls."""
        text = self.strays()
        self._strays.clear()
        return text

    def step_calls(self) -> str:
        """Describe steps with several calls for one branch; empty if there were none. The program
        does not show which of them makes the image."""
        if self._most == 1:
            return ""
        return (
            f"The {self._pipeline} called its {self._model} {self._most} times in a step, for the "
            "same branch, and which of these calls makes the image is not known."
        )

    def which_counts(self) -> str:
        """Return that description for a capture that could be told; empty likewise."""
        found = "" if self._is_told else self.step_calls()
        return found and f"{found} Say which counts, from 0: capture(pipe, step_call=0)."

    def refuse_strays(self) -> None:
        """Raise CaptureError if the model was called, for a run that has no pass."""
        if not self._strays:
            return
        raise CaptureError(
            f"No pass of the {self._pipeline} was seen inside capture(). {self.strays()} Capture "
            "the pipeline that runs. Around a loop of your own say where the unconditional rows "
            "are, capture(pipe, guidance='batch') or guidance=None, or capture the bare model."
        )

    def tell(self) -> None:
        """Warn once about what a capture noted."""
        texts = [self.take_strays(), self.which_counts()]
        if self._has_kept and self._of_one_branch:
            texts.append(
                f"Guidance was off in {self._of_one_branch} call(s) of the model, which have no "
                "negative prompt: branch='both' kept the others alone. Nest two captures, one with "
                "branch='unconditional', to keep every call of the prompt."
            )
        timestep = self.repeats.found() if self._is_bare else None
        if timestep is not None:
            texts.append(
                f"The model ran twice at timestep {timestep:g} with other text states, of the "
                "negative prompt perhaps. Both count as steps of the same images. Say it with "
                "guidance='passes', or capture the pipeline to tell them apart."
            )
        for text in filter(None, texts):
            warn(text, CaptureWarning)
