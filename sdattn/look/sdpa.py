"""Torch's ``scaled_dot_product_attention`` seen at work, and what answers in its place.

A mode of torch's sees the calls of its own function. A replacement of that function (such as
SageAttention) is spied on: it attends to the softmax of its query and key, provided that it returns
what torch's own function makes of them. The output comes from the kernel that would have run, with
its logsumexp if it gives one, see :mod:`sdattn.look.kernel_logsumexp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..attention.calls import AttentionCall
from ..attention.core import rounding_error
from ..attention.modes import no_autocast
from .kernel_logsumexp import attend_with_logsumexp, backend_with_logsumexp
from .layer import IsOpen

PRODUCTS = (torch.bmm, torch.matmul, Tensor.bmm, Tensor.matmul, Tensor.__matmul__, torch.einsum)
TORCHS: Any = torch._C._nn.scaled_dot_product_attention  # whatever torch.nn.functional has now
SeeKernel = Callable[..., object]
_LOCK = Lock()


def replacement() -> object | None:
    """Return what answers in the place of torch's attention; None for torch's own."""
    now = nn.functional.scaled_dot_product_attention
    return outer_mode() if now is TORCHS else now


def outer_mode() -> object | None:
    """Return the innermost mode of torch's that may answer, other than one that sets a device or
    only watches."""
    if not torch._C._len_torch_function_stack():  # the usual case
        return None
    modes = _get_current_function_mode_stack()
    for mode in reversed(modes):
        if not isinstance(mode, _QUIET):
            return mode
    return None


@contextmanager
def spied(see: SeeKernel, is_open: IsOpen) -> Iterator[None]:
    """Hand calls of a replacement, while ``is_open()``, to ``see(call, by, *args, **kwargs)``,
    where ``call()`` has the function ``by`` make the output."""
    if nn.functional.scaled_dot_product_attention is TORCHS:
        yield
        return
    with spied_entry(vars(nn.functional), TORCHS.__name__, see, is_open):
        yield


@contextmanager
def spied_entry(
    entries: MutableMapping[str, Any], name: str, see: SeeKernel, is_open: IsOpen
) -> Iterator[None]:
    """Hand calls of a function, an entry of ``entries``, to ``see`` while ``is_open()``."""
    watch = see, is_open
    with _LOCK:
        spy = entries[name]
        if not isinstance(spy, _Spy):
            spy = entries[name] = _Spy(spy)
        spy.watches = (*spy.watches, watch)
    try:
        yield
    finally:
        with _LOCK:
            spy.watches = tuple(one for one in spy.watches if one is not watch)
            if not spy.watches and entries[name] is spy:
                entries[name] = spy.function


class _Spy:
    """A replacement that can be seen, by the runs whose layers are watched just now; each sees the
    calls of its own thread, and of several watches of one run the last begun."""

    def __init__(self, function: Callable[..., object]):
        update_wrapper(self, function)
        self.function = function
        self.watches: tuple[tuple[SeeKernel, IsOpen], ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        call = partial(self.function, *args, **kwargs)
        for see, is_open in reversed(self.watches):
            if is_open():
                return see(call, self.function, *args, **kwargs)
        return call()


class Unlike(NamedTuple):
    """Distance of an output from what torch's own function makes in float32: float32, 0-d, on its
    device.

    Attributes:
        by: what made it.
        multiple: the largest error of a head, relative to the head's largest value, as a multiple
            of what rounding explains; above 1 if it is another attention.
        difference: the largest absolute difference.
    """

    by: object
    multiple: Tensor
    difference: Tensor


def unknowable(by: object) -> Unlike:
    """Return what stands for an output that torch's own function cannot be compared with."""
    return Unlike(by, torch.tensor(math.inf), torch.tensor(math.inf))


