"""The Ray engine: actors that each hold the pipeline; a lost one is replaced.

They are plain actors: with Ray Data, a batch given to an actor waits until that one is back,
batches held in its memory are lost silently, and the model's checksum would need another copy.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from ...errors import AccessError, RunError
from ...files.addresses import path_of
from ...files.terminal import say, shorter
from ...loading.quiet import quiet_libraries
from ...models.pipeline import Pipeline
from ..input.items import BadLine, Item
from ..input.plan import Job
from ..input.request import Request
from ..storage.folder import BatchFolder
from .local_engine import same
from .sizing import find_batch_size
from .worker import Loaded, Worker, check, join_lock, load

_TRIES = 3  # workers that may be lost to one batch
_LEAVING = 10.0  # seconds that a killed worker may take to exit
_PATIENCE = 30.0  # seconds without a worker until that is reported


class RayActor:
    """A worker that makes its pipeline and folder on its own machine. It shares the job's lock, and
    relative paths start from ``cwd`` if this machine has it."""

    def __init__(self, request: Request, job: str, cwd: str):
        with suppress(OSError):
            os.chdir(cwd)
        self.request, self.job = request, job
        self.name = f"{job}-{socket.gethostname()}-{os.getpid()}"
        self.folder = BatchFolder(request.out)
        self.at_work = ExitStack()
        self.pipe: Pipeline  # once loaded
        self.worker: Worker | None = None

    def load(self) -> Loaded:
        quiet_libraries(prompts=True)
        if not join_lock(self.folder.lock, self.job):
            raise AccessError(
                f"{self.folder.root} on {socket.gethostname()} is not the run's folder. Workers of "
                "Ray need a folder that all machines share, at one path."
            )
        self.pipe = load(self.request, self.request.device)
        return Loaded.of(self.pipe)

    def check(self, items: Sequence[Item]) -> tuple[list[Job], list[BadLine]]:
        return check(self.pipe, items, self.request)

    def batch_size(self, jobs: Sequence[Job], share: int) -> int:
        return find_batch_size(self.pipe, jobs, self.request.preset, share)

    def draw(self, batch: Sequence[Job], wanted: Mapping[str, str], size: int) -> None:
        """Draw a batch; its items are on the disk after :meth:`finish` at the latest."""
        if self.worker is None:
            made = Worker(self.pipe, self.folder, self.name, self.request, size)
            self.worker = self.at_work.enter_context(made)
        self.worker.draw(batch, wanted)

    def finish(self) -> None:
        self.worker = None
        self.at_work.close()


class _Call(NamedTuple):
    actor: Any
    method: str
    batch: Sequence[Job]  # to draw


class RayEngine:
    def __init__(self, request: Request, folder: BatchFolder, job: str):
        self.request = replace(request, out=str(path_of(request.out).resolve()))
        self.folder, self.job, self.lost = folder, job, False
        self.actors: list[Any] = []
        self.free: list[Any] = []  # those that have loaded the pipeline and have nothing to do
        self.calls: dict[object, _Call] = {}  # by the reference to the answer
        self.answers: dict[str, Any] = {}  # the last, by method
        self.errors: list[Exception] = []
        self.losses = Counter[str]()  # by the first item of a batch, or by method
        self.least = self.most = 0  # workers
        self.connected = self.began = False

    def load(self) -> Loaded:
        self._connect()
        for _ in range(self.most):
            self._hire()
        while len(self.free) < self.least:
            self._await()
            self._raise()
        return self.answers["load"]

    def check(self, items: Sequence[Item]) -> tuple[list[Job], list[BadLine]]:
        return self._ask("check", items)

    def batch_size(self, jobs: Sequence[Job]) -> int:
        # The first job of each shape: reversed, since the last one put in stays.
        one_each = {job.shape: job for job in reversed(jobs)}
        return self._ask("batch_size", [*one_each.values()], len(jobs) // self.most)

    def draw(self, batches: Sequence[list[Job]], wanted: Mapping[str, str], deal: str) -> None:
        self.lost, left = False, deque(batches)
        size = max(map(len, batches), default=1)
        while True:
            if self.errors or self.folder.stopped:
                left.clear()
            # A batch for every waiting worker, then the next answer, until none is drawing.
            while left and self.free:
                batch = left.popleft()
                ids = {job.item.id for job in batch} & wanted.keys()
                given = {item: wanted[item] for item in ids}
                self._call(self.free.pop(), "draw", batch, given, size, batch=batch)
            if not left and not self._under_way("draw"):
                break
            self._await()
        while self.free:
            self._call(self.free.pop(), "finish")
        while self._under_way("finish"):
            self._await()
        self._raise()

    def close(self) -> None:
        if self.connected:
            import ray

            for actor in self.actors:
                ray.kill(actor)
            if self.began:
                ray.shutdown()
            # Killed workers share the lock, and the next command must find it free.
            self.folder.close()
            end = time.monotonic() + _LEAVING
            while not self.folder.lock.free() and time.monotonic() < end:
                time.sleep(0.05)

    # Ray

    def _connect(self) -> None:
        import ray

        self.began = not ray.is_initialized()
        if self.began:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends them to its makers
            if os.environ.get("RAY_ADDRESS", "local") != "local":  # it tries 20 times, 40 s each
                os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
            ray.init(logging_level=logging.WARNING)
        self.connected = True
        gpus = int(ray.cluster_resources().get("GPU", 0))
        device = self.request.device or ("cuda" if gpus else "cpu")
        if not (self.request.device or gpus):  # an autoscaler may be waiting for a request
            say("Ray has no GPU now, so each worker takes a CPU; the device cuda waits for GPUs")
        self.request = replace(self.request, device=device)
        self.takes = "GPU" if device == "cuda" else "CPU"
        takes: dict[str, Any] = {f"num_{self.takes.lower()}s": 1}
        self.kind = ray.remote(**takes)(RayActor)
        self.least, self.most = self.request.workers or (1, max(1, gpus))

    def _hire(self) -> None:
        actor = self.kind.remote(self.request, self.job, os.getcwd())
        self.actors.append(actor)
        self._call(actor, "load")

    def _call(self, actor: Any, method: str, *arguments: object, batch: Sequence[Job] = ()) -> None:
        answer = getattr(actor, method).remote(*arguments)
        self.calls[answer] = _Call(actor, method, batch)

    def _ask(self, method: str, *arguments: object) -> Any:
        """Return a worker's answer, or another worker's if that one is lost."""
        self.answers.pop(method, None)
        while method not in self.answers:
            if self.free and not self._under_way(method):
                self._call(self.free.pop(), method, *arguments)
            self._await()
            self._raise()
        return self.answers[method]

    def _under_way(self, method: str) -> bool:
        return any(call.method == method for call in self.calls.values())

    def _await(self) -> None:
        import ray
        from ray.exceptions import RayError, RayTaskError

        done, _ = ray.wait([*self.calls], timeout=_PATIENCE)
        if not done:
            self._tell_of_waiting()
            return
        call = self.calls.pop(done[0])
        try:
            answer = ray.get(done[0])
            if call.method == "load":
                same([self.answers.get("load", answer), answer])
            self.answers[call.method] = answer
            self.losses.pop(call.method, None)
        except RayTaskError as error:  # the worker's own
            self.errors.append(error.cause or error)
        except RayError as gone:
            self._replace(call, gone)
            return
        except ValueError as error:
            self.errors.append(error)
        self.free.append(call.actor)

    def _replace(self, call: _Call, gone: Exception) -> None:
        """Start another worker instead of a lost one, whose items are found missing once all is
        drawn; give up a batch that ends every worker."""
        import ray

        self.lost = True
        ray.kill(call.actor)
        self.actors.remove(call.actor)
        reason = _reason(gone)
        say(f"a worker has ended too soon ({reason})")
        # A batch that ends three workers is given up; so is the run if none of them can start.
        cause = call.batch[0].item.id if call.batch else call.method
        self.losses[cause] += 1
        if call.batch and self.losses[cause] == _TRIES:
            text = f"each of {_TRIES} workers that drew it ended ({type(gone).__name__})"
            for job in call.batch:
                self.folder.note_failed(self.job, asdict(job.item), text, str(gone))
        elif self.losses[cause] == _TRIES * self.most:
            self.errors.append(RunError(f"The workers end before they draw. {reason}"))
        self._hire()

    def _raise(self) -> None:
        if self.errors:
            raise self.errors[0]

    def _tell_of_waiting(self) -> None:
        import ray

        if any(call.method != "load" for call in self.calls.values()):
            return
        there = f"{len(self.free)} of {self.least} workers have loaded the model"
        text = f"waiting: {there}; each takes a {self.takes}, and Ray has "
        text += f"{ray.cluster_resources().get(self.takes, 0):g}"
        then = f"; asked for 1 to {self.most} workers it would start as many as fit"
        say(text + then * (self.least > 1))


def _reason(gone: Exception) -> str:
    """Return why Ray lost a worker: the last line of the error, before a possibly empty clause."""
    said = [line for line in map(str.strip, str(gone).splitlines()) if line and line[-1] != "-"]
    return f"{type(gone).__name__}: {shorter(''.join(said[-1:]), 300)}"
