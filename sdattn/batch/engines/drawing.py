"""Drawing one batch at a time, while threads encode and write."""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...edit.editing import edit
from ...files.terminal import say
from ...maps.presets import Preset, preset_for
from ...models.pipeline import Pipeline
from ...runs.editrun import EditRun
from ...runs.imagerun import ImageRun
from ..input.items import Item
from ..input.plan import Job
from .sizing import is_out_of_memory, release_memory, run_together, trim_heap

_TRIM_EVERY = 16  # batches


class BatchDrawer:
    """Draws batches with a loaded pipeline; batches that do not fit are halved, and one item's
    failure does not affect others.

    ``store`` is called with each item, the run of its image and, for an edit, the edit; ``fail``
    with each that could not be drawn, the reason in one line, and the traceback.
    """

    def __init__(
        self,
        pipe: Pipeline,
        preset: str | Preset,
        store: Callable[[Item, ImageRun, EditRun | None], None],
        fail: Callable[[Item, str, str], None],
    ):
        self.pipe, self.store, self.fail = pipe, store, fail
        self.preset = preset_for(pipe, preset)
        self.limits: dict[int, int] = {}  # number of items that fit, by shape
        self.drawn = 0  # batches

    def draw(self, batch: Sequence[Job], wanted: Container[str]) -> None:
        """Draw a batch's ``wanted`` items with the others: bit for bit as in a full batch."""
        self.drawn += 1
        if self.drawn % _TRIM_EVERY == 0:
            trim_heap()
        # After a failure, items of that shape are not tried in such numbers again.
        size = self.limits.get(batch[0].shape, len(batch))
        if batch[0].item.edit_to is not None:
            size = 1  # the prompts of one edit are a batch already
        for start in range(0, len(batch), size):
            part = batch[start : start + size]
            if still := {job.item.id for job in part if job.item.id in wanted}:
                self._attempt(part, still)

    def _attempt(self, part: Sequence[Job], wanted: set[str]) -> None:
        try:
            drawn = self._edit(part[0]) if part[0].item.edit_to else self._run(part)
        except Exception as error:
            # Text only: the traceback itself would keep the memory in use.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            text, too_large = traceback.format_exc(), is_out_of_memory(error)
        else:
            for job, (image_run, edit_run) in zip(part, drawn, strict=True):
                if job.item.id in wanted:
                    self.store(job.item, image_run, edit_run)
            return
        if too_large:
            release_memory()
        # An item that fails alone has failed. With several it is unknown which one: try half as
        # many if memory was short, else each by itself.
        if len(part) == 1:
            self.fail(part[0].item, reason, text)
            return
        size = 1
        if too_large:
            size = self.limits[part[0].shape] = (len(part) + 1) // 2
            say(
                f"out of memory with {len(part)} items of {part[0].options}; from here on such "
                f"items run {size} together"
            )
        start = 0
        while start < len(part):
            fewer = part[start : start + size]
            if still := {job.item.id for job in fewer} & wanted:
                self._attempt(fewer, still)
            start += size
            size = min(size, self.limits.get(part[0].shape, size))  # it may have been reduced

    def _edit(self, job: Job) -> list[tuple[ImageRun, EditRun | None]]:
        item, options = job.item, dict(job.options)
        if item.negative_prompt is not None:
            options["negative_prompt"] = item.negative_prompt
        given: dict[str, Any] = {**item.edit, **options, "preset": self.preset}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = edit(self.pipe, item.prompt, item.text, seed=item.seed, **given)
        return [(run[1], run)]

    def _run(self, part: Sequence[Job]) -> list[tuple[ImageRun, EditRun | None]]:
        return [(image_run, None) for image_run in run_together(self.pipe, part, self.preset)]


class Writer:
    """Runs calls on its own threads, at most ``ahead`` waiting or running.

        with Writer(threads=4, ahead=16) as writer:
            writer.submit(store, item)     # waits while there are 16

    The first error of a call is raised by the next ``submit``, or on leaving; no call is started
    after it.
    """

    def __init__(self, threads: int, ahead: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="writer")
        self._free = threading.Semaphore(ahead)
        self._error: BaseException | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:
            self._check()

    def submit(self, call: Callable[..., None], *arguments: object) -> None:
        self._free.acquire()
        try:
            self._check()
            self._pool.submit(self._run, call, *arguments)
        except BaseException:
            self._free.release()
            raise

    def _run(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            if self._error is None:
                call(*arguments)
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._free.release()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def writer_for(batch: int) -> Writer:
    """Return a writer for batches of this size, on this process's share of the cores."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # If the system tells: the cores granted by a batch system, not all of the machine's.
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    threads = max(1, min(8, len(usable) // here - 1))
    return Writer(threads, ahead=2 * batch + threads)
