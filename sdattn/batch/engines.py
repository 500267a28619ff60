"""Engines map `draw_shard` over shards: in this process, in one process per GPU, or on Ray.

An engine is a blocking call, ``draw(shard)``, that so many ``threads`` may make at once. Who draws
which shard makes no difference, so engines keep no books.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing import get_context, parent_process
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from ..errors import RunError
from ..files.terminal import say, shorter
from ..loading.devices import checked_device
from ..loading.quiet import quiet_libraries
from .plan import Shard
from .records import Manifest, ShardRecord
from .request import Request
from .shard import Loaded, Tell, describe, draw_shard, forget_pipeline, record_failure

_TRIES = 3  # workers that a shard may end
T = TypeVar("T")


class Engine(Protocol):
    threads: int

    def describe(self) -> Loaded:
        """Return what the pipeline is that draws the shards."""

    def draw(self, manifest: Manifest, shard: Shard, tell: Tell) -> ShardRecord:
        """Draw a shard and return its record; a shard that ends its workers is recorded so."""

    def close(self) -> None: ...


def engine_for(request: Request) -> Engine:
    devices = [] if request.engine == "ray" else worker_devices(request)
    if len(devices) == 1:
        return ThisProcess(request)
    forget_pipeline()  # the plan needed it; its workers have their own
    return Processes(request, devices) if devices else RayTasks(request)


def worker_devices(request: Request) -> list[str]:
    """Return the device of each worker on this machine: every GPU, unless a launcher or the request
    says which; for ``workers`` on a CPU, that many."""
    device = checked_device(request.device)
    if device.type == "cuda" and device.index is None:
        if "LOCAL_RANK" in os.environ:  # torchrun and accelerate start a process for each
            return [f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"]
        count = torch.cuda.device_count()
        return [f"cuda:{i % count}" for i in range(request.workers or count)]
    return [str(device)] * (request.workers or 1)


def map_shards(
    engine: Engine,
    manifest: Manifest,
    shards: Iterable[Shard],
    tell: Tell,
    is_stopped: Callable[[], bool],
) -> Iterator[ShardRecord]:
    """Yield the records of shards as they are done, a few under way at once; when stopped, or after
    an error, those under way are finished and no other is begun."""
    waiting = iter(shards)
    with ThreadPoolExecutor(engine.threads) as pool:
        under_way = set[Future[ShardRecord]]()
        while True:
            while len(under_way) < engine.threads and not is_stopped():
                if (shard := next(waiting, None)) is None:
                    break
                under_way.add(pool.submit(engine.draw, manifest, shard, tell))
            if not under_way:
                return
            # Woken twice a second, so that signals are noticed.
            done, under_way = wait(under_way, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


class ThisProcess:
    """Draws in this process: while one thread writes a shard, the other draws the next."""

    threads = 2

    def __init__(self, request: Request):
        self.request = replace(request, device=worker_devices(request)[0])

    def describe(self) -> Loaded:
        return describe(self.request)

    def draw(self, manifest: Manifest, shard: Shard, tell: Tell) -> ShardRecord:
        return draw_shard(self.request, manifest, shard, tell)

    def close(self) -> None:
        forget_pipeline()


class _Workers(ABC):
    """Calls functions in other processes; a call that ends its process is tried in another."""

    ended: type[Exception]  # raised when that has ended so many

    def __init__(self, request: Request, threads: int):
        self.request = request
        self.threads = threads

    def describe(self) -> Loaded:
        return self._call(describe)

    def draw(self, manifest: Manifest, shard: Shard, tell: Tell) -> ShardRecord:
        try:
            record: ShardRecord = self._call(draw_shard, manifest, shard)
        except self.ended as error:
            said = shorter(str(error).strip().rpartition("\n")[2], 300)
            reason = f"each of {_TRIES} workers that drew its shard ended: {said}"
            record = record_failure(self.request, manifest, shard, reason)
        tell(len(record.whole), len(record.failed))
        return record

    @abstractmethod
    def _call(self, function: Callable[..., T], *arguments: object) -> T: ...


class Processes(_Workers):
    """A process for each device. One that ends is replaced, and its shard drawn again."""

    ended = BrokenProcessPool

    def __init__(self, request: Request, devices: list[str]):
        super().__init__(request, len(devices))
        self.free = SimpleQueue[tuple[str, list[ProcessPoolExecutor]]]()
        self.stack = ExitStack()
        for device in devices:
            self.free.put((device, []))

    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function in a free worker, in another one if that ends."""
        device, pools = self.free.get()
        try:
            tries = 0
            while True:
                if not pools:
                    # One process each, so that it is known which shard ended it.
                    pool = ProcessPoolExecutor(
                        1, get_context("spawn"), _begin_worker, (self.request.progress,)
                    )
                    pools.append(self.stack.enter_context(pool))
                try:
                    request = replace(self.request, device=device)
                    return pools[0].submit(function, request, *arguments).result()
                except BrokenProcessPool:
                    pools.clear()
                    say(f"a worker on {device} has ended too soon")
                    tries += 1
                    if tries == _TRIES:
                        raise
        finally:
            self.free.put((device, pools))

    def close(self) -> None:
        self.stack.close()


def _begin_worker(progress: bool) -> None:
    """Leave signals to the parent, and end with it."""
    for name in ("SIGINT", "SIGTERM"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    quiet_libraries(prompts=True, downloads=progress)


class RayTasks(_Workers):
    """Remote tasks of Ray, which finds room for them, retries them and starts more machines; each
    worker process keeps its pipeline."""

    def __init__(self, request: Request):
        import ray

        self.began = not ray.is_initialized()
        if self.began:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends them to its makers
            os.environ.setdefault("RAY_task_oom_retries", str(_TRIES))  # else it never gives up
            ray.init(logging_level=logging.WARNING)
        gpus = int(ray.cluster_resources().get("GPU", 0))
        device = request.device or ("cuda" if gpus else "cpu")
        if not (request.device or gpus):  # an autoscaler may be waiting for a request
            say("Ray has no GPU now, so each worker takes a CPU; the device cuda waits for GPUs")
        super().__init__(replace(request, device=device), request.workers or max(1, gpus))
        self.ended = ray.exceptions.RayError
        takes: dict[str, Any] = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 1}
        # A worker is used again, though it holds a GPU: it has the pipeline.
        self.remote = ray.remote(max_retries=_TRIES - 1, max_calls=0, **takes)(_on_ray)

    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        import ray
        from ray.exceptions import RayTaskError

        try:
            made: T = ray.get(self.remote.remote(os.getcwd(), function, self.request, *arguments))
            return made
        except RayTaskError as error:  # the function's own
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise RunError(str(error)) from error

    def close(self) -> None:
        if self.began:
            import ray

            ray.shutdown()


def _on_ray(cwd: str, function: Callable[..., T], *arguments: object) -> T:
    with suppress(OSError):  # relative paths, if this machine has the folder
        os.chdir(cwd)
    quiet_libraries(prompts=True)
    return function(*arguments)
