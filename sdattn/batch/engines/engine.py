"""`Engine`: the interface of local processes and of Ray's workers."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..input.items import BadLine, Item
from ..input.plan import Job
from .worker import Loaded


class Engine(Protocol):
    """Processes or workers that draw a run's batches.

    Attributes:
        lost: whether one of them ended while it drew.
    """

    lost: bool

    def load(self) -> Loaded:
        """Load the pipeline."""

    def check(self, items: Sequence[Item]) -> tuple[list[Job], list[BadLine]]:
        """Do as :func:`sdattn.batch.engines.worker.check`, with the loaded pipeline."""

    def batch_size(self, jobs: Sequence[Job]) -> int:
        """Do as :func:`sdattn.batch.engines.sizing.find_batch_size`."""

    def draw(self, batches: Sequence[list[Job]], wanted: Mapping[str, str], deal: str) -> None:
        """Draw batches until none is left or the folder is stopped.

        Args:
            batches: the same in all processes.
            wanted: items to draw, id to fingerprint.
            deal: a new name.
        """

    def close(self) -> None:
        """Release the pipeline."""