@torch.no_grad()
def unlike_torchs(
    by: object, output: Tensor, args: Sequence[object], kwargs: Mapping[str, object]
) -> Unlike:
    """Compare an output with what torch's own function makes of the same arguments."""

    def wide(given: object) -> object:
        return given.float() if isinstance(given, Tensor) and given.is_floating_point() else given

    device = output.device.type
    cast = device != "meta" and torch.is_autocast_enabled(device)
    try:
        with torch._C.DisableTorchFunction(), no_autocast():
            exact = TORCHS(*map(wide, args), **{name: wide(one) for name, one in kwargs.items()})
    except TypeError:  # it got arguments that torch's does not take
        return unknowable(by)
    if output.shape != exact.shape:
        return unknowable(by)
    if not exact.numel():
        return Unlike(by, torch.tensor(0.0), torch.tensor(0.0))
    exact = exact.nan_to_num()
    error = (output.float().nan_to_num() - exact).abs().amax((-2, -1))
    largest = exact.abs().amax((-2, -1)).clamp_min(torch.finfo(torch.float32).tiny)
    rounded = torch.bfloat16 if cast else output.dtype
    return Unlike(by, (error / largest).amax() / rounding_error(rounded), error.amax())


def kernel_name(by: object) -> str:
    """Return the name of what answered in the place of torch's attention."""
    name = getattr(by, "__qualname__", type(by).__qualname__)
    return f"{by.__module__}.{name}"


def no_softmax(by: object) -> str:
    """Return the message for a kernel that makes another attention, or cannot be seen."""
    return (
        f"torch's scaled_dot_product_attention is replaced by {kernel_name(by)}, whose output "
        "could not be seen to be the softmax of the query and key it was given times the values, "
        "so what the layer attended to is not known. "
        "Use torch's own for the capture (model.set_attention_backend('native') in diffusers), or "
        "set a processor that does not call it, sdattn.TorchAttnProcessor(), in joint attention "
        "TorchJointProcessor(); or leave this layer out (layers=…)."
    )


class SdpaWatch(TorchFunctionMode):
    """See the calls of ``scaled_dot_product_attention`` in a block of code, in this thread only.

    Each output comes from the kernel that torch would choose.

    Attributes:
        calls: the calls in order.
        unlike: each call that a replacement answered, see :func:`unlike_torchs`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []
        self.unlike: list[Unlike] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not TORCHS:
            return func(*args, **kwargs)
        return self.attend(partial(func, *args, **kwargs), outer_mode(), *args, **kwargs)

    def wants_logsumexp(self, call: AttentionCall) -> bool:
        """Check whether the kernel's logsumexp is to be kept, which costs a little."""
        return True

    def attend(
        self,
        attend: partial[Tensor],
        by: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **unknown: object,
    ) -> Tensor:
        """Make the output by ``attend``, from the arguments after ``by``, and note the call."""
        call = AttentionCall(query, key, value, attn_mask, scale)
        inside = len(self.calls)
        call.dropout = bool(dropout_p)
        call.causal = is_causal
        plain = attn_mask is None and not (dropout_p or is_causal or enable_gqa or unknown)
        modes = _get_current_function_mode_stack()
        is_seen = any(isinstance(mode, SdpaWatch) and mode is not self for mode in modes)
        is_kept = plain and by is None and not is_seen and self.wants_logsumexp(call)
        if is_kept and (backend := backend_with_logsumexp(call)):
            call.output, call.logsumexp = attend_with_logsumexp(attend, backend, call)
        else:
            call.output = attend()
        if by is not None:
            del self.calls[inside:]  # it is judged by its input, not by its own calls
            unlike = unknowable(by)  # with dropout, which would draw random numbers again
            if not dropout_p:
                unlike = unlike_torchs(by, call.output, attend.args, attend.keywords)
            self.unlike.append(unlike)
        self.calls.append(call)
        return call.output


_QUIET = DeviceContext, SdpaWatch


def factors_of(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return the factors of a product, one of :data:`PRODUCTS`, from its arguments."""
    factors = args[1:] if func is torch.einsum else args
    is_list = bool(factors) and isinstance(factors[0], (list, tuple))
    return factors[0] if is_list else factors


class ProductWatch(SdpaWatch):
    """See products of two matrices too, among the ``calls``: one factor may be probabilities."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        output = super().__torch_function__(func, types, args, kwargs)
        if func in PRODUCTS and not kwargs:
            factors = factors_of(func, args)
            if len(factors) == 2 and output.ndim in (3, 4):
                self.calls.append(AttentionCall(value=factors[1], probs=factors[0], output=output))
        return output
