"""The query and key of torch's own multi-head attention, which keeps them to itself.

``torch.nn.MultiheadAttention`` may leave the work to one fused operation, in which nothing can be
seen. Its query and key follow from its arguments and weights (Vaswani et al. 2017, "Attention Is
All You Need", section 3.2.2; torch/nn/functional.py, ``multi_head_attention_forward``).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import split_heads
from ..attention.calls import AttentionCall
from ..attention.recording import addend

FUNCTION: Any = nn.functional.multi_head_attention_forward
_OF_FUNCTION = inspect.signature(FUNCTION)
_OF_MODULE = inspect.signature(nn.MultiheadAttention.forward)
_OF_LAYER = inspect.signature(nn.TransformerEncoderLayer.forward)


def is_multi_head(module: nn.Module) -> bool:
    """Check whether a module is torch's multi-head attention, with torch's own ``forward``."""
    return _runs_forward_of(nn.MultiheadAttention, module)


def may_fuse(module: nn.Module) -> bool:
    """Check whether a module of torch's may run as one fused operation, or nest its tensors."""
    if isinstance(module, nn.TransformerEncoder):
        return is_encoder_layer(module.layers[0])
    return is_multi_head(module) or is_encoder_layer(module)


def is_encoder_layer(module: nn.Module) -> bool:
    """Check whether a module is torch's encoder layer, with torch's own ``forward``."""
    layer: Any = module
    return _runs_forward_of(nn.TransformerEncoderLayer, layer) and is_multi_head(layer.self_attn)


def _runs_forward_of(kind: type[nn.Module], module: nn.Module) -> bool:
    is_kinds = getattr(type(module), "forward", None) is kind.forward
    return is_kinds and "forward" not in vars(module)


def call_of_module(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> AttentionCall | None:
    """Return what ``module(*args, **kwargs)`` attends to; None if it adds keys of its own, or for
    nested tensors."""
    arguments = _OF_MODULE.bind(module, *args, **kwargs).arguments
    if arguments["query"].is_nested or arguments["key"].is_nested:
        return None
    if module.bias_k is not None or module.add_zero_attn:
        return None
    call = _projected(
        arguments["query"],
        arguments["key"],
        batch_first=module.batch_first,
        heads=module.num_heads,
        joined=module.in_proj_weight,
        apart=(module.q_proj_weight, module.k_proj_weight),
        bias=module.in_proj_bias,
        masks=(arguments.get("attn_mask"), arguments.get("key_padding_mask")),
    )
    call.dropout = module.training and module.dropout > 0
    return call


def call_of_encoder_layer(
    layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> AttentionCall | None:
    """Return what ``layer(*args, **kwargs)`` attends to, fused or not; None for nested tensors."""
    arguments = _OF_LAYER.bind(layer, *args, **kwargs).arguments
    states = arguments["src"]
    if states.is_nested:
        return None
    if layer.norm_first:
        states = layer.norm1.forward(states)  # not a call, which would run hooks
    masks = {
        "attn_mask": arguments.get("src_mask"),
        "key_padding_mask": arguments.get("src_key_padding_mask"),
    }
    return call_of_module(layer.self_attn, (states, states, states), masks)


def call_of_function(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionCall | None:
    """Return what a call of :data:`FUNCTION` attends to; None if it adds keys of its own."""
    bound = _OF_FUNCTION.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    adds = ("bias_k", "bias_v", "static_k", "static_v")
    if arguments["add_zero_attn"] or any(arguments[name] is not None for name in adds):
        return None
    call = _projected(
        arguments["query"],
        arguments["key"],
        batch_first=False,
        heads=arguments["num_heads"],
        joined=None if arguments["use_separate_proj_weight"] else arguments["in_proj_weight"],
        apart=(arguments["q_proj_weight"], arguments["k_proj_weight"]),
        bias=arguments["in_proj_bias"],
        masks=(arguments["attn_mask"], arguments["key_padding_mask"]),
    )
    call.dropout = arguments["training"] and arguments["dropout_p"] > 0
    return call


def _projected(
    query: Tensor,
    key: Tensor,
    *,
    batch_first: bool,
    heads: int,
    joined: Tensor | None,
    apart: tuple[Tensor | None, Tensor | None],
    bias: Tensor | None,
    masks: tuple[Tensor | None, Tensor | None],
) -> AttentionCall:
    """Return the call of a query and key, before their projections: ``[B, N or T, width]`` with
    ``batch_first``, else ``[N or T, B, width]``; or without a batch."""
    weights: Sequence[Any] = apart if joined is None else joined.chunk(3)
    biases: Sequence[Tensor | None] = (None, None) if bias is None else bias.chunk(3)
    by_head = []
    for states, weight, its_bias in zip((query, key), weights, biases, strict=False):
        if states.ndim == 2:  # without a batch
            states = states[None]
        elif not batch_first:
            states = states.transpose(0, 1)
        by_head.append(split_heads(nn.functional.linear(states, weight, its_bias), heads))
    query, key = by_head
    return AttentionCall(query, key, mask=_added(query, *masks))


def _added(query: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Return both masks as what is added to the scores. A bool mask is True where nobody looks,
    ``[N, T]`` or ``[B*heads, N, T]``; padding is ``[B, T]``."""
    batch, heads = query.shape[:2]
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (batch, heads))
    if padding is not None:
        padding = padding.reshape(batch, 1, 1, -1)
    added: Tensor | None = None
    for one in (mask, padding):
        if one is not None:  # a kernel's bool mask is True where somebody looks
            addition = addend(~one if one.dtype is torch.bool else one)
            added = addition if added is None or addition is None else added + addition
    return added
