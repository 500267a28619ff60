from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...errors import InvalidValueError
from ...loading.devices import limit_threads
from ...models.pipeline import Pipeline
from ..input.items import BadLine, Item
from ..input.plan import Job
from ..input.request import Request
from ..storage.folder import BatchFolder
from .process_group import ProcessGroup
from .sizing import find_batch_size
from .worker import Loaded, Worker, check, load


class LocalEngine:
    """Processes that accelerate started, each with the pipeline, seen from each of them; ``lost``
    tells that one of them ended."""

    lost = False  # the team notices that

    def __init__(self, request: Request, team: ProcessGroup, folder: BatchFolder, job: str):
        self.request, self.team, self.folder, self.job = request, team, folder, job
        self.pipe: Pipeline  # once loaded
        self.threads = torch.get_num_threads()  # to be restored

    def load(self) -> Loaded:
        team = self.team
        self.pipe = team.run_on_all(lambda: load(self.request, team.device))
        limit_threads(self.pipe)
        loaded = team.all_gather(team.run_on_all(lambda: Loaded.of(self.pipe)))
        return team.broadcast(lambda: same(loaded))

    def check(self, items: Sequence[Item]) -> tuple[list[Job], list[BadLine]]:
        return self.team.broadcast(lambda: check(self.pipe, items, self.request))

    def batch_size(self, jobs: Sequence[Job]) -> int:
        share = len(jobs) // self.team.size
        find = find_batch_size
        return self.team.broadcast(lambda: find(self.pipe, jobs, self.request.preset, share))

    def draw(self, batches: Sequence[list[Job]], wanted: Mapping[str, str], deal: str) -> None:
        """Draw the ``wanted`` items, id to fingerprint, of batches that are the same in all
        processes, until none is left or the folder is stopped; ``deal`` is a new name."""
        size = max(map(len, batches), default=1)
        name = f"{self.job}-{self.team.rank}"
        with Worker(self.pipe, self.folder, name, self.request, size) as worker:
            for batch in self.team.shared_queue(batches, deal):
                if self.folder.stopped:
                    break
                worker.draw(batch, wanted)

    def close(self) -> None:
        torch.set_num_threads(self.threads)


def same(loaded: Sequence[Loaded]) -> Loaded:
    """Return what all processes have loaded; raise ValueError if it is not one model."""
    if len({one.video_format for one in loaded}) > 1:
        raise InvalidValueError(
            "The processes would write videos in different formats. Install PyAV on every machine, "
            "pip install 'sdattn[video]', or on none."
        )
    if len(set(loaded)) > 1:
        checksums = ", ".join(one.weights for one in loaded)
        raise InvalidValueError(
            f"The processes have loaded different models ({checksums}). Give all the same files."
        )
    return loaded[0]
