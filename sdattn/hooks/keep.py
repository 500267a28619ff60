"""Which steps and heads a store keeps, and how many bytes that is.

check_selection("steps", "mean")        refused where it is none
is_span, is_summed                      a part of the run; one map of all that is kept
expected_bytes(layers, ...)             told before anything is held
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeGuard

import torch

from ..models.layers import AttentionLayer

MUCH = 1e9  # bytes; what will hold more says so
# "mean", "all", indices; of steps also "last", or a part of the run, (0.5, 1.0)
Selection = str | Sequence[int] | tuple[float, float]


def check_selection(name: str, value: Any) -> None:
    """Raise ValueError for what is no selection of ``name``, ``"steps"`` or ``"heads"``."""
    if isinstance(value, str):
        good = value in (("mean", "all", "last") if name == "steps" else ("mean", "all"))
    elif name == "steps" and is_span(value):
        good = 0 <= value[0] < value[1] <= 1
    else:
        good = bool(len(value)) and all(isinstance(i, Integral) and int(i) >= 0 for i in value)
        good = good and len(set(value)) == len(value)
    if not good:
        more = '"last", a part of the run such as (0.5, 1.0), ' if name == "steps" else ""
        raise ValueError(
            f'{name}={value!r}: pass "mean", "all", {more}or a list of indices from 0, not empty, '
            "each once."
        )


def plain_selection(value: Selection) -> Selection:
    """The same with indices as Python's own integers, also of numpy's."""
    return value if isinstance(value, str) or is_span(value) else [int(i) for i in value]


def is_span(steps: Selection) -> TypeGuard[tuple[float, float]]:
    """Whether ``steps`` is a part of the run, (0.5, 1.0) say, and no list of indices."""
    return not isinstance(steps, str) and len(steps) == 2 and isinstance(steps[0], float)


def is_summed(steps: Selection) -> bool:
    """Whether ``steps`` asks for one map of all of them."""
    return steps in ("mean", "last") or is_span(steps)


def expected_bytes(
    layers: Sequence[AttentionLayer],
    latent_size: tuple[int, int],
    n_keys: int,
    *,
    images: int = 1,
    passes: int = 1,
    steps: Selection = "mean",
    heads: Selection = "mean",
    dtype: torch.dtype = torch.float32,
) -> int:
    """How many bytes a :class:`MapStore` with these settings will hold at the end of a run.

    Args:
        layers: the watched layers. A self-attention layer has as many keys as queries.
        latent_size: (rows, cols) of the latent.
        n_keys: token columns kept of a layer that sees the text.
        images: rows kept of the batch.
        passes: calls of the model.
        steps, heads, dtype: as in :func:`sdattn.capture`.
    """
    kept_steps = 1 if is_summed(steps) else passes if steps == "all" else len(steps)
    total = 0
    for layer in layers:
        rows, cols = layer.grid(latent_size)
        keys = rows * cols if layer.kind == "self" else n_keys
        kept_heads = layer.heads if heads == "all" else 1 if heads == "mean" else len(heads)
        total += images * kept_steps * kept_heads * rows * cols * keys
    return total * (sum_dtype(dtype) if is_summed(steps) else dtype).itemsize


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of running sums for maps of ``dtype``: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
