from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..attention.controlled import Controller, check_controller
from ..errors import warn
from ..hooks.passes import CaptureWarning
from ..models.attention_layer import KINDS
from ..models.denoiser_call import innermost, is_compiled, unwrapped
from ..models.layers import LayerSelection, needs_size, select_layers
from ..models.pipeline import Pipeline
from .controlled_layers import check_weights, controlled_layers, passes_of
from .handle import ControlHandle, count_calls


def register_attention_control(
    target: Pipeline | nn.Module, controller: Controller | None, *, layers: LayerSelection = None
) -> ControlHandle:
    """Make every attention layer of a model show its probabilities to ``controller``.

    Each layer gets a :class:`sdattn.TorchAttnProcessor`, which calls ``controller(probs [B*heads,
    N, T], is_cross, place)`` once a pass, layers in execution order (down, mid, up; self before
    cross in a block). A layer of joint attention gets a :class:`sdattn.TorchJointProcessor`, which
    calls twice: with ``is_cross=False`` for image-to-image attention, ``[B*heads, N, N]``, then
    with ``is_cross=True`` for image-to-text attention, in the places ``"double"`` and ``"single"``.

    A returned tensor is used; after None, ``probs`` is, so edits in place count. With gradients
    ``probs`` is part of the live graph.

    Source: the contract of google/prompt-to-prompt, of the community pipeline in diffusers and of
    Attend-and-Excite; their controllers run here. A transformer needs keys ``double_cross``,
    ``double_self`` (and ``single_…``) in their stores, and its number of text columns instead of
    77.

    Args:
        target: a pipeline of SD 1.x, 2.x, SDXL, Stable Diffusion 3, FLUX or Qwen-Image, or its UNet
            or transformer. A transformer's passes for no prompt are not shown.
        controller: its ``num_att_layers`` is set to the number of calls per pass. None for plain
            attention in pure torch. It replaces one that a plain call registered before.
        layers: layers that call it, see :func:`sdattn.models.layers.select_layers`; the others keep
            their processors. Default: all.

    Returns:
        A handle whose ``remove()``, or the end of its ``with`` block, puts the previous processors
        back. A compiled model runs eagerly meanwhile, with a warning; one compiled later is
        refused.

    Raises:
        TypeError: ``target`` is no model that sdattn knows; ``controller`` takes other arguments.
        ValueError: the model has processors with weights of their own (IP-Adapter), which pure
            torch attention would ignore; ``layers`` that fit none.
        RuntimeError: a controller is registered in a ``with`` block that is still open.
    """
    check_controller(controller)
    denoiser, found = controlled_layers(target)
    chosen = select_layers(found, layers, KINDS)
    passes = passes_of(denoiser, controller)
    for layer in found:  # one that was registered before may be in other layers
        former = getattr(innermost(layer.module.processor), "handle", None)
        if former is not None:
            former.supersede()
    check_weights(chosen)
    count_calls(controller, chosen)
    if is_compiled(denoiser.model):
        warn(
            f"The {type(unwrapped(denoiser.model)).__name__} is compiled. While the "
            f"{type(controller).__name__} is registered it runs eagerly, so the image can differ "
            "from the compiled model's in its last bits.",
            CaptureWarning,
        )
    by_size = partial(select_layers, found, layers, KINDS) if needs_size(layers) else None
    return ControlHandle(denoiser, chosen, controller, passes, by_size=by_size)


def step_end(controller: Any) -> Callable[..., dict[str, Any]]:
    """Return a ``callback_on_step_end`` for diffusers' pipelines that calls
    ``controller.step_callback(latents)`` after each step of the scheduler."""

    def callback(
        _pipe: object, _step: int, _timestep: object, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        latents: Tensor = controller.step_callback(tensors["latents"])
        return {"latents": latents}

    return callback
