"""Processors of a registered controller; each knows its registration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from ..attention import TorchAttnProcessor, TorchJointProcessor
from ..attention.controlled import Controller, Spans
from ..errors import InvalidValueError, RunError
from ..hooks.pass_reader import PassReader
from ..hooks.passes import Pass
from ..models.layers import AttentionLayer, Denoiser, is_unet
from .controlled_layers import check_guidance


class Handle(Protocol):
    """A registration, as its processors know it."""

    controller: Controller | None

    def spans(self) -> Spans | None:
        """Return where image and text are in the pass that runs now, in joint attention."""


class _Registered(TorchAttnProcessor):
    """Processor for self- and cross-attention."""

    def __init__(self, handle: Handle, place: str):
        super().__init__(handle.controller, place)
        self.handle = handle


class _RegisteredJoint(TorchJointProcessor):
    """Processor for joint attention, which shows both of its blocks by default."""

    def __init__(self, handle: Handle, place: str, **options: Any):
        super().__init__(handle.controller, place, spans=handle.spans, **{"image": True, **options})
        self.handle = handle


def registered(
    handle: Handle, layer: AttentionLayer, **joint: Any
) -> _Registered | _RegisteredJoint:
    """Return a layer's processor; ``joint`` has options for layers of joint attention."""
    if layer.kind == "joint":
        return _RegisteredJoint(handle, layer.place, **joint)
    return _Registered(handle, layer.place)


def passes_of(denoiser: Denoiser, controller: Controller | None) -> PassReader:
    """Return the reader of a model's passes for a controller."""
    if is_unet(denoiser.model):
        try:
            return PassReader(denoiser)
        except ValueError:  # unknown guidance layout: every call counts
            return PassReader(replace(denoiser, pipeline=None))
    try:
        passes = PassReader(denoiser)
    except ValueError as error:
        raise InvalidValueError(
            f"{error} To register a controller, pass the transformer: every row is then shown."
        ) from None
    check_guidance(passes, controller)
    return passes


def refuse_broken_step(controller: Controller | None) -> None:
    """Raise RuntimeError if the model begins a pass while a step of ``controller`` is open."""
    begun = getattr(controller, "cur_att_layer", 0)
    if begun not in (0, getattr(controller, "num_uncond_att_layers", 0)):
        raise RunError(
            f"The {type(controller).__name__} is in the middle of a step: {begun} layers have "
            "called, and the model starts a new pass. After a run that stopped early, reset() the "
            "controller."
        )


def check_batch(controller: Controller | None, found: Pass, in_unet: bool) -> None:
    """Raise ValueError if a run and its controller differ in guidance or number of prompts."""
    guidance, batch, order = getattr(controller, "guidance", None), found.batch, found.order
    # Where the pipeline says that every row is a prompt's, there is no half to leave out.
    in_batch = guidance in ("auto", "batch") and (in_unet or order != ("conditional",))
    prompts = getattr(controller, "prompts", None)
    guided = None if order is None else "unconditional" in order
    attached = getattr(controller, "attachment", None)
    if in_batch and attached is None and (batch % 2 or guided is False):
        raise InvalidValueError(
            "The controller leaves out the first half of the batch as unconditional, and this run, "
            f"in a batch of {batch}, has no guidance. Set `guidance_scale` above 1, or make the "
            "controller with guidance=None."
        )
    if prompts is None or not hasattr(controller, "guidance"):
        return
    if guidance is None and guided:
        raise InvalidValueError(
            "The controller was made with guidance=None and this run is guided. Make it with "
            "guidance='batch', or set guidance_scale to 1."
        )
    images, rest = divmod(batch // 2 if in_batch else batch, len(prompts))
    if rest or not images or (images > 1 and getattr(controller, "local_blend", None)):
        raise InvalidValueError(
            f"The controller was made for {len(prompts)} prompts and the batch has "
            f"{batch // 2 if in_batch else batch} images. Run the pipeline on exactly "
            "those prompts; with a LocalBlend, num_images_per_prompt=1."
        )
