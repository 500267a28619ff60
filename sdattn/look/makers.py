"""The call that made a layer's output, among those that were seen, and the attention to images.

Image prompts have columns of their own after the text's. The image attends to them apart from the
text, in a softmax of their own, and both results are added. An IP-Adapter has one softmax, or one
per image where masks say which image goes where. In Wan 2.1 they are the image that a video begins
with.

Source: Ye et al. 2023, "IP-Adapter", equation 4; diffusers' transformer_wan.py,
``WanAttnProcessor``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import merge_heads, split_heads
from ..attention.calls import AttentionCall
from ..attention.modes import no_autocast
from ..errors import RunError
from ..models.denoiser_call import head_count
from .attended import softmax_of
from .layer import Layer
from .projections import Projection, Seen, projected_call, query_and_key
from .unknown_processors import maker_in, unknown_use

# Projections of a layer's keys and values of an image; the last is a fused one
IMAGE = ("add_k_proj", "add_v_proj", "to_added_kv")
Used = tuple[AttentionCall, Tensor]  # a call, and what it makes of the values, [B, N, heads*d]


def attends_to_image(attn: Layer) -> bool:
    """Check whether a layer of cross-attention attends to an image as well (Wan 2.1's)."""
    return getattr(attn, "add_k_proj", None) is not None


def of_images(
    attn: Layer,
    query: Tensor,
    states: object,
    adapters: Sequence[Projection],
    seen: Seen,
) -> list[AttentionCall | int]:
    """Return the attention to each adapter's image columns, which follow the text's; an adapter
    that is switched off gets zero.

    Args:
        states: ``(text states, [image states [B, images, tokens, width] of each adapter])``.
        seen: outputs of each adapter's projections, ``[B, (images,) tokens, heads*d]`` per call.
    """
    beside: list[AttentionCall | int] = []
    given = states[1] if isinstance(states, tuple) else ()
    for (name, _), images in zip(adapters, given, strict=False):
        # One call of the projection is one softmax; an adapter with masks has one per image.
        for key in seen.get(name, ()):
            beside.append(projected_call(attn, query, key.flatten(1, -2)))  # [B, tokens, width]
        if name not in seen:
            beside.append(images.shape[1] * images.shape[2])
    return beside


def used_in(
    attn: Layer, calls: Sequence[AttentionCall], arrived: Tensor, seen: Seen
) -> Used | None:
    """Return the call whose product with the values reached the output projection.

    In a layer that attends to an image too: both attentions, and the sum of what they make; None
    unless they are two calls of torch's attention, the text's last. ``arrived`` is ``[B, N,
    heads*d]``.
    """
    batch, cells, width = arrived.shape
    heads = head_count(attn)
    shape = batch, heads, cells, width // heads
    if not attends_to_image(attn):
        maker = maker_in(calls, *shape)
        return None if maker is None else (maker, merge_heads(maker.output))
    makers = [maker_in([call], *shape) for call in calls if call.probs is None]
    found = [maker for maker in makers if maker is not None]
    if len(found) != 2:
        return None
    image, text = found
    keys = [seen[name][0].shape[1] for name in ("to_k", "to_kv") if name in seen]
    if keys != [text.shape[3]] or image.shape[3] == text.shape[3]:
        return None
    made = merge_heads(text.output + image.output)
    return _with_image(text, image), made


def reproduced(attn: Layer, seen: Seen, mask: Tensor | None, inner: object) -> Used:
    """Return the call by a layer's query and key (and its image's), and what it makes."""
    query, key = query_and_key(seen, inner)
    joined = seen.get("to_kv", seen.get("to_qkv"))
    values = seen.get("to_v") if joined is None else [joined[0][..., -key.shape[-1] :]]
    if values is None:
        raise RunError(unknown_use(inner))
    text = projected_call(attn, query, key, mask)
    made = _product(text, values[0])
    if not attends_to_image(attn):
        return text, made
    key_value = [seen[name][0] for name in IMAGE if name in seen]
    if len(key_value) == 1:
        key_value = list(key_value[0].chunk(2, dim=-1))
    if len(key_value) != 2:
        raise RunError(unknown_use(inner))
    image = projected_call(attn, query, key_value[0], norm_k="norm_added_k")
    return _with_image(text, image), made + _product(image, key_value[1])


def _with_image(text: AttentionCall, image: AttentionCall) -> AttentionCall:
    """Return the text's columns and the image's, if any."""
    if image.shape[3]:
        text.beside = [image]
    return text


@torch.no_grad()
def _product(call: AttentionCall, values: Tensor) -> Tensor:
    """Return what a call makes of values ``[B, T, heads*d]``, a head at a time."""
    attended = softmax_of(call)
    value = split_heads(values, attended.heads).float()
    made = []
    with no_autocast():
        for head in range(attended.heads):
            one = slice(head, head + 1)
            made.append(attended.probs(one, None) @ value[:, one])
    return merge_heads(torch.cat(made, dim=1)).to(values.dtype)
