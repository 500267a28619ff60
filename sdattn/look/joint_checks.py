"""Checks that what was seen in a layer of joint attention is the image's attention to its text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..attention import split_heads
from ..attention.calls import AttentionCall
from ..errors import OptionError, RunError
from ..models.denoiser import Denoiser, joint_spans
from ..models.denoiser_call import head_count, innermost
from ..models.layers import AttentionLayer
from .layer import Arguments, Layer
from .output_space import Space
from .projections import Seen
from .row_orders import RowCalls


def check_backends(layers: Sequence[AttentionLayer]) -> None:
    """Raise RuntimeError, before the model runs, for joint attention that is spread over several
    devices."""
    for layer in layers:
        inner = innermost(layer.module.processor)
        config = getattr(inner, "_parallel_config", None)
        spread = getattr(config, "context_parallel_config", None) is not None
        if layer.kind == "joint" and spread:
            raise RunError(
                f"{layer.name} runs with context parallelism, where each device has a part of the "
                "query and key, so what it attends to cannot be known. Switch that off first, or "
                "leave joint layers out (layers=…)."
            )


def check_ways(
    denoiser: Denoiser, layers: Sequence[AttentionLayer], refine: str | None, space: Space
) -> None:
    """Refuse, before the model runs, ``refine`` and ``space`` (see :func:`sdattn.capture`) without
    joint attention."""
    if any(layer.kind == "joint" for layer in layers):
        joint_spans(denoiser, 1, 1)  # refused now if it is not known
    elif refine or space != "attention":
        name, value = ("refine", refine) if refine else ("space", space)
        kind = type(denoiser.model).__name__
        text = (
            f"no layer of joint attention was chosen of this {kind}. Leave it out; see heatmaps()."
        )
        raise OptionError(name, value, text)


def token_count(arguments: Arguments) -> int:
    """Count the tokens of a layer's call; some models pass a single stream's tokens twice, or the
    image's alone, and the others' keys in a cache."""
    image = arguments["hidden_states"]
    text = arguments.get("encoder_hidden_states")
    if arguments.get("kv_cache_mode") == "cached":
        text = getattr(arguments.get("layer_cache"), "k", text)
    return int(image.shape[1] + (0 if text is None or text is image else text.shape[1]))


def whole_call(calls: Sequence[AttentionCall], length: int, name: str) -> AttentionCall:
    """Return the one call for all tokens of text and image."""
    fitting = [call for call in calls if call.shape[2:] == (length, length)]
    if len(fitting) != 1:
        lengths = ["x".join(map(str, call.shape[2:])) for call in calls]
        raise RunError(
            f"The processor {name} called torch's "
            f"scaled_dot_product_attention {len(fitting)} times for all of its {length} "
            f"tokens of text and image together (in all {lengths or 'never'}), so what "
            "it attended to cannot be known. Choose a backend that calls it, "
            "model.set_attention_backend('native'), or leave this layer out (layers=...)."
        )
    check_exact(fitting[0])
    return fitting[0].by_head(*fitting[0].shape[:2]) or fitting[0]


def check_exact(call: AttentionCall) -> None:
    if call.dropout:
        raise RunError(
            "Joint attention with dropout is not supported. Leave this layer out (layers=...)."
        )


def check_order(
    seen: AttentionCall,
    image: slice,
    text: slice,
    attn: Layer,
    projected: Seen,
    name: str,
) -> None:
    """Refuse a layer that did not put the text's values where its keys are said to be.

    Values are neither normed nor rotated. Layers that get text and image joined already project
    both at once; their order is the earlier layers'. In some models the text stream has extra
    tokens.
    """
    if "add_v_proj" in projected:
        own = projected["add_v_proj"][0]
    elif "to_added_qkv" in projected:
        own = projected["to_added_qkv"][0].chunk(3, dim=-1)[-1]
    else:
        return
    if own.device.type == "meta":
        return
    expected = split_heads(own, head_count(attn)).to(seen.value.dtype)  # [B, heads, T, d]
    if text.stop - text.start < expected.shape[2]:
        first = 0 if text.start < image.start else seen.shape[3] - expected.shape[2]
        expected = expected[:, :, text.start - first : text.stop - first]
    if isinstance(seen, RowCalls):  # it has only the tokens that take part
        expected = expected * seen.taken[:, None, text, None]
    if not torch.equal(seen.value[:, :, text], expected):
        raise RunError(otherwise_joined(name, text))


def otherwise_joined(name: str, text: slice) -> str:
    return (
        f"The processor {name} does not join text and image in the order that is known of this "
        f"model (the text at {text.start} to {text.stop}), so which column is which token cannot "
        "be known. Leave this layer out (layers=...)."
    )
