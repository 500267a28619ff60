"""Functions that somebody set in place of torch's ``scaled_dot_product_attention``, seen at work.

SageAttention is used so. Such a function is handed query, key and value. It attends to the softmax
of these, provided that it returns what torch's own function makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
    """Return what answers in the place of torch's attention; None for torch's own."""
    found = nn.functional.scaled_dot_product_attention
    return outer_mode() if found is TORCHS else found


def outer_mode() -> Any | None:
    """Return the innermost mode of torch's that may answer, other than one that sets a device."""
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
def unlike_torchs(output: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Compare an output with what torch's own function makes of the same arguments in float32.

    Returns:
        float32, 0-d, on the device: the largest error of a head, relative to its largest value, as
        a multiple of what rounding explains; above 1 where the function is another one.
    """

    def wide(given: Any) -> Any:
        return given.float() if isinstance(given, Tensor) and given.is_floating_point() else given

    device = output.device.type
    cast = device != "meta" and torch.is_autocast_enabled(device)
    as_given = torch.autocast(device, enabled=False) if cast else nullcontext()
    try:
        with torch._C.DisableTorchFunction(), as_given:
            exact = TORCHS(*map(wide, args), **{name: wide(one) for name, one in kwargs.items()})
    except TypeError:  # it was given what torch's does not take
        return torch.tensor(torch.inf)
    if output.shape != exact.shape or not exact.numel():
        return torch.tensor(torch.inf if output.shape != exact.shape else 0.0)
    exact = exact.nan_to_num()
    error = (output.float().nan_to_num() - exact).abs().amax((-2, -1))
    largest = exact.abs().amax((-2, -1)).clamp_min(torch.finfo(torch.float32).tiny)
    return (error / largest).amax() / (2e-2 if cast or output.dtype in HALF_TYPES else 1e-3)


def no_softmax(by: Any) -> str:
    """The message for a replacement that is another attention, or cannot be seen."""
    named = by if hasattr(by, "__qualname__") else type(by)
    return (
        f"torch's scaled_dot_product_attention is replaced by {named.__qualname__} (of "
        f"{named.__module__}), whose output could not be seen to be the softmax of the query and "
        "key it was given times the values, so what the layer attended to is not known. Put "
        "torch's own function back for the capture, or set a processor that does not call it, "
        "sdattn.TorchAttnProcessor(), in joint attention TorchJointProcessor(); or leave this "
        "layer out (layers=…)."
    )
