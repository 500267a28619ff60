"""Whose keys a layer of self-attention reads: its own image's, row by row, or another's.

MasaCtrl and cross-frame attention let each image look into the first one. Such keys are no cells of
the image that looks, so they have no place in it.

Source: Cao et al. 2023, "MasaCtrl: Tuning-Free Mutual Self-Attention Control".
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..attention import split_heads
from ..attention.calls import AttentionCall
from ..attention.core import rounding_error
from .layer import Layer

# What is used, and each row's own
Pairs = Mapping[str, tuple[Tensor | None, Tensor | None]]
KEYS = "keys"  # may be rotated, so that only a likeness to another row's tells something


@torch.no_grad()
def rows_apart(pairs: Pairs) -> dict[str, Tensor]:
    """Return how far each row of what is used is from every row's own, ``[B, B]``, as a multiple of
    what rounding explains; tensors of different sizes are left out."""
    multiples = {}
    for name, (used, own) in pairs.items():
        if used is None or own is None or used.numel() != own.numel():
            continue
        own_rows = own.reshape(len(own), -1).float()
        used_rows = used.reshape(len(own), -1).float()
        largest = own_rows.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        apart = torch.stack([(used_rows - row).abs().amax(1) for row in own_rows], dim=1)
        multiples[name] = apart / largest / rounding_error(own.dtype)
    return multiples


def pairs_of_call(
    attn: Layer, calls: Sequence[AttentionCall], seen: Mapping[str, Sequence[Tensor]]
) -> Pairs:
    """Return the values and keys of a layer's last call, each beside its projection's output."""
    if not calls or "to_v" not in seen or "to_k" not in seen:
        return {}
    own_value = split_heads(seen["to_v"][0], attn.heads)
    own_key = split_heads(seen["to_k"][0], attn.heads)
    fitting = [call for call in calls if call.output.shape[-1] == own_value.shape[-1]]
    if not fitting:
        return {}
    value: Tensor | None = fitting[-1].value
    if value is not None and value.shape[-2:] != own_value.shape[-2:]:  # not by head
        value = None
    return {"values": (value, own_value), KEYS: (fitting[-1].key, own_key)}


def other_owners(name: str, apart: Mapping[str, Tensor]) -> str:
    """Return the message for a layer whose rows read another row's keys; "" if each reads its
    own."""
    for kind, matrix in apart.items():
        for row, errors in enumerate(matrix.tolist()):
            nearest = min(range(len(errors)), key=errors.__getitem__)
            is_known = errors[nearest] <= 1
            if errors[row] > 1 and (is_known or kind != KEYS):
                owner = f"row {nearest}'s" if is_known else "none of its batch"
                return (
                    f"In {name}, the keys that row {row} of the batch attends to are {owner} "
                    "(MasaCtrl and cross-frame attention do so), so they are not the cells of its "
                    "own image. Leave out the layers that share keys (layers=…), or set another "
                    "processor."
                )
    return ""
