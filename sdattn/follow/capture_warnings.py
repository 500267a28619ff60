"""Warnings of a capture: at its beginning, and when the run is over or was stopped (`Stopped`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CaptureError, warn
from ..files.records import Record
from ..models.denoiser import Denoiser
from ..models.denoiser_call import innermost, unwrapped
from ..models.layers import AttentionLayer
from .pass_reader import PassReader
from .passes import CaptureWarning, Pass, Strays
from .text_watch import RepeatedCalls


class RunWarnings:
    """Doubts noted while the model runs, and reported at the end, when reading is free."""

    def __init__(self, denoiser: Denoiser, branch: str, strays: Strays):
        self.strays = strays
        self._pipeline = type(denoiser.pipeline).__name__
        self._is_bare = denoiser.pipeline is None
        self._is_both = branch == "both"
        self._of_one_branch = 0  # passes without guidance, where both branches were asked for
        self._has_kept = False
        self._repeats = RepeatedCalls()

    def note(self, begun: Pass, passes: PassReader) -> None:
        """Note a pass that begins now."""
        self._has_kept |= bool(begun.rows)
        if self._is_both and not begun.rows and "conditional" in (begun.order or ()):
            self._of_one_branch += 1
        if self._is_bare and passes.call is not None:
            self._repeats.note(passes.call)
        if (call := passes.running) is not None:
            call.is_watched = True

    def refuse_strays(self) -> None:
        """Raise CaptureError if the model was called, for a run that has no pass."""
        if not str(self.strays):
            return
        raise CaptureError(
            f"No pass of the {self._pipeline} was seen inside capture(). {self.strays} Capture the "
            "pipeline that runs. Around a loop of your own say where the unconditional rows are, "
            "capture(pipe, guidance='batch') or guidance=None, or capture the bare model."
        )

    def tell(self) -> None:
        """Warn once about what was noted."""
        texts = [str(self.strays)]
        if self._has_kept and self._of_one_branch:
            texts.append(
                f"Guidance was off in {self._of_one_branch} call(s) of the model, which have no "
                "negative prompt: branch='both' kept the others alone. Nest two captures, one with "
                "branch='unconditional', to keep every call of the prompt."
            )
        if (timestep := self._repeats.found()) is not None:
            texts.append(
                f"The model ran twice at timestep {timestep:g} with other text states, of the "
                "negative prompt perhaps. Both count as steps of the same images. Say it with "
                "guidance='passes', or capture the pipeline to tell them apart."
            )
        for text in filter(None, texts):
            warn(text, CaptureWarning)


def warn_of_image_prompts(layers: Sequence[AttentionLayer]) -> None:
    """Warn if some of these layers attend to image prompts that are not captured."""
    processors = (innermost(la.module.processor) for la in layers if la.kind == "joint")
    if any(hasattr(processor, "to_k_ip") for processor in processors):
        warn(
            "Image prompts (IP-Adapter) of joint attention are not captured: the maps have the "
            "columns of the text only.",
            CaptureWarning,
        )


def warn_of_running_eagerly(model: object) -> None:
    """Warn that a compiled model runs uncompiled."""
    warn(
        f"The {type(unwrapped(model)).__name__} is compiled, and in its graph can be recorded "
        "only means over heads of a UNet's own processors. Inside capture() it runs eagerly, "
        "so the image can differ from the compiled model's in its last bits. To keep it "
        "compiled, enter capture() first and compile inside: each watched layer is then a "
        "graph break.",
        CaptureWarning,
    )


@dataclass(frozen=True)
class Stopped(Record):
    """Early end of a run (``pipe._interrupt = True``): diffusers skips the remaining steps and
    decodes what exists. ``after`` of ``steps`` model calls ran; ``kept`` ones are in the maps."""

    after: int
    steps: int
    kept: tuple[int, ...]

    def __str__(self) -> str:
        return f"after {self.after} of {self.steps} steps; {self._maps()}"

    def _maps(self) -> str:
        if not self.kept:
            return "there are no maps"
        first = self.kept[0] + 1
        last = self.kept[-1] + 1
        if len(self.kept) == 1:
            return f"the maps are of step {first}"
        if len(self.kept) == last - first + 1:
            return f"the maps are of steps {first} to {last}"
        return f"the maps are of steps {', '.join(str(step + 1) for step in self.kept)}"

    def tell(self) -> None:
        """Warn about it, once per run."""
        text = f"The run was stopped {self}."
        if not self.kept:
            text += " It ended before the steps that were to be kept; keep all of them."
        warn(text, CaptureWarning)


def may_stop(pipeline: object) -> bool:
    """Check, in a pass, that the pipeline can be stopped and was not; each call resets the flag."""
    return getattr(pipeline, "_interrupt", None) is False
