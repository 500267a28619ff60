"""Image prompts: columns of their own behind those of the text.

What is made attends to them apart from the text, in a softmax of their own, and what both make is
added. Those of an IP-Adapter have one softmax an adapter, or one an image where masks say which
image goes where. In Wan 2.1 they are the image that a video begins with.

Source: Ye et al. 2023, "IP-Adapter", equation 4; diffusers' transformer_wan.py,
``WanAttnProcessor``.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..attention import merge_heads, split_heads
from ..errors import RunError
from ..models.denoiser_call import head_count
from .attended import Attended, QueryKey, SideBySide
from .projections import Projection, query_and_key
from .sdpa import SdpaCall
from .unknown_processors import Event, unknown_use, used_in

# Projections of a layer's keys and values of an image; the last is a fused one
IMAGE = ("add_k_proj", "add_v_proj", "to_added_kv")
Used = tuple[Attended, Tensor]  # an attention, and what it makes of the values, [B, N, heads*d]


def image_projections(processor: Any) -> list[Projection]:
    """Those that make keys of image prompts, one an adapter, each under a name of its own; none
    but in the processor of an IP-Adapter."""
    found = getattr(processor, "to_k_ip", ())
    return [(f"to_k_ip.{number}", projection) for number, projection in enumerate(found)]


def beside_images(
    text: Attended,
    attn: Any,
    query: Tensor,
    states: Any,
    adapters: Sequence[Projection],
    seen: Mapping[str, Sequence[Tensor]],
) -> Attended:
    """The image columns behind those of the text; nothing is paid to an adapter that is switched
    off.

    Args:
        states: what the layer is handed as text: ``(text states, [image states [B, images, tokens,
            width] of each adapter])`` where there are image prompts.
        adapters: what :func:`image_projections` gave.
        seen: what each of them made, ``[B, (images,) tokens, heads*d]`` a call.
    """
    others: list[Attended | int] = []
    given = states[1] if isinstance(states, tuple) else ()
    for (name, _), images in zip(adapters, given, strict=False):
        # One call of the projection is one softmax; an adapter with masks makes one an image.
        keys = [key.flatten(1, -2) for key in seen.get(name, ())]  # [B, tokens, width]
        columns = images.shape[1] * images.shape[2]
        others += [QueryKey(attn, query, key) for key in keys] or [columns]
    return SideBySide(text, others) if others else text


def attends_to_image(attn: Any) -> bool:
    """Whether a layer of cross-attention attends to an image as well (Wan 2.1's)."""
    return getattr(attn, "add_k_proj", None) is not None


def used_by(
    attn: Any, events: Sequence[Event], arrived: Tensor, seen: dict[str, list[Tensor]]
) -> Used | None:
    """:func:`used_in`, of a layer that attends to an image too what it pays to both, and the sum
    of what both make; None where these are not two calls of torch's attention, the text's last, as
    far as their numbers of keys tell.

    Args:
        seen: what the layer's projections gave, by name.
    """
    heads = head_count(attn)
    if not attends_to_image(attn):
        return used_in(events, arrived, heads)
    calls = [event for event in events if isinstance(event, SdpaCall)]
    parts = [used_in([call], arrived, heads) for call in calls]
    found = [part for part in parts if part is not None]
    if len(found) != 2:
        return None
    (image, of_image), (text, of_text) = found
    keys = [made[0].shape[1] for name in ("to_k", "to_kv") if (made := seen.get(name))]
    if keys != [text.keys] or image.keys == text.keys:
        return None
    return _both(text, image), of_text + of_image


def softmax_of(attn: Any, seen: dict[str, list[Tensor]], mask: Tensor | None, inner: Any) -> Used:
    """The softmax of the query and key of a layer, and what it makes of the values; of an image
    that it attends to as well the same.

    Args:
        seen: what the layer's projections gave, by name.
        inner: its processor.
    """
    query, key = query_and_key(seen, inner)
    joined = seen.get("to_kv", seen.get("to_qkv"))
    values = seen.get("to_v") if joined is None else [joined[0][..., -key.shape[-1] :]]
    if values is None:
        raise RunError(unknown_use(inner))
    text = QueryKey.masked(attn, query, key, mask)
    made = _product(text, values[0])
    if not attends_to_image(attn):
        return text, made
    key_value = [seen[name][0] for name in IMAGE if name in seen]
    if len(key_value) == 1:
        key_value = list(key_value[0].chunk(2, dim=-1))
    if len(key_value) != 2:
        raise RunError(unknown_use(inner))
    norms = SimpleNamespace(heads=attn.heads, norm_q=attn.norm_q, norm_k=attn.norm_added_k)
    image = QueryKey(norms, query, key_value[0])
    return _both(text, image), made + _product(image, key_value[1])


def _both(text: Attended, image: Attended) -> Attended:
    """The image's columns behind the text's; a bare transformer may be given none."""
    return SideBySide(text, [image]) if image.keys else text


@torch.no_grad()
def _product(attended: Attended, values: Tensor) -> Tensor:
    """What an attention makes of values ``[B, T, heads*d]``: a head at a time, since an unseen
    kernel may be in use to avoid holding ``[N, T]``."""
    value = split_heads(values, attended.heads).float()
    heads = [slice(head, head + 1) for head in range(attended.heads)]
    made = torch.cat([attended.probs(head, None) @ value[:, head] for head in heads], dim=1)
    return merge_heads(made).to(values.dtype)
