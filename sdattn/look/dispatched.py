"""Kernels of diffusers' dispatcher that do not call torch's attention (flash, sage, xformers, aiter
and others), seen at work; and those that do, watched no longer than they run.

While a layer runs, the registry's entry for its kernel hands on query, key and value, and the
kernel makes the output. It counts as attention as a replacement of torch's own function does: if
torch's own makes the same output, within what rounding explains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from inspect import unwrap
from typing import Any

from torch import Tensor

from .layer import IsOpen
from .sdpa import TORCHS, SdpaWatch, SeeKernel, replacement, spied, spied_entry

DISPATCH = "diffusers.models.attention_dispatch"
# Its backends that call torch's scaled_dot_product_attention, so that they can be seen.
OPTIONS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")  # as torch names them
Kernels = Tensor | tuple[Tensor, ...]  # a kernel's output, perhaps with a logsumexp
SEEN_BACKENDS = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")


def backend_of(processor: object) -> tuple[str, bool] | None:
    """Return a processor's backend, and whether it is diffusers' own; None without a choice."""
    dispatch = sys.modules.get(DISPATCH)
    if dispatch is None or not hasattr(processor, "_attention_backend"):
        return None
    registry = dispatch._AttentionBackendRegistry
    chosen = processor._attention_backend or registry._active_backend
    backend = dispatch.AttentionBackendName(chosen)
    entry = registry._backends.get(backend)
    return backend.value, getattr(entry, "__module__", DISPATCH) == DISPATCH


def hidden_backend(processor: object) -> str | None:
    """Return the backend of diffusers' own that a processor chose, if it does not call torch's
    attention; else None."""
    backend, is_own = backend_of(processor) or ("native", True)
    return backend if is_own and backend not in SEEN_BACKENDS else None


@contextmanager
def dispatched(backends: Iterable[str], see: SeeKernel, is_open: IsOpen) -> Iterator[None]:
    """Hand calls of some backends' kernels to ``see``, by head, as :func:`sdattn.look.sdpa.spied`
    does."""
    with ExitStack() as stack:
        for backend in backends:
            stack.enter_context(spied_entry(*_entry(backend), _by_head(see), is_open))
        yield


@contextmanager
def watching(watch: SdpaWatch, backends: Iterable[str], is_open: IsOpen) -> Iterator[None]:
    """Let a watch see the calls, in its run's thread, of torch's attention, of what replaces it,
    and of some backends' kernels."""
    with watch, spied(watch.attend, is_open), dispatched(backends, watch.attend, is_open):
        yield


def watching_processor(
    watch: SdpaWatch, processor: object, is_open: IsOpen
) -> AbstractContextManager[None]:
    """Return a block in which a watch sees the attention of a processor, in its run's thread.

    A watch is a detour for each of torch's functions. So where a processor's attention is made by
    the dispatcher alone, the watch is entered with the dispatcher's kernel.
    """
    backend, _ = backend_of(processor) or ("", True)
    is_seen = backend in SEEN_BACKENDS and replacement() is None
    if is_seen and type(watch) is SdpaWatch and only_dispatches(type(processor).__call__):
        return spied_entry(*_entry(backend), partial(_within, watch), is_open)
    hidden = hidden_backend(processor)
    return watching(watch, [] if hidden is None else [hidden], is_open)


def _within(watch: SdpaWatch, call: Callable[[], Kernels], *_: object, **__: object) -> Kernels:
    with watch:
        return call()


@cache
def only_dispatches(call: Callable[..., object]) -> bool:
    """Check whether a processor's code names the dispatcher, and not torch's attention."""
    names: tuple[str, ...] = unwrap(call).__code__.co_names
    return "dispatch_attention_fn" in names and TORCHS.__name__ not in names


def _entry(backend: str) -> tuple[MutableMapping[str, Any], str]:
    dispatch = sys.modules[DISPATCH]
    return dispatch._AttentionBackendRegistry._backends, dispatch.AttentionBackendName(backend)


def _by_head(see: SeeKernel) -> SeeKernel:
    """Return what gets a kernel's call with the axes ``[B, N, heads, d]``, and hands it on."""

    def look(
        call: Callable[[], Kernels],
        by: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **given: object,
    ) -> Kernels:
        made: list[Kernels] = []

        def attend(*_: object, **__: object) -> Tensor:
            made.append(call())
            output = made[0][0] if isinstance(made[0], tuple) else made[0]  # with a logsumexp
            return output.transpose(1, 2)

        by_head = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        options = {name: given[name] for name in OPTIONS if name in given}
        see(partial(attend, *by_head, **options), by, *by_head, **options)
        return made[0]

    return look
