"""Warnings of a capture: at its beginning, and when the run is over or was stopped (`Stopped`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import warn
from ..files.records import Record
from ..models.denoiser_call import innermost, unwrapped
from ..models.layers import AttentionLayer
from .passes import CaptureWarning


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
