"""Sources of what a layer of cross- or self-attention attended to, from certain to worked out.

- `shown`: a processor of sdattn shows its call, as a controller left it.
- `followed`: for diffusers' plain processors, whose formula is known, it follows from query and
  key, which the layer's projections give. `handed_over` is the same with its facts looked at once a
  pass.
- `witnessed`: for any other processor it is what made the output from the values, see
  :mod:`sdattn.look.unknown_processors`. If the kernel cannot be intercepted, it is
  softmax(QK^T), provided it reproduces the output.

Image prompts have columns of their own after the text's. The image attends to them apart from the
text, in a softmax of their own, and both results are added. An IP-Adapter has one softmax, or one
per image where masks say which image goes where. In Wan 2.1 they are the image that a video begins
with.

Source: Ye et al. 2023, "IP-Adapter", equation 4; diffusers' transformer_wan.py,
``WanAttnProcessor``.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attention import merge_heads, split_heads
from ..attention.calls import AttentionCall
from ..attention.controlled import ControlledProcessor
from ..errors import RunError
from ..models.denoiser_call import head_count, innermost
from .attended import Attended, Projected, SideBySide, softmax_of
from .key_owners import pairs_of_call, rows_apart
from .projections import (
    ARRIVED,
    INTO,
    Projection,
    Seen,
    by_name,
    named,
    output_projection,
    projected_call,
    query_and_key,
)
from .sdpa import ProductWatch, SdpaWatch, replacement
from .unknown_processors import GATES, gated, is_plain, maker_in, unknown_use

if TYPE_CHECKING:
    from .observers import ObservingProcessor as Observer

QUERY_KEY = ("to_q", "to_k", "to_kv", "to_qkv")  # projections; the last two are fused ones
# Projections of a layer's keys and values of an image; the last is a fused one
IMAGE = ("add_k_proj", "add_v_proj", "to_added_kv")
Used = tuple[Attended, Tensor]  # an attention, and what it makes of the values, [B, N, heads*d]


def see(
    observer: Observer, inner: Any, attn: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Attended]:
    """Run the processor of a layer; return its output and its attention."""
    if isinstance(inner, ControlledProcessor):
        output, call = shown(observer, inner, attn, *args, **kwargs)
        return output, softmax_of(call)
    source = followed if is_plain(attn, inner) else witnessed
    return source(observer, inner, attn, *args, **kwargs)


def may_hand_over(observer: Observer, attn: Any) -> bool:
    """Check, before a pass, whether a layer's query and key are known by its projections alone in
    each of its calls that :func:`handed_over` finds usual."""
    inner = innermost(observer)
    return (
        not (observer.is_self or isinstance(inner, (ControlledProcessor, nn.Module)))
        and is_plain(attn, inner)
        and not _is_normed(attn)
        and observer.projections.are_seen(named(attn, QUERY_KEY))
    )


def handed_over(
    observer: Observer, inner: Any, attn: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Attended]:
    """Do as :func:`see`, in a pass in which the layer :func:`may_hand_over`: what does not change
    in a pass is not asked again for each layer."""
    is_usual = len(args) == 1 and kwargs.get("attention_mask") is None
    if not is_usual or replacement() is not None:
        return see(observer, inner, attn, *args, **kwargs)
    with observer.projections as seen:
        output = observer.inner(attn, *args, **kwargs)
    return output, Projected(*query_and_key(seen, inner), attn.heads)


def shown(
    observer: Observer, inner: ControlledProcessor, attn: Any, *args: Any, **kwargs: Any
) -> tuple[Any, AttentionCall]:
    """Run a processor of sdattn; return its output and the call that it shows."""
    calls: list[AttentionCall] = []

    def watcher(call: AttentionCall) -> None:
        if get_ident() == observer.thread:
            calls.append(call)

    inner.watchers.append(watcher)
    try:
        output = observer.inner(attn, *args, **kwargs)
    finally:
        inner.watchers.remove(watcher)
    if len(calls) != 1:
        raise RunError(
            f"The processor {type(inner).__name__} computed its attention {len(calls)} times in "
            "one call, so what it attended to cannot be known. Leave __call__ to sdattn's class "
            "and edit by a controller, or leave this layer out (layers=…)."
        )
    return output, calls[0]


def followed(
    observer: Observer, inner: Any, attn: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Attended]:
    """Run a plain processor; return its output and the call that follows from its query and key."""
    given = by_name(inner, args, kwargs)
    adapters = image_projections(inner) if isinstance(inner, nn.Module) else []
    with observer.projections.during([*named(attn, QUERY_KEY), *adapters]) as seen:
        if replacement() is None:
            output = observer.inner(attn, *args, **kwargs)
        else:  # it must be seen at work
            output = observer.watched([], SdpaWatch, attn, *args, **kwargs)
    query, key = query_and_key(seen, inner)
    states = given.get("encoder_hidden_states")
    mask = given.get("attention_mask")
    attended: Attended
    if mask is None and not _is_normed(attn):
        attended = Projected(query, key, attn.heads)
    else:
        attended = softmax_of(projected_call(attn, query, key, mask))
    if observer.is_self:
        attended.rows_apart = rows_apart({"input": (states, given["hidden_states"])})
    if adapters:
        attended = _beside_images(attended, attn, query, states, adapters, seen)
    return output, attended


def witnessed(
    observer: Observer, inner: Any, attn: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Attended]:
    """Run any other processor; return its output and what made that from the values."""
    calls: list[AttentionCall] = []
    names = (*QUERY_KEY, "to_v", GATES, *(IMAGE if attends_to_image(attn) else ()))
    parts = [*named(attn, names), (ARRIVED, output_projection(attn))]
    if observer.is_self:
        parts += [(INTO + name, module) for name, module in named(attn, ("to_q", "to_v"))]
    with observer.projections.during(parts) as seen:
        output = observer.watched(calls, ProductWatch, attn, *args, **kwargs)
    arrived = seen.pop(ARRIVED, [])
    query_input, value_input = (seen.pop(INTO + name, [None])[0] for name in ("to_q", "to_v"))
    used = _used_in(attn, calls, arrived[-1], seen) if arrived else None
    if used is None:
        mask = by_name(inner, args, kwargs).get("attention_mask")
        used = _reproduced(attn, seen, mask, inner)
    attended, predicted = used
    if observer.is_self:
        pairs = {"input": (value_input, query_input), **pairs_of_call(attn, calls, seen)}
        attended.rows_apart = rows_apart(pairs)
    observer.check(gated(predicted, seen.get(GATES, ())), *arrived)
    return output, attended


def _is_normed(attn: Any) -> bool:
    return getattr(attn, "norm_q", None) is not None or getattr(attn, "norm_k", None) is not None


def image_projections(processor: Any) -> list[Projection]:
    """Return those that make keys of image prompts, one an adapter, each under a name of its own;
    none but in the processor of an IP-Adapter."""
    found = getattr(processor, "to_k_ip", ())
    return [(f"to_k_ip.{number}", projection) for number, projection in enumerate(found)]


def attends_to_image(attn: Any) -> bool:
    """Check whether a layer of cross-attention attends to an image as well (Wan 2.1's)."""
    return getattr(attn, "add_k_proj", None) is not None


def _beside_images(
    text: Attended,
    attn: Any,
    query: Tensor,
    states: Any,
    adapters: Sequence[Projection],
    seen: Seen,
) -> Attended:
    """Return the image columns that follow the text's; an adapter that is switched off gets zero.

    Args:
        states: ``(text states, [image states [B, images, tokens, width] of each adapter])``.
        seen: outputs of each adapter's projections, ``[B, (images,) tokens, heads*d]`` per call.
    """
    others: list[Attended | int] = []
    given = states[1] if isinstance(states, tuple) else ()
    for (name, _), images in zip(adapters, given, strict=False):
        # One call of the projection is one softmax; an adapter with masks has one per image.
        keys = [key.flatten(1, -2) for key in seen.get(name, ())]  # [B, tokens, width]
        columns = images.shape[1] * images.shape[2]
        others += [softmax_of(projected_call(attn, query, key)) for key in keys] or [columns]
    return SideBySide(text, others) if others else text


def _used_in(attn: Any, calls: Sequence[AttentionCall], arrived: Tensor, seen: Seen) -> Used | None:
    """Return the attention whose product with the values reached the output projection.

    In a layer that attends to an image too: both attentions, and the sum of what they make; None
    unless they are two calls of torch's attention, the text's last. ``arrived`` is ``[B, N,
    heads*d]``.
    """
    batch, cells, width = arrived.shape
    heads = head_count(attn)
    shape = batch, heads, cells, width // heads
    if not attends_to_image(attn):
        maker = maker_in(calls, *shape)
        return None if maker is None else (softmax_of(maker), merge_heads(maker.output))
    makers = [maker_in([call], *shape) for call in calls if call.probs is None]
    found = [maker for maker in makers if maker is not None]
    if len(found) != 2:
        return None
    image, text = found
    keys = [made[0].shape[1] for name in ("to_k", "to_kv") if (made := seen.get(name))]
    if keys != [text.shape[3]] or image.shape[3] == text.shape[3]:
        return None
    return _both(softmax_of(text), softmax_of(image)), merge_heads(text.output + image.output)


def _reproduced(attn: Any, seen: dict[str, list[Tensor]], mask: Tensor | None, inner: Any) -> Used:
    """Return the softmax of a layer's query and key (and its image's), and what it makes."""
    query, key = query_and_key(seen, inner)
    joined = seen.get("to_kv", seen.get("to_qkv"))
    values = seen.get("to_v") if joined is None else [joined[0][..., -key.shape[-1] :]]
    if values is None:
        raise RunError(unknown_use(inner))
    text = softmax_of(projected_call(attn, query, key, mask))
    made = _product(text, values[0])
    if not attends_to_image(attn):
        return text, made
    key_value = [seen[name][0] for name in IMAGE if name in seen]
    if len(key_value) == 1:
        key_value = list(key_value[0].chunk(2, dim=-1))
    if len(key_value) != 2:
        raise RunError(unknown_use(inner))
    image = softmax_of(projected_call(attn, query, key_value[0], norm_k="norm_added_k"))
    return _both(text, image), made + _product(image, key_value[1])


def _both(text: Attended, image: Attended) -> Attended:
    """Return the text's columns and the image's, if any."""
    return SideBySide(text, [image]) if image.keys else text


@torch.no_grad()
def _product(attended: Attended, values: Tensor) -> Tensor:
    """Return what an attention makes of values ``[B, T, heads*d]``, a head at a time."""
    value = split_heads(values, attended.heads).float()
    heads = [slice(head, head + 1) for head in range(attended.heads)]
    made = torch.cat([attended.probs(head, None) @ value[:, head] for head in heads], dim=1)
    return merge_heads(made).to(values.dtype)
