"""A kernel is used once it was found to agree with torch's own operations on this machine."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import SdattnWarning, warn


class KernelWarning(SdattnWarning):
    """A kernel is not used: it failed, or gave other values than torch's own operations."""


class Case(NamedTuple):
    """What one comparison stands for.

    Attributes:
        name: of what is computed.
        device: its model, as torch names it.
        shape: all else that the kernel's code or its tiling depends on, in words.
    """

    name: str
    device: str
    shape: str


@dataclass(frozen=True)
class Verdict:
    """Of one case: whether the kernel is used, and why not."""

    agrees: bool
    reason: str = ""


class Choice:
    """Which cases a kernel is used for.

    Attributes:
        verdicts: of the cases that came up, in their order.
    """

    def __init__(self) -> None:
        self.verdicts: dict[Case, Verdict] = {}

    def agrees(self, case: Case, compare: Callable[[], float], quiet: bool = False) -> bool:
        """Whether the kernel is to be used; what was found once holds for this process.

        Args:
            case: what it is asked for.
            compare: runs the kernel and torch's own operations; gives the largest difference, as a
                multiple of what is allowed. Anything that it raises counts as a difference.
            quiet: whether a difference is only noted in ``verdicts``; otherwise it is warned of,
                once a case, by a :class:`KernelWarning`.
        """
        if case not in self.verdicts:
            self.verdicts[case] = verdict = _verdict(compare)
            if not (verdict.agrees or quiet):
                warn(
                    f"The kernel {case.name} is not used on {case.device} for {case.shape}: "
                    f"{verdict.reason}. Torch's own operations take its place: the values are "
                    "right, capture is slower. Please report it.",
                    KernelWarning,
                )
        return self.verdicts[case].agrees

    def report(self) -> list[str]:
        """A line for each case: what is computed, for which shape, and by what."""
        return [
            f"{case.name} on {case.device} for {case.shape}: "
            + ("kernel" if verdict.agrees else f"torch ({verdict.reason})")
            for case, verdict in self.verdicts.items()
        ]


def _verdict(compare: Callable[[], float]) -> Verdict:
    try:
        error = compare()
    except ImportError as failure:
        return Verdict(False, f"not installed ({failure})")
    except Exception as failure:
        return Verdict(False, f"it failed ({type(failure).__name__}: {failure})")
    if math.isnan(error) or error > 1:
        return Verdict(False, f"its values are off by {error:.3g} times what is allowed")
    return Verdict(True)
