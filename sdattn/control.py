"""Put a prompt-to-prompt controller, ours or another's, into the attention of a model.

with register_attention_control(pipe, controller): ...        for the block
handle = register_attention_control(pipe, controller)         until handle.remove()
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from .layers import Denoiser, find_denoiser, find_layers
from .maps import CaptureError, CaptureWarning
from .processors import Controller, ObservingProcessor, TorchAttnProcessor


def register_attention_control(target: Any, controller: Controller | None) -> ControlHandle:
    """Have every attention layer of a model show its probabilities to ``controller``.

    Each layer gets a :class:`sdattn.TorchAttnProcessor`, which calls
    ``controller(probs [B*heads, N, T], is_cross, place)`` once a pass, layers in execution order
    (down, mid, up; self before cross in a block). A tensor that it returns is used. If it returns
    None, what it has left in ``probs`` is used, so edits in place count. Without gradients
    ``probs`` may be written to; with them it is part of the live graph.

    Source: the contract of google/prompt-to-prompt, of the community pipeline in diffusers and of
    Attend-and-Excite; controllers written for any of them run here.

    Args:
        target: a Stable Diffusion pipeline with a UNet, or the UNet.
        controller: its ``num_att_layers`` is set to the number of layers. None for plain
            attention in pure torch.

    Returns:
        A handle whose ``remove()`` puts the processors from before back. As a context manager it
        does so at the end of the block.

    Raises:
        TypeError: ``target`` is no model that sdattn knows.
        ValueError: the model has processors with weights of their own (IP-Adapter), which pure
            torch attention would leave out.
    """
    denoiser = find_denoiser(target)
    layers = find_layers(denoiser.model)
    for layer in layers:
        if isinstance(layer.module.processor, nn.Module) and list(
            layer.module.processor.parameters()
        ):
            raise ValueError(
                f"{layer.name} has a {type(layer.module.processor).__name__}, whose weights a "
                "controller would not see. Unload it first (pipe.unload_ip_adapter())."
            )
    with suppress(AttributeError):  # a bound method counts no layers
        controller.num_att_layers = len(layers)  # type: ignore[union-attr]
    return ControlHandle(denoiser, controller)


def step_end(controller: Any) -> Callable[..., dict[str, Any]]:
    """A ``callback_on_step_end`` for diffusers' pipelines, for controllers that change the latents.

    It calls ``controller.step_callback(latents)`` after each step of the scheduler.
    """

    def callback(_pipe: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        latents: Tensor = controller.step_callback(tensors["latents"])
        return {"latents": latents}

    return callback


class ControlHandle:
    """A controller in its place; see :func:`register_attention_control`."""

    def __init__(self, denoiser: Denoiser, controller: Controller | None):
        self.controller = controller
        self._passes = 0
        self._layers = find_layers(denoiser.model)
        self._before = [layer.module.processor for layer in self._layers]
        self._ours = [TorchAttnProcessor(controller, layer.place) for layer in self._layers]
        self._hook = denoiser.model.register_forward_pre_hook(self._before_pass, with_kwargs=True)
        for layer, processor in zip(self._layers, self._ours, strict=True):
            layer.module.set_processor(processor)

    def __enter__(self) -> ControlHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._restore()
        if error is None:
            self._check()

    def remove(self) -> None:
        """Put the processors from before back. Registrations come off in reverse order.

        Warns:
            CaptureWarning: the model never ran.
        """
        self._check()
        self._restore()

    def _restore(self) -> None:
        self._hook.remove()
        for layer, before in zip(self._layers, self._before, strict=True):
            if layer.module.processor is not before:
                layer.module.set_processor(before)

    def _check(self) -> None:
        if not self._passes:
            warnings.warn(
                f"The {type(self.controller).__name__} saw nothing: the model it was registered in "
                "never ran. Run that very pipeline or UNet before the registration ends.",
                CaptureWarning,
                stacklevel=3,
            )

    def _before_pass(
        self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The forward pre-hook of the model: refuse what the controller would not see whole."""
        self._passes += 1
        batch = len(args[0] if args else kwargs["sample"])
        if getattr(self.controller, "guidance", None) == "batch" and batch % 2:
            raise ValueError(
                f"The controller leaves out the first half of the batch as unconditional, and the "
                f"model was called with a batch of {batch}, so this run has no guidance. Set "
                "guidance_scale above 1, or make the controller with guidance=None."
            )
        for layer, ours in zip(self._layers, self._ours, strict=True):
            processor = layer.module.processor
            while isinstance(processor, ObservingProcessor):
                processor = processor.inner
            if processor is not ours:
                raise CaptureError(
                    f"The processor of {layer.name} was replaced by a {type(processor).__name__}, "
                    f"so the {type(self.controller).__name__} would miss this layer and lose count "
                    "of the steps. Register the controller after whatever sets processors."
                )
