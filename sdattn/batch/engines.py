"""Engines map `draw_shard` over shards: in this process, in one process per GPU, or on Ray.

An engine is a blocking call, ``draw(shard)``, that so many ``threads`` may make at once. Who draws
which shard makes no difference, so engines keep no books. If a worker process is lost, ``draw``
raises `WorkerLostError`, and `map_shards` finds out whether the shard is to blame.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context, parent_process
from queue import SimpleQueue
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch

from ..errors import RunError
from ..files.terminal import say, shorter
from ..loading.devices import checked_device
from ..loading.quiet import quiet_libraries
from .drawing import DeviceLostError
from .plan import Shard
from .records import Manifest, ShardRecord
from .request import Request, numbers_of
from .shard import Loaded, Tell, describe, draw_shard, forget_pipeline, record_failure

_TRIES = 3  # workers that a shard may end while it is drawn alone
T = TypeVar("T")


class WorkerLostError(RunError):
    """A worker process, or its machine, ended before it answered; why is not known."""


class Engine(Protocol):
    request: Request
    threads: int

    def describe(self) -> Loaded:
        """Return what the pipeline is that draws the shards; raise RunError if no worker lives to
        load it."""

    def draw(self, manifest: Manifest, shard: Shard, tell: Tell) -> ShardRecord:
        """Draw a shard and return its record; raise WorkerLostError if its worker ends."""

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
            [rank] = numbers_of(os.environ, "", "LOCAL_RANK")
            return [f"cuda:{rank % torch.cuda.device_count()}"]
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
    an error, those under way are finished and no other is begun.

    A shard whose worker is lost is drawn again after the others, and if that worker is lost, too,
    alone. Its items have failed only if it then ends three workers while others live.

    Raises:
        RunError: one worker after another is lost, whatever it draws.
    """
    lost: list[Shard] = []
    suspects: list[Shard] = []
    most = engine.threads + _TRIES
    yield from _draw_together(engine, manifest, shards, tell, is_stopped, lost, most)
    most = len(lost) + 1
    yield from _draw_together(engine, manifest, lost, tell, is_stopped, suspects, most)
    for shard in suspects:
        if not is_stopped():
            yield _draw_alone(engine, manifest, shard, tell)


def _draw_together(
    engine: Engine,
    manifest: Manifest,
    shards: Iterable[Shard],
    tell: Tell,
    is_stopped: Callable[[], bool],
    lost: list[Shard],
    most: int,
) -> Iterator[ShardRecord]:
    """Yield the records of shards; add those whose worker is ``lost``. Raise RunError after
    ``most`` losses in a row."""
    waiting = iter(shards)
    in_a_row = 0
    with ThreadPoolExecutor(engine.threads) as pool:
        under_way: dict[Future[ShardRecord], Shard] = {}
        while True:
            while len(under_way) < engine.threads and not is_stopped():
                if (shard := next(waiting, None)) is None:
                    break
                under_way[pool.submit(engine.draw, manifest, shard, tell)] = shard
            if not under_way:
                return
            # Woken twice a second, so that signals are noticed.
            for future in wait(under_way, timeout=0.5, return_when=FIRST_COMPLETED).done:
                shard = under_way.pop(future)
                try:
                    record = future.result()
                except WorkerLostError as error:
                    lost.append(shard)
                    in_a_row += 1
                    if in_a_row == most:
                        raise _all_lost(engine.request, in_a_row, error) from error
                else:
                    in_a_row = 0
                    yield record


def _draw_alone(engine: Engine, manifest: Manifest, shard: Shard, tell: Tell) -> ShardRecord:
    """Return the record of a shard that may end its workers."""
    for _ in range(_TRIES):
        try:
            return engine.draw(manifest, shard, tell)
        except WorkerLostError as error:
            said = str(error)
        engine.describe()  # or raise: no worker lives, whatever it is asked
    reason = f"each of {_TRIES} workers that drew nothing but its shard ended: {said}"
    record = record_failure(engine.request, manifest, shard, reason)
    tell(0, len(record.failed))
    return record


