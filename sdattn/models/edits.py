"""`Edits`: how prompt-to-prompt edits a family's images."""

from collections.abc import Sequence
from dataclasses import dataclass

from .attention_layer import AttentionLayer

Part = tuple[float, float]  # of a run or of the depth of a model, in [0, 1]


@dataclass(frozen=True, kw_only=True)
class Edits:
    """How prompt-to-prompt edits images of a family: what has been measured of it.

    Attributes:
        pipelines: names of the classes whose images are edited.
        depth: the part of the layers, in the order in which they run, that takes the source's
            attention: 0 is before the first of them, 1 behind the last.
        cross, self_: during which part of the run it takes the source's attention to the text, and
            that of the image to itself, where nothing else is asked for.
    """

    pipelines: tuple[str, ...]
    depth: Part = (0.0, 1.0)
    cross: float = 0.8
    self_: float = 0.4

    def layers(self, found: Sequence[AttentionLayer]) -> list[str]:
        """The names of those of a model's layers whose middle lies in :attr:`depth`."""
        first, last = self.depth
        middles = [(i + 0.5) / len(found) for i in range(len(found))]
        return [la.name for la, at in zip(found, middles, strict=True) if first <= at <= last]
