"""One process's drawing: a batch at a time, halved where it does not fit, one item's failure never
another's; threads encode and write while the model runs."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ..maps.requirements import columns_of
from ..models.reading import read_prompts
from ..runs.folder import pack_with_page
from ..runs.imagerun import ImageRun
from ..runs.run import Run
from ..runs.sampling import sample
from .folder import BatchFolder
from .items import Item
from .plan import Job
from .progress import Tally
from .request import Request
from .sizing import is_out_of_memory, release_memory, trim_heap

_TRIM_EVERY = 16  # batches


class Drawer:
    """Draws batches into a run's folder.

    Args:
        pipe: a loaded pipeline.
        folder: open and claimed.
        writer: whose threads encode and write.
        name: of this process, for what it notes in the folder.
        fingerprints: of each item, by id.
        request: how the heatmaps are made, what of an item is kept, how many may fail.
    """

    def __init__(
        self,
        pipe: Any,
        folder: BatchFolder,
        writer: Writer,
        name: str,
        fingerprints: Mapping[str, str],
        request: Request,
    ):
        self.pipe, self.folder, self.writer, self.name = pipe, folder, writer, name
        self.fingerprints, self.request = fingerprints, request
        self.layout, self.tally = folder.layout, Tally(folder.hidden)
        self.limits: dict[int, int] = {}  # by shape: how many items fit
        self.drawn = 0  # batches

    def draw(self, batch: list[Job], missing: set[str]) -> None:
        """Draw a batch whole, also where some of it is there: the rest is then bit for bit what it
        would have been."""
        self.drawn += 1
        if self.drawn % _TRIM_EVERY == 0:
            trim_heap()
        size = self.limits.get(batch[0].shape, len(batch))
        for start in range(0, len(batch), size):
            part = batch[start : start + size]
            wanted = {job.item.id for job in part} & missing
            if wanted:
                self._attempt(part, wanted)

    def _attempt(self, part: list[Job], wanted: set[str]) -> None:
        try:
            run = self._sample(part)
        except Exception as error:
            # Text only: the traceback itself would keep what fills the memory.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            text, too_large = traceback.format_exc(), is_out_of_memory(error)
        else:
            self._store(part, wanted, run)
            return
        if too_large:
            release_memory()
        if len(part) == 1:
            self._fail(part[0].item, reason, text)
            return
        size = 1
        if too_large:
            size = self.limits[part[0].shape] = (len(part) + 1) // 2
            print(
                f"sdattn: out of memory with {len(part)} items of {part[0].options}; from here on "
                f"such items run {size} together",
                file=sys.stderr,
            )
        start = 0
        while start < len(part):
            fewer = part[start : start + size]
            if still := {job.item.id for job in fewer} & wanted:
                self._attempt(fewer, still)
            start += size
            size = min(size, self.limits.get(part[0].shape, size))  # it may have shrunk meanwhile

    def _sample(self, part: list[Job]) -> Run:
        options = dict(part[0].options)
        if part[0].item.negative_prompt is not None:
            options["negative_prompt"] = [job.item.negative_prompt for job in part]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one item each; its row tells what was cut off
            prompts = read_prompts(self.pipe, [job.item.prompt for job in part], **options)
            seeds = [job.item.seed for job in part]
            return sample(self.pipe, prompts, seeds, options, preset=self.request.preset)

    def _store(self, part: list[Job], wanted: set[str], run: Run) -> None:
        for job, image_run in zip(part, run, strict=True):
            if job.item.id in wanted:
                self.writer.submit(self._write, job.item, image_run)

    def _write(self, item: Item, run: ImageRun) -> None:
        """On a thread of the writer."""
        try:
            if item.words is not None:
                run = run.keep(columns_of(item.words, [run.heatmaps.prompt]))
            settings = replace(
                run.settings, id=item.id, line=item.line, fingerprint=self.fingerprints[item.id]
            )
            packed = pack_with_page(replace(run, settings=settings), self.request.save)
        except Exception as error:
            self._fail(item, f"{type(error).__name__}: {error}", traceback.format_exc())
            return
        note = partial(self.folder.note_whole, self.name, info=packed.info)
        self.layout.add(item.id, item.line, packed.files, note)

    def _fail(self, item: Item, reason: str, text: str) -> None:
        row = {**asdict(item), "reason": reason, "traceback": text}
        self.folder.journals.note("failed", self.name, row)
        most = self.request.max_errors
        if most is not None and self.tally.count("failed") >= most:
            self.folder.stop(f"{most} item(s) have failed, which is --max-errors")


class Writer:
    """Runs calls on threads of its own, at most ``ahead`` waiting or running.

        with Writer(threads=4, ahead=16) as writer:
            writer.submit(store, item)     # waits while there are 16

    The first error of a call is raised by the next ``submit``, or on leaving; nothing is begun
    after it.
    """

    def __init__(self, threads: int, ahead: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="writer")
        self._free = threading.Semaphore(ahead)
        self._error: BaseException | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:
            self._check()

    def submit(self, call: Callable[..., None], *arguments: Any) -> None:
        self._free.acquire()
        try:
            self._check()
            self._pool.submit(self._run, call, *arguments)
        except BaseException:
            self._free.release()
            raise

    def _run(self, call: Callable[..., None], *arguments: Any) -> None:
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
    """A writer for batches of so many items, on this process's share of the cores."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Where it can be asked: the cores that a batch system gave, not all that the machine has.
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    threads = max(1, min(8, len(usable) // here - 1))
    return Writer(threads, ahead=2 * batch + threads)
