"""`TextOnly`: layers that contribute their attention to the text, and whose maps are not kept."""

from __future__ import annotations

from typing import cast

from ..attention.calls import ProjectedCall
from ..follow.passes import Pass
from ..look.attended import HeadSums
from ..look.refined import Spreading
from ..models.denoiser_call import Size
from ..models.layers import AttentionLayer
from .keep import Keep
from .running_sums import RunningSum


class TextOnly(RunningSum):
    """Hand what one layer pays to the text to the layers that spread it, and hold nothing.

    Args:
        spreading: shared by all layers of the capture.
    """

    def __init__(self, layer: AttentionLayer, keep: Keep, spreading: Spreading):
        super().__init__(layer, keep)
        self.spreading = spreading
        self.total.may_wait = False

    def add(self, attended: HeadSums) -> None:
        running = cast(Pass, self.running)
        columns = self._checked(attended, running)
        self.spreading.text.add(attended.add_to(None, columns) / attended.heads)
        self.seen.append(running)

    def _begin(self, attended: HeadSums | ProjectedCall, size: Size | None) -> None:
        """Hold nothing."""
