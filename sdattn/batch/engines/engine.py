from collections.abc import Mapping, Sequence
from typing import Protocol

from ..input.items import BadLine, Item
from ..input.plan import Job
from .worker import Loaded


class Engine(Protocol):
    """Processes or workers that draw a run's batches; ``lost`` tells that one of them ended."""

    lost: bool

    def load(self) -> Loaded: ...

    def check(self, items: Sequence[Item]) -> tuple[list[Job], list[BadLine]]:
        """Do as :func:`sdattn.batch.engines.worker.check`, with the loaded pipeline."""

    def batch_size(self, jobs: Sequence[Job]) -> int:
        """Do as :func:`sdattn.batch.engines.sizing.find_batch_size`."""

    def draw(self, batches: Sequence[list[Job]], wanted: Mapping[str, str], deal: str) -> None:
        """Draw the ``wanted`` items, id to fingerprint, of batches that are the same in all
        processes, until none is left or the folder is stopped; ``deal`` is a new name."""

    def close(self) -> None: ...