def _all_lost(request: Request, number: int, error: WorkerLostError) -> RunError:
    return RunError(
        f"{number} workers in a row ended and drew nothing. The last: {error} If memory is short, "
        "choose a smaller `batch_size` or fewer `workers`. Finished shards stay in "
        f"{request.out}; once this is fixed, the same command does the rest."
    )


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
    """Calls functions in other processes."""

    def __init__(self, request: Request, threads: int):
        self.request = request
        self.threads = threads

    def describe(self) -> Loaded:
        for _ in range(_TRIES):
            try:
                return self._call(describe)
            except WorkerLostError as error:
                last = error
        raise _all_lost(self.request, _TRIES, last) from last

    def draw(self, manifest: Manifest, shard: Shard, tell: Tell) -> ShardRecord:
        record: ShardRecord = self._call(draw_shard, manifest, shard)
        tell(len(record.whole), len(record.failed))
        return record

    @abstractmethod
    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function in a worker; raise WorkerLostError if that ends."""


def _in_worker(function: Callable[..., T], *arguments: object) -> T:
    """Call a function. If this process lost its device, end it: the next one gets it anew."""
    try:
        return function(*arguments)
    except DeviceLostError as error:
        say(str(error))
        os._exit(1)


class Processes(_Workers):
    """A process for each device; one that ends is replaced."""

    def __init__(self, request: Request, devices: list[str]):
        super().__init__(request, len(devices))
        self.free = SimpleQueue[tuple[str, list[ProcessPoolExecutor]]]()
        self.stack = ExitStack()
        for device in devices:
            self.free.put((device, []))

    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        device, pools = self.free.get()
        try:
            if not pools:
                # One process each, so that it is known which shard ended it.
                pool = ProcessPoolExecutor(
                    1, get_context("spawn"), _begin_worker, (self.request.progress,)
                )
                pools.append(self.stack.enter_context(pool))
            request = replace(self.request, device=device)
            with _without_script():  # the first call begins the process
                future = pools[0].submit(_in_worker, function, request, *arguments)
            return future.result()
        except BrokenProcessPool as error:
            pools.clear()
            say(f"a worker on {device} has ended too soon")
            raise WorkerLostError(f"the process on {device} ended too soon.") from error
        finally:
            self.free.put((device, pools))

    def close(self) -> None:
        self.stack.close()


_spawning = threading.Lock()


@contextmanager
def _without_script() -> Iterator[None]:
    """Let processes begin without running the caller's script: they need nothing of it, and a
    script that calls `run_batch` at its top would begin the run again in each of them."""
    with _spawning:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script


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
    """Remote tasks of Ray, which finds room for them and starts more machines; each worker process
    keeps its pipeline."""

    def __init__(self, request: Request):
        import ray

        self.began = not ray.is_initialized()
        if self.began:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends them to its makers
            ray.init(logging_level=logging.WARNING)
        gpus = int(ray.cluster_resources().get("GPU", 0))
        device = request.device or ("cuda" if gpus else "cpu")
        if not (request.device or gpus):  # an autoscaler may be waiting for a request
            say("Ray has no GPU now, so each worker takes a CPU; the device cuda waits for GPUs")
        super().__init__(replace(request, device=device), request.workers or max(1, gpus))
        takes: dict[str, Any] = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 1}
        # A worker is used again, though it holds a GPU: it has the pipeline. And Ray itself tries
        # nothing again, as it would not say that a worker was lost.
        self.remote = ray.remote(max_retries=0, max_calls=0, **takes)(_on_ray)

    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            made: T = ray.get(self.remote.remote(os.getcwd(), function, self.request, *arguments))
            return made
        except RayTaskError as error:  # the function's own
            if isinstance(error.cause, Exception):
                raise error.cause from error
            raise RunError(str(error)) from error
        except RayError as error:
            said = shorter(str(error).strip().rpartition("\n")[2], 300)
            raise WorkerLostError(f"{type(error).__name__}: {said.rstrip('.')}.") from error

    def close(self) -> None:
        if self.began:
            import ray

            ray.shutdown()


def _on_ray(cwd: str, function: Callable[..., T], *arguments: object) -> T:
    with suppress(OSError):  # relative paths, if this machine has the folder
        os.chdir(cwd)
    quiet_libraries(prompts=True)
    return _in_worker(function, *arguments)
