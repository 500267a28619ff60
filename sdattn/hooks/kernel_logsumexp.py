"""The kernels behind torch's attention that give the logsumexp of a row's scores beside the output.

A row of the softmax is ``exp(scores - logsumexp)``, so that with it the probabilities of some keys
need the scores of those keys only.

Which kernel runs is torch's choice; what each gives, by torch's sources (``attention.cpp``,
``attention.cu``, ``MHA.cpp``): the natural logsumexp of the scaled scores in float32, of CPU and
CUDA flash ``[B, heads, N]``, of the efficient kernel ``[B, heads, N rounded up to 32]``, of cuDNN
``[B, heads, N, 1]`` (in some versions of torch without the last axis). The last two are asked for
it. cuDNN may plan otherwise then, so on CUDA its output is compared with plain attention's once a
shape.

On CUDA these kernels are asked in half types alone: there float32 scores have digits to spare. In
float32 a logsumexp above :data:`EXACT` is too coarse beside scores that another kernel rounded
otherwise; whether it is cannot be known without waiting for the device, and
:func:`sdattn.attention.recording.logsumexp`, whose scores are those of the shares, needs no limit.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import HALF_TYPES
from ..attention.cuda.choice import Case
from ..attention.cuda.dispatch import CHOICE, logsumexp_error

FLASH, EFFICIENT, CUDNN = 1, 2, 3  # of SDPBackend, what torch._fused_sdp_choice answers
EXACT = 16  # of a larger logsumexp float32 holds too few digits for probabilities within 1e-5
ALLOWED = 5e-3  # of a logsumexp in half types: half a percent of a probability

WithLogsumexp = tuple[Tensor, Tensor | None]  # an output, and its rows' logsumexp [B, heads, N]


class Operands(NamedTuple):
    """What is handed to an attention without mask or dropout: ``[B, heads, N or T, d]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None


def backend_with_logsumexp(call: Operands) -> int:
    """Which kernel torch would run, where that gives the logsumexp; 0 where it does not.

    Under autocast it would not run without casting; with a graph the logsumexp has no gradient.
    The kernels take four axes and no empty ones, whichever of them torch says it would choose.
    """
    device, given = call.query.device.type, call[:3]
    if any(tensor.ndim != 4 or not tensor.numel() for tensor in given):
        return 0
    if device not in ("cpu", "cuda") or torch.is_autocast_enabled(device):
        return 0
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return 0
    if device == "cuda" and call.query.dtype not in HALF_TYPES:
        return 0
    backend = torch._fused_sdp_choice(*given, scale=call.scale)
    if device == "cpu":
        return backend if backend == FLASH else 0
    padded = any(tensor.shape[-1] % 8 for tensor in given)  # by torch, before it runs flash
    return 0 if backend not in CUDA_KERNELS or (backend == FLASH and padded) else backend


def attend_with_logsumexp(
    attend: Callable[[], Tensor], backend: int, call: Operands
) -> WithLogsumexp:
    """The output of the very kernel that ``attend`` would run, and the logsumexp where it is exact
    enough."""
    if call.query.device.type == "cpu":
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *call[:3], 0.0, False, scale=call.scale
        )
        return output, logsumexp if logsumexp.abs().max() <= EXACT else None
    return used_if_equal(CUDA_KERNELS[backend], attend, call)


def used_if_equal(
    kernel: Callable[[Operands], WithLogsumexp], attend: Callable[[], Tensor], call: Operands
) -> WithLogsumexp:
    """What ``kernel`` gives where its output is that of ``attend``, bit by bit, and its logsumexp
    that of the scores; else the output of ``attend`` alone. It is found out once a shape."""

    def compare() -> float:
        output, logsumexp = kernel(call)
        if logsumexp is None or not torch.equal(output, attend()):
            return math.inf
        scale = 1 / math.sqrt(call.query.shape[-1]) if call.scale is None else call.scale
        return logsumexp_error(logsumexp, call.query, call.key, None, scale, ALLOWED)

    # A CUDA graph that is being captured cannot be read back from, so nothing new is tried in it.
    case = _case(kernel.__name__, call)
    unknown = case not in CHOICE.verdicts
    captured = unknown and call.query.is_cuda and torch.cuda.is_current_stream_capturing()
    if captured or not CHOICE.agrees(case, compare, quiet=True):
        return attend(), None
    return kernel(call)


def _case(name: str, call: Operands) -> Case:
    """The kernel's plan depends on all of its layout."""
    layouts = [f"{list(t.shape)} by {list(t.stride())}" for t in call[:3]]
    dtype = str(call.query.dtype).removeprefix("torch.")
    scale = "" if call.scale is None else f", scale {call.scale:g}"
    device = call.query.device
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Case(f"logsumexp of {name}", model, f"{dtype}, {', '.join(layouts)}{scale}")


def flash(call: Operands) -> WithLogsumexp:
    output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *call[:3], 0.0, False, False, scale=call.scale
    )
    return output, logsumexp


def efficient(call: Operands) -> WithLogsumexp:
    output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *call[:3], None, True, 0.0, False, scale=call.scale
    )
    return output, logsumexp[..., : call.query.shape[2]]


def cudnn(call: Operands) -> WithLogsumexp:
    output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *call[:3], None, True, 0.0, False, False, scale=call.scale
    )
    return output, logsumexp.reshape(call.query.shape[:3])


CUDA_KERNELS: dict[int, Callable[[Operands], WithLogsumexp]] = {
    FLASH: flash,
    EFFICIENT: efficient,
    CUDNN: cudnn,
}
