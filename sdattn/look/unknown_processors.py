"""The attention of an unknown processor, seen while it runs.

A processor may edit its probabilities, by a controller (Hertz et al. 2022, "Prompt-to-Prompt Image
Editing with Cross Attention Control"), a temperature or anything else. In the end it multiplies
them with the values, and the result goes to the layer's output projection. So the first factor of
the product that arrives there is what was used.
"""

from collections.abc import Sequence
from functools import cache
from inspect import unwrap
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attention import HALF_TYPES
from ..attention.calls import AttentionCall
from ..attention.controlled import ControlledProcessor
from ..attention.core import rounding_error
from .dispatched import DISPATCH, backend_of
from .layer import Layer

# Processors of diffusers whose formula is known.
PLAIN = frozenset(
    {
        "AttnProcessor",
        "AttnProcessor2_0",
        "AttnProcessorNPU",
        "FusedAttnProcessor2_0",
        "IPAdapterAttnProcessor",
        "IPAdapterAttnProcessor2_0",
        "IPAdapterXFormersAttnProcessor",
        "JointAttnProcessor2_0",  # for SD3.5's self-attention
        "PAGCFGIdentitySelfAttnProcessor2_0",
        "PAGIdentitySelfAttnProcessor2_0",
        "SanaAttnProcessor2_0",
        "SlicedAttnProcessor",
        "XFormersAttnProcessor",
        "XLAFlashAttnProcessor2_0",
    }
)
TRACED = "AttnProcessor2_0"  # the one that models have by themselves, which is recorded in a graph
HOMES = ("diffusers.models.attention_processor", "diffusers.models.transformers.sana_transformer")
GATES = "to_gate_logits"  # the projection of layers that weigh each head's output (LTX-2)


Kind = Literal["ours", "plain", "dispatching", "unknown"]


def kind_of(attn: Layer, processor: object, is_joint: bool) -> Kind:
    """Return what is known of a processor: it is one of sdattn's; its formula is known; or, in
    joint attention, it hands all tokens to a kernel of diffusers, as do its dispatcher and its
    backend."""
    if isinstance(processor, ControlledProcessor):
        return "ours"
    if not is_joint:
        return "plain" if is_plain(attn, processor) else "unknown"
    call = unwrap(type(processor).__call__)
    chosen = backend_of(processor)
    dispatcher = getattr(call.__globals__.get("dispatch_attention_fn"), "__module__", DISPATCH)
    is_own = dispatcher == DISPATCH and (chosen is None or chosen[1])
    return "dispatching" if is_own and call.__module__.startswith("diffusers.") else "unknown"


def is_plain(attn: Layer, processor: object) -> bool:
    """Check whether a processor in this layer uses ``softmax(q k^T / sqrt(d))``, and nothing else.

    No processor does so in a layer with its own ``scale`` or ``get_attention_scores``, or in a
    module of diffusers whose ``F`` is not torch's.
    """
    home = _home_if_known(type(processor).__call__)
    if home is None or "get_attention_scores" in vars(attn):
        return False
    if home.get("F", nn.functional) is not nn.functional:
        return False
    scale = getattr(attn, "scale", None)
    width = getattr(attn, "inner_dim", None)
    return scale is None or width is None or scale == (width // attn.heads) ** -0.5


@cache
def _home_if_known(call: Any) -> dict[str, Any] | None:
    """Return the names in the module of a plain processor's call, or None for any other."""
    call = unwrap(call)
    names: dict[str, Any] = call.__globals__
    is_known = call.__module__ in HOMES and call.__qualname__.split(".")[0] in PLAIN
    return names if is_known else None


def gated(made: Tensor, logits: Sequence[Tensor]) -> Tensor:
    """Return the part of an attention's result ``[B, N, heads*d]`` that passes a layer's gates,
    ``logits`` ``[B, N, heads]`` if it has :data:`GATES` (transformer_ltx2.py,
    ``LTX2AudioVideoAttnProcessor.__call__``)."""
    if len(logits) != 1:
        return made
    weights = 2.0 * torch.sigmoid(logits[0])
    return (made.unflatten(-1, (weights.shape[-1], -1)) * weights.unsqueeze(-1)).flatten(-2)


def maker_in(
    calls: Sequence[AttentionCall], batch: int, heads: int, cells: int, features: int
) -> AttentionCall | None:
    """Return the last call that made ``[batch, heads, cells, features]``, by head, or None; heads
    that were computed in slices are joined."""
    # Only products of the values' shape can have made the output; the last of them did.
    fitting = [call for call in calls if call.output.shape[-2:] == (cells, features)]
    if fitting and fitting[-1].probs is None:
        call = fitting[-1]
        if call.query.dtype in HALF_TYPES:
            call.logsumexp = None  # less precise than a softmax here
        return call.by_head(batch, heads)
    # Heads in slices: from the last product back until there are all of them, and no more.
    parts: list[AttentionCall] = []
    for product in reversed(fitting):
        if product.probs is None:
            break
        parts.insert(0, product)
        rows = sum(part.output.shape[:-2].numel() for part in parts)
        if rows >= batch * heads:
            return _joined(parts, batch, heads) if rows == batch * heads else None
    return None


def _joined(parts: Sequence[AttentionCall], batch: int, heads: int) -> AttentionCall | None:
    """Return products of some rows each, ``[rows, N, T]`` of ``B*heads``, as one call."""
    probs = []
    for part in parts:
        assert part.probs is not None
        probs.append(part.probs.reshape(-1, *part.probs.shape[-2:]))
    output = torch.cat([part.output.flatten(0, -3) for part in parts]).unflatten(0, (batch, heads))
    if len({part.shape[1:] for part in probs}) > 1 or sum(map(len, probs)) != batch * heads:
        return None
    joined = probs[0] if len(probs) == 1 else torch.cat(probs)
    return AttentionCall(probs=joined.unflatten(0, (batch, heads)), output=output)


@torch.no_grad()
def misfit(predicted: Tensor, arrived: Tensor) -> Tensor:
    """Return the error of a prediction as a multiple of what rounding explains, float32, 0-d, on
    its device: above 1 if it is wrong."""
    largest = predicted.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    error = (predicted.float() - arrived.float()).abs().max() / largest
    return error / rounding_error(predicted.dtype, arrived.dtype)


def agrees(predicted: Tensor, arrived: Tensor) -> bool:
    """Check whether one is the other, of the same shape; reads from the device."""
    if predicted.shape != arrived.shape or arrived.device.type == "meta":
        return False
    return bool(misfit(predicted, arrived) <= 1)


def title(inner: object) -> str:
    """Return what a processor, or a forward in its place, is called in messages."""
    return str(getattr(inner, "title", f"the processor {type(inner).__name__}"))


def unknown_use(inner: object) -> str:
    """Return the message for a processor whose output came from no attention that was seen."""
    return (
        f"What reached the layer's to_out from {title(inner)} is not what any attention that could "
        "be seen makes of its values, so what it attended to cannot be known. Multiply the values "
        "by the probabilities with torch.bmm, or call torch's scaled_dot_product_attention, and "
        "change nothing behind that; or edit by a controller, "
        "sdattn.TorchAttnProcessor(controller), in joint attention TorchJointProcessor; or leave "
        "this layer out (layers=…)."
    )
