"""Functions that somebody set in place of torch's ``scaled_dot_product_attention``, seen at work.

SageAttention is used so. Such a function is handed query, key and value. It attends to the softmax
of these, provided that it returns what torch's own function makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..attention import HALF_TYPES

TORCHS: Any = torch._C._nn.scaled_dot_product_attention  # whatever torch.nn.functional has now
_LOCK = Lock()


def replacement() -> Any | None:
    """Return what answers in the place of torch's attention, a function or a mode of torch's; None
    for torch's own."""
    found: Any = nn.functional.scaled_dot_product_attention
    if found is TORCHS:
        return outer_mode()
    return found.function if isinstance(found, _Spy) else found


def outer_mode() -> Any | None:
    """Return the innermost ``TorchFunctionMode`` that may answer; None without one. Modes that
    choose a device answer nothing."""
    modes = [m for m in _get_current_function_mode_stack() if not isinstance(m, DeviceContext)]
    return modes[-1] if modes else None


@contextmanager
def spied(see: Callable[..., Tensor]) -> Iterator[None]:
    """Hand this thread's calls of a replacement to ``see(call, by, *args, **kwargs)``, where
    ``call()`` has the function ``by`` make the output. Calls of other threads go straight to it."""
    functional: Any = nn.functional
    if functional.scaled_dot_product_attention is TORCHS:
        yield
        return
    thread = get_ident()
    with _LOCK:
        spy = functional.scaled_dot_product_attention
        if not isinstance(spy, _Spy):
            spy = functional.scaled_dot_product_attention = _Spy(spy)
        spy.watches[thread] = see
    try:
        yield
    finally:
        with _LOCK:
            del spy.watches[thread]
            if not spy.watches and functional.scaled_dot_product_attention is spy:
                functional.scaled_dot_product_attention = spy.function


class _Spy:
    """A replacement that can be seen, by each thread whose layers are watched just now."""

    def __init__(self, function: Any):
        update_wrapper(self, function)
        self.function = function
        self.watches: dict[int, Callable[..., Tensor]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = partial(self.function, *args, **kwargs)
        see = self.watches.get(get_ident())
        return call() if see is None else see(call, self.function, *args, **kwargs)


@torch.no_grad()
def unlike_torchs(
    output: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """Compare an output with what torch's own function makes of the same in float32.

    Returns:
        float32, 0-d, on the device: the largest error of a head, relative to its largest value, as
        a multiple of what rounding explains; above 1 where the function is another one.
    """
    device = query.device.type
    halves = {query.dtype, output.dtype} & {*HALF_TYPES} or torch.is_autocast_enabled(device)
    given = [query, key, value]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    with torch._C.DisableTorchFunction(), torch.autocast(device, enabled=False):
        exact = TORCHS(
            *(x.float() for x in given), mask, 0.0, causal, scale=scale, enable_gqa=grouped
        )
    if output.shape != exact.shape:
        return torch.tensor(torch.inf)
    if not exact.numel():
        return torch.tensor(0.0)
    error = (output.float().nan_to_num() - exact.nan_to_num()).abs().amax((-2, -1))
    largest = exact.nan_to_num().abs().amax((-2, -1)).clamp_min(torch.finfo(torch.float32).tiny)
    return (error / largest).amax() / (2e-2 if halves else 1e-3)


def no_softmax(by: Any) -> str:
    """The message for a replacement that is another attention."""
    return (
        f"torch's scaled_dot_product_attention is replaced by {name_of(by)}, whose output is not "
        "the softmax of the query and key it was given times the values, so what the layer "
        "attended to cannot be known. Put torch's own function back for the capture, or set a "
        "processor that does not call it, sdattn.TorchAttnProcessor(), in joint attention "
        "TorchJointProcessor(); or leave this layer out (layers=…)."
    )


def name_of(by: Any) -> str:
    """Return how messages name a function or a mode, with its module."""
    named = by if hasattr(by, "__qualname__") else type(by)
    return f"{named.__qualname__} (of {named.__module__})"
