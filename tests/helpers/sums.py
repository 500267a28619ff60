"""A running sum of a layer that belongs to no model, and calls of it, with the answer beside."""

import torch

from sdattn.follow.passes import Pass
from sdattn.keep.keep import Keep
from sdattn.keep.sums import Sum
from sdattn.models.layers import AttentionLayer


def running_pass(batch=2, rows=None, size=(2, 2), n_text=0):
    rows = tuple(range(batch)) if rows is None else rows
    return Pass(500.0, size, batch, ("conditional",), rows, ("conditional",) * len(rows), n_text)


def running_sum(*, kind="cross", running=None, **keep):
    """Of a layer called ``"layer"``, in a pass of two rows with cells 2 by 2."""
    layer = AttentionLayer("layer", "mid", kind, 0, 3, None)
    found = Sum(layer, Keep.of(**keep))
    found.running = running_pass() if running is None else running
    return found


def probabilities(seed, rows=2, heads=3, cells=4, keys=5):
    """Float64 ``[rows, heads, cells, keys]``, which sum to 1 over the keys."""
    generator = torch.Generator().manual_seed(seed)
    shape = rows, heads, cells, keys
    return torch.rand(shape, generator=generator, dtype=torch.float64).softmax(-1)
