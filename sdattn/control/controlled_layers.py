from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ..attention.joining import TEXT, check_layer, unknown_layer
from ..errors import InvalidTypeError, InvalidValueError
from ..hooks.pass_reader import PassReader
from ..models.layers import (
    AttentionLayer,
    Denoiser,
    find_denoiser,
    is_unet,
    joint_order,
)
from ..models.pipeline import Pipeline


def controlled_layers(target: Pipeline | nn.Module) -> tuple[Denoiser, list[AttentionLayer]]:
    """Return a model whose layers can call a controller, and its layers in execution order: a UNet
    with self- and cross-attention, or a transformer with joint attention (else TypeError)."""
    denoiser = find_denoiser(target)
    layers = denoiser.layers
    kinds = {layer.kind for layer in layers}
    if "joint" in kinds and kinds <= {"joint", "self"}:
        check_joint(denoiser, layers)
    elif not kinds <= {"cross", "self"} or not is_unet(denoiser.model):
        strange = sorted(kinds - {"cross", "self"})
        raise InvalidTypeError(
            f"A {type(denoiser.model).__name__} has {' and '.join(strange) or 'other'} attention "
            "in places that prompt-to-prompt's controllers do not know: it is neither a UNet of "
            "Stable Diffusion nor a model with joint attention alone. Pass a pipeline of SD 1.x, "
            "2.x, SDXL, Stable Diffusion 3, FLUX or Qwen-Image, or its UNet or transformer."
        )
    return denoiser, layers


def check_joint(denoiser: Denoiser, layers: Sequence[AttentionLayer]) -> None:
    """Raise TypeError for joint attention that our processor cannot compute."""
    joint_order(denoiser)
    if denoiser.family.video:
        raise InvalidTypeError(
            f"A {type(denoiser.model).__name__} makes videos; controllers and knockouts work "
            "with images only. capture() can watch it."
        )
    if denoiser.family.spans is not None:
        raise InvalidTypeError(
            f"A {type(denoiser.model).__name__} places its text differently in each row of a "
            "batch, or puts extra tokens around it: controllers and knockouts do not support that. "
            "capture() can watch it."
        )
    for layer in layers:
        check_layer(layer.module)
        two = layer.kind == "joint" and layer.place == "double"
        if two and not any(getattr(layer.module, name, None) is not None for name in TEXT):
            raise unknown_layer(layer.module, "has two streams and no projections for the text")


def check_weights(layers: Iterable[AttentionLayer]) -> None:
    """Raise ValueError for processors with weights of their own, which ours would ignore."""
    for layer in layers:
        processor = layer.module.processor
        if isinstance(processor, nn.Module) and list(processor.parameters()):
            raise InvalidValueError(
                f"{layer.name} has a {type(processor).__name__}, whose weights would be left out. "
                "Unload it first (pipe.unload_ip_adapter()), or choose other layers by name."
            )


def check_guidance(passes: PassReader, controller: object) -> None:
    """Raise ValueError if a controller's ``guidance`` contradicts the pipeline's layout."""
    in_turn = passes.watch is not None and passes.watch.in_turn
    if in_turn and getattr(controller, "guidance", None) == "passes":
        raise InvalidValueError(
            "guidance='passes' needs a model that runs the negative prompt first, and a "
            f"{type(passes.pipeline).__name__} runs the prompt first, or both in one batch. Leave "
            "guidance= out: the pipeline says which pass is which."
        )
