"""One process's drawing: a batch at a time, halved where it does not fit, one item's failure never
another's."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ..maps.presets import Preset
from ..maps.requirements import columns_of
from ..models.reading import read_prompts
from ..runs.imagerun import ImageRun
from ..runs.packing import pack_run
from ..runs.run import Run
from ..runs.sampling import sample
from .folder import BatchFolder
from .items import Item
from .plan import Job
from .progress import Tally
from .sizing import is_out_of_memory, release_memory, trim_heap
from .writing import Writer

_TRIM_EVERY = 16  # batches


class Drawer:
    """Draws batches into a run's folder.

    Args:
        pipe: a loaded pipeline.
        folder: open and claimed.
        writer: whose threads encode and write.
        name: of this process, for what it notes in the folder.
        fingerprints: of each item, by id.
        preset: how the heatmaps are made.
        save: the parts of an item to keep.
        max_errors: stop the run once so many items have failed, of all processes.
    """

    def __init__(
        self,
        pipe: Any,
        folder: BatchFolder,
        writer: Writer,
        name: str,
        fingerprints: Mapping[str, str],
        preset: Preset,
        save: Collection[str],
        max_errors: int | None,
    ):
        self.pipe, self.folder, self.writer, self.name = pipe, folder, writer, name
        self.fingerprints, self.max_errors = fingerprints, max_errors
        self.preset, self.save = preset, save
        self.layout, self.tally = folder.layout, Tally(folder.hidden)
        self.limits: dict[int, int] = {}  # by shape: how many items fit
        self.drawn = 0  # batches

    def finish(self) -> None:
        """Write what is held back, once the writer has ended."""
        self.layout.flush()

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
            return sample(self.pipe, prompts, seeds, options, preset=self.preset)

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
            packed = pack_run(replace(run, settings=settings), self.save)
        except Exception as error:
            self._fail(item, f"{type(error).__name__}: {error}", traceback.format_exc())
            return
        whole = partial(self.folder.note_whole, self.name, info=packed.info)
        self.layout.add(item.id, item.line, packed.files, whole)

    def _fail(self, item: Item, reason: str, text: str) -> None:
        row = {**asdict(item), "reason": reason, "traceback": text}
        self.folder.note("failed", self.name, row)
        if self.max_errors is not None and self.tally.count("failed") >= self.max_errors:
            self.folder.stop(f"{self.max_errors} item(s) have failed, which is --max-errors")
