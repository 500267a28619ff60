"""The image prompts of an IP-Adapter: columns of their own behind those of the text.

The picture attends to them apart from the text, in one softmax an adapter, or one an image where
masks say which image goes where.

Source: Ye et al. 2023, "IP-Adapter", equation 4.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .attended import Attended, QueryKey, SideBySide
from .projections import Projection


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
