"""`Edits`: settings of prompt-to-prompt for a family's images."""

from collections.abc import Sequence
from dataclasses import dataclass

from .attention_layer import AttentionLayer

Part = tuple[float, float]  # part of a run or of a model's depth, in [0, 1]


@dataclass(frozen=True, kw_only=True)
class Edits:
    """Best settings of prompt-to-prompt for images of a family, as measured.

    Attributes:
        pipelines: class names of pipelines whose images can be edited.
        depth: part of the layers, in running order, that takes the source's attention: 0 is before
            the first layer, 1 after the last.
        cross, self_: default part of the run that takes the source's attention to the text, and its
            attention from image to image.
    """

    pipelines: tuple[str, ...]
    depth: Part = (0.0, 1.0)
    cross: float = 0.8
    self_: float = 0.4

    def layers(self, found: Sequence[AttentionLayer]) -> list[str]:
        """Return the names of layers whose middle lies in :attr:`depth`."""
        first, last = self.depth
        middles = [(i + 0.5) / len(found) for i in range(len(found))]
        return [la.name for la, at in zip(found, middles, strict=True) if first <= at <= last]
