"""The processors of a registered controller: each knows its registration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..attention import TorchAttnProcessor, TorchJointProcessor
from ..errors import InvalidValueError, RunError
from ..hooks.pass_reader import PassReader
from ..models.layers import AttentionLayer, Denoiser, is_unet
from .controlled_layers import check_guidance


class _Registered(TorchAttnProcessor):
    """Of self- and cross-attention."""

    def __init__(self, handle: Any, place: str):
        super().__init__(handle.controller, place)
        self.handle = handle


class _RegisteredJoint(TorchJointProcessor):
    """Of joint attention, both of whose blocks are shown."""

    def __init__(self, handle: Any, place: str):
        super().__init__(handle.controller, place, spans=handle.spans, picture=True)
        self.handle = handle


def registered(handle: Any, layer: AttentionLayer) -> _Registered | _RegisteredJoint:
    kind = _RegisteredJoint if layer.kind == "joint" else _Registered
    return kind(handle, layer.place)


def passes_of(denoiser: Denoiser, controller: Any) -> PassReader:
    """Return what reads the passes of a model for a controller."""
    if is_unet(denoiser.model):
        try:
            return PassReader(denoiser)
        except ValueError:  # how its pipeline lays out guidance is not known: every call counts
            return PassReader(replace(denoiser, pipeline=None))
    try:
        passes = PassReader(denoiser)
    except ValueError as error:
        raise InvalidValueError(
            f"{error} To register a controller, pass the transformer: every row is then shown."
        ) from None
    check_guidance(passes, controller)
    return passes


def refuse_broken_step(controller: Any) -> None:
    """Raise RuntimeError if the model begins a pass while a step of ``controller`` is open."""
    begun = getattr(controller, "cur_att_layer", 0)
    if begun not in (0, getattr(controller, "num_uncond_att_layers", 0)):
        raise RunError(
            f"The {type(controller).__name__} is in the middle of a step: {begun} layers have "
            "called, and the model starts anew. After a run that was broken off, reset() the "
            "controller."
        )
