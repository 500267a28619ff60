"""`Engine`: those who draw a run's batches."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..input.items import BadLine, Item
from ..input.plan import Job
from .worker import Loaded


class Engine(Protocol):
    """Those who draw a run's batches: what differs between engines.

    Attributes:
        lost: whether one of them ended while it drew.
    """

    lost: bool

    def load(self) -> Loaded:
        """Have the pipeline loaded."""

    def check(self, items: Sequence[Item]) -> tuple[list[Job], list[BadLine]]:
        """See :func:`sdattn.batch.engines.worker.check`, by the loaded pipeline."""

    def batch_size(self, jobs: Sequence[Job]) -> int:
        """See :func:`sdattn.batch.engines.sizing.find_batch_size`."""

    def draw(self, batches: Sequence[list[Job]], wanted: Mapping[str, str], deal: str) -> None:
        """Draw batches until none is left or the folder is stopped.

        Args:
            batches: the same in all processes.
            wanted: the items to draw, id to fingerprint.
            deal: a name that is new.
        """

    def close(self) -> None:
        """Let the pipeline go."""
