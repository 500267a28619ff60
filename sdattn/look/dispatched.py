"""Kernels of diffusers' dispatcher that do not call torch's attention (flash, sage, xformers, aiter
and others), seen at work.

While a layer runs, the registry's entry for its kernel hands on query, key and value, and the
kernel makes the output. It counts as attention as a replacement of torch's own function does: if
torch's own makes the same output, within what rounding explains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from .sdpa import spied_entry

DISPATCH = "diffusers.models.attention_dispatch"
# Its backends that call torch's scaled_dot_product_attention, so that they can be seen.
SEEN_BACKENDS = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")


def backend_of(processor: Any) -> tuple[str, bool] | None:
    """Return a processor's backend, and whether it is diffusers' own; None without a choice."""
    dispatch = sys.modules.get(DISPATCH)
    if dispatch is None or not hasattr(processor, "_attention_backend"):
        return None
    registry = dispatch._AttentionBackendRegistry
    chosen = processor._attention_backend or registry._active_backend
    backend = dispatch.AttentionBackendName(chosen)
    entry = registry._backends.get(backend)
    return backend.value, getattr(entry, "__module__", DISPATCH) == DISPATCH


@contextmanager
def dispatched(processor: Any, see: Callable[..., Tensor]) -> Iterator[None]:
    """Hand this thread's calls of the kernel that a processor chose to ``see``, by head, as
    :func:`sdattn.look.sdpa.spied` does; nothing is done for a kernel that calls torch's own."""
    chosen = backend_of(processor)
    if chosen is None or not chosen[1] or chosen[0] in SEEN_BACKENDS:
        yield
        return
    dispatch = sys.modules[DISPATCH]
    entries = dispatch._AttentionBackendRegistry._backends
    with spied_entry(entries, dispatch.AttentionBackendName(chosen[0]), _by_head(see)):
        yield


def _by_head(see: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return what gets a kernel's call with the axes ``[B, N, heads, d]``, and hands it on."""

    def look(
        call: Callable[[], Any],
        by: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_own: Any,
    ) -> Any:
        made: list[Any] = []

        def attend(*_: Any, **__: Any) -> Tensor:
            made.append(call())
            output = made[0][0] if isinstance(made[0], tuple) else made[0]  # with a logsumexp
            transposed: Tensor = output.transpose(1, 2)
            return transposed

        by_head = [given.transpose(1, 2) for given in (query, key, value)]
        options = {
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        see(partial(attend, *by_head, **options), by, *by_head, **options)
        return made[0]

    return look
