"""Kernels of torch's attention that return the logsumexp of a row's scores along with the output.

A row of the softmax is ``exp(scores - logsumexp)``, so with it the probabilities of some keys need
the scores of those keys only.

Torch chooses the kernel. According to its sources (``attention.cpp``, ``attention.cu``,
``MHA.cpp``) each returns the natural logsumexp of the scaled scores in float32: CPU and CUDA flash
``[B, heads, N]``, the efficient kernel ``[B, heads, N rounded up to 32]``, cuDNN ``[B, heads, N,
1]`` (in some versions of torch without the last axis). The last two return it only on request.
cuDNN may then plan differently, so on CUDA a kernel's output is compared with plain attention's,
and its logsumexp with float64, the first time that a layout comes up; :data:`CHECKED` holds the
results.

On CUDA these kernels are asked in half types only, where float32 scores have digits to spare. In
float32 a logsumexp above :data:`EXACT` is too coarse for scores that another kernel rounded
differently; whether it is cannot be known without waiting for the device, and
:func:`sdattn.attention.recording.logsumexp`, which computes both alike, needs no limit.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..attention import HALF_TYPES, plain
from ..attention.calls import AttentionCall

# As torch._fused_sdp_choice answers, by torch.nn.attention.SDPBackend
FLASH = 1
EFFICIENT = 2
CUDNN = 3
EXACT = 16  # beyond this float32 has too few digits for probabilities within 1e-5
ALLOWED = 5e-3  # error of a logsumexp in half types: half a percent of a probability
DIGITS = 1e-6  # relative error of a logsumexp in float32
SAMPLE = 64  # queries at either end that are compared with float64

# Kernel, device and layout of each comparison in this process -> why the kernel's logsumexp is not
# taken there; "" where it is.
CHECKED: dict[str, str] = {}

WithLogsumexp = tuple[Tensor, Tensor | None]  # an output, and its rows' logsumexp [B, heads, N]
Kernel = Callable[[AttentionCall], WithLogsumexp]  # for calls without mask or dropout


def backend_with_logsumexp(call: AttentionCall) -> int:
    """Return the kernel that torch would run, if it gives the logsumexp, or 0.

    Under autocast it would not run without casting; with a graph the logsumexp has no gradient. The
    kernels take four axes, none of them empty.
    """
    device = call.query.device.type
    inputs = call.inputs
    if any(tensor.ndim != 4 or not tensor.numel() for tensor in inputs):
        return 0
    if device not in ("cpu", "cuda") or torch.is_autocast_enabled(device):
        return 0
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return 0
    if device == "cuda" and call.query.dtype not in HALF_TYPES:
        return 0
    backend = torch._fused_sdp_choice(*inputs, scale=call.scale)
    if device == "cpu":
        return backend if backend == FLASH else 0
    padded = any(tensor.shape[-1] % 8 for tensor in inputs)  # by torch, before it runs flash
    return 0 if backend not in CUDA_KERNELS or (backend == FLASH and padded) else backend


def attend_with_logsumexp(
    attend: Callable[[], Tensor], backend: int, call: AttentionCall
) -> WithLogsumexp:
    """Return the output of ``attend``'s kernel, and its logsumexp if that is exact enough."""
    if call.query.device.type == "cpu":
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *call.inputs, 0.0, False, scale=call.scale
        )
        return output, logsumexp if logsumexp.abs().max() <= EXACT else None
    return used_if_equal(CUDA_KERNELS[backend], attend, call)


def used_if_equal(
    kernel: Kernel, attend: Callable[[], Tensor], call: AttentionCall
) -> WithLogsumexp:
    """Return the results of ``kernel`` if its output equals ``attend``'s bit by bit and its
    logsumexp is exact; else the output of ``attend`` alone. Each layout is checked once, which
    reads from the device."""
    case = _case(kernel.__name__, call)
    if case not in CHECKED:
        # A CUDA graph that is being captured cannot be read from, so nothing new is tried in it.
        if call.query.is_cuda and torch.cuda.is_current_stream_capturing():
            return attend(), None
        try:
            CHECKED[case] = _difference(kernel(call), attend(), call)
        except Exception as failure:
            CHECKED[case] = f"it failed ({type(failure).__name__}: {failure})"
    return (attend(), None) if CHECKED[case] else kernel(call)


def _difference(found: WithLogsumexp, expected: Tensor, call: AttentionCall) -> str:
    """Return how a kernel's results differ from plain attention's; "" if they agree."""
    output, logsumexp = found
    if logsumexp is None:
        return "it gave no logsumexp"
    if not torch.equal(output, expected):
        return "its output is not plain attention's"
    error = logsumexp_error(logsumexp, call)
    return "" if error <= 1 else f"its logsumexp is off by {error:.3g} times what is allowed"


def logsumexp_error(found: Tensor, call: AttentionCall) -> float:
    """Return the largest error of a logsumexp ``[B, heads, N]`` in its first and last rows, by
    float64, as a multiple of what is allowed; NaN if one of them is NaN."""
    n, width = call.query.shape[-2:]
    scale = 1 / math.sqrt(width) if call.scale is None else call.scale
    rows = [*range(min(SAMPLE, n)), *range(max(SAMPLE, n - SAMPLE), n)]
    expected = plain.logsumexp(call.query[:, :, rows].double(), call.key.double(), None, scale)
    error = (found[:, :, rows].double() - expected).abs() / (ALLOWED + DIGITS * expected.abs())
    return float(error.max())


def _case(name: str, call: AttentionCall) -> str:
    """Return the name of a comparison; a kernel's plan depends on all of its layout."""
    layouts = [f"{list(t.shape)} by {list(t.stride())}" for t in call.inputs]
    dtype = str(call.query.dtype).removeprefix("torch.")
    scale = "" if call.scale is None else f", scale {call.scale:g}"
    device = call.query.device
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name} on {model}: {dtype}, {', '.join(layouts)}{scale}"


def flash(call: AttentionCall) -> WithLogsumexp:
    output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *call.inputs, 0.0, False, False, scale=call.scale
    )
    return output, logsumexp


def efficient(call: AttentionCall) -> WithLogsumexp:
    output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *call.inputs, None, True, 0.0, False, scale=call.scale
    )
    return output, logsumexp[..., : call.query.shape[2]]


def cudnn(call: AttentionCall) -> WithLogsumexp:
    output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *call.inputs, None, True, 0.0, False, False, scale=call.scale
    )
    return output, logsumexp.reshape(call.query.shape[:3])


CUDA_KERNELS: dict[int, Kernel] = {FLASH: flash, EFFICIENT: efficient, CUDNN: cudnn}
