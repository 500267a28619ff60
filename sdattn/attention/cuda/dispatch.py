"""On CUDA: Triton's kernels, in the cases where they agree with torch's own operations there.

A case is compared when it first comes up, which reads one number back from the device; later calls
read nothing.
"""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ...errors import warn
from .. import plain
from ..core import HALF_TYPES
from .choice import Case, Choice, KernelWarning

ALLOWED = 1e-5  # of a probability, and of a logsumexp
DIGITS = 1e-6  # of a logsumexp, as a part of its size
RELATIVE = 2e-3  # of a probability in half types
SAMPLE = 64  # queries at either end, which the comparison looks at
MOST_KEYS = 512  # that the kernel of a whole softmax holds at a time
COSTLY = 1 << 26  # scores of a layer; computing more for a logsumexp alone is warned of

CHOICE = Choice()


def kernels_in_use() -> list[str]:
    """A line for each case that came up on CUDA in this process: by a kernel, or by torch's own
    operations and why."""
    return CHOICE.report()


def add_softmax(
    total: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    columns: Sequence[int] | None = None,
) -> None:
    """As :func:`sdattn.attention.recording.record_softmax`."""

    def compare() -> float:
        found, expected, rows = _sample(total)
        _kernels().add_softmax(found, query, key, mask, scale, columns)
        plain.add_softmax(expected, query[:, :, rows], key, _of(mask, rows), scale, columns)
        return _difference(found[:, rows], expected, query)

    # A kernel holds all keys at once, and adds to each column once.
    fits = key.shape[2] <= MOST_KEYS and (columns is None or len(set(columns)) == len(columns))
    case = _case("record_softmax", query, key, mask, columns)
    kernel = fits and _agrees(case, query, compare)
    (_kernels() if kernel else plain).add_softmax(total, query, key, mask, scale, columns)


def add_share(
    total: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    logsumexp: Tensor,
    columns: Sequence[int] | None = None,
) -> None:
    """As :func:`sdattn.attention.recording.record_share`."""

    def compare() -> float:
        found, expected, rows = _sample(total)
        _kernels().add_share(found, query, key, mask, scale, logsumexp, columns)
        given = query[:, :, rows], key, _of(mask, rows), scale, logsumexp[:, :, rows]
        plain.add_share(expected, *given, columns)
        return _difference(found[:, rows], expected, query)

    case = _case("record_share", query, key, mask, columns)
    kernel = _agrees(case, query, compare)
    chosen = _kernels() if kernel else plain
    chosen.add_share(total, query, key, mask, scale, logsumexp, columns)


def logsumexp(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """As :func:`sdattn.attention.recording.logsumexp`.

    Where there is no kernel, all scores are made in float32, a slice of queries at a time; that is
    several times the work of the model's own attention, and warned of once.
    """

    def compare() -> float:
        found = _kernels().logsumexp(query, key, mask, scale)
        return logsumexp_error(found, query, key, mask, scale, ALLOWED)

    case = _case("logsumexp", query, key, mask)
    if _agrees(case, query, compare):
        return _kernels().logsumexp(query, key, mask, scale)
    scores = query.shape[:3].numel() * key.shape[2]
    if scores >= COSTLY:
        flops = 2 * scores * query.shape[-1]
        warn(
            f"Of this layer's attention ({scores / 1e6:.0f} million scores) neither torch's kernel "
            "nor Triton gives the logsumexp, so that it is computed from all scores, in float32: "
            f"{flops / 1e9:.0f} GFLOP more in each such layer. Install the triton that belongs to "
            "this torch, run the model in a half type, or watch fewer layers (layers=…).",
            KernelWarning,
        )
    return plain.logsumexp(query, key, mask, scale)


def logsumexp_error(
    found: Tensor, query: Tensor, key: Tensor, mask: Tensor | None, scale: float, allowed: float
) -> float:
    """How far a logsumexp ``[B, heads, N]`` is from the float64 of its first and last rows, as a
    multiple of ``allowed`` and of the digits that float32 has."""
    rows = _ends(query.shape[2], query.device)
    of_rows = query[:, :, rows].double()
    expected = plain.logsumexp(of_rows, key.double(), _of(mask, rows), scale)
    return _largest(found[:, :, rows].double(), expected, allowed + DIGITS * expected.abs())


def _kernels() -> ModuleType:
    """Triton is loaded where it is used: only torch's CUDA builds come with it."""
    from . import launching

    return launching


def _agrees(case: Case, query: Tensor, compare: Callable[[], float]) -> bool:
    """Whether the kernel is used. A stream that is being captured into a graph cannot be read."""
    # To compare is to read a number back, which would break the capture of a CUDA graph.
    unknown = case not in CHOICE.verdicts and query.is_cuda
    if unknown and torch.cuda.is_current_stream_capturing():
        return False
    return CHOICE.agrees(case, compare)


def _case(
    name: str, query: Tensor, key: Tensor, mask: Tensor | None, columns: Sequence[int] | None = None
) -> Case:
    """All that the code of a kernel depends on, and how it is tiled."""
    device = query.device
    model = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = {
        "dtype": str(query.dtype).removeprefix("torch."),
        "head size": query.shape[-1],
        "keys": f"up to {_power_of_two(key.shape[2])}",
    }
    if columns is not None:
        parts["columns"] = f"up to {_power_of_two(len(columns))}"
    if mask is not None:
        parts["mask"] = str(mask.dtype).removeprefix("torch.")
    return Case(name, model, ", ".join(f"{what} {part}" for what, part in parts.items()))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _ends(n: int, device: torch.device) -> Tensor:
    """The first and the last of so many queries."""
    rows = [*range(min(SAMPLE, n)), *range(max(SAMPLE, n - SAMPLE), n)]
    return torch.tensor(rows, device=device)


def _sample(total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of a kernel, sums to be expected of some queries, and which queries."""
    rows = _ends(total.shape[1], total.device)
    expected = total.new_zeros(len(total), len(rows), total.shape[2], dtype=torch.float64)
    return torch.zeros_like(total), expected, rows


def _of(mask: Tensor | None, rows: Tensor) -> Tensor | None:
    return mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]


def _difference(found: Tensor, expected: Tensor, query: Tensor) -> float:
    relative = RELATIVE if query.dtype in HALF_TYPES else ALLOWED
    return _largest(found.double(), expected, ALLOWED * query.shape[1] + relative * expected)


def _largest(found: Tensor, expected: Tensor, allowed: Tensor) -> float:
    error = (found - expected).abs() / allowed
    return float(error.masked_fill(found == expected, 0.0).max())
