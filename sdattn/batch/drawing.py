"""Drawing a shard's items with a loaded pipeline, a batch at a time."""

from __future__ import annotations

import ctypes
import traceback
import warnings
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..edit.editing import edit
from ..errors import RunError
from ..files.terminal import say
from ..maps.details import Details
from ..maps.presets import Preset, preset_for
from ..models.pipeline import Pipeline
from ..runs.editrun import EditRun
from ..runs.explaining import explain
from ..runs.generation import generate
from ..runs.imagerun import ImageRun
from ..runs.preparing import prepare
from ..runs.run import Run
from ..runs.sampling import sample
from .checks import Job


class DeviceLostError(RunError):
    """A device that answers no call of this process any more, whatever is drawn."""


class BatchDrawer:
    """Draws batches of one shape; a batch that does not fit into memory is halved, and an item's
    failure does not affect others. OSError is no item's, and raises.

    ``store`` is called with each job, the run of its image and, for an edit, the edit; ``fail``
    with each that could not be drawn, the reason in one line, and the traceback.
    """

    def __init__(
        self,
        pipe: Pipeline,
        preset: str | Preset,
        store: Callable[[Job, ImageRun, EditRun | None], None],
        fail: Callable[[Job, str, str], None],
    ):
        self.pipe = pipe
        self.store = store
        self.fail = fail
        self.preset = preset_for(pipe, preset)
        self.limit: int | None = None  # items that fit; None: as many as a batch has

    def draw(self, batch: Sequence[Job], needed: Container[str]) -> None:
        """Draw a batch's ``needed`` items with the others: bit for bit as in a full batch."""
        size = 1 if batch[0].is_alone else min(self.limit or len(batch), len(batch))
        for start in range(0, len(batch), size):
            self._attempt(batch[start : start + size], needed)

    def _attempt(self, part: Sequence[Job], needed: Container[str]) -> None:
        if not any(job.item.id in needed for job in part):
            return
        from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

        try:
            drawn = self._draw_together(part)
        except OSError:  # a disk or a storage, whatever is drawn
            raise
        except Exception as error:
            # Text only: the traceback itself would keep the memory in use.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            text = traceback.format_exc()
            too_large = isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)
            check_device(self.pipe.device)
        else:
            for job, (image_run, edit_run) in zip(part, drawn, strict=True):
                if job.item.id in needed:
                    self.store(job, image_run, edit_run)
            return
        if too_large:
            clear_device_cache(garbage_collection=True)
        if len(part) > 1:
            self._attempt_fewer(part, needed, halved=too_large)
        elif part[0].item.id in needed:
            self.fail(part[0], reason, text)

    def _attempt_fewer(self, part: Sequence[Job], needed: Container[str], *, halved: bool) -> None:
        """Try a batch again that failed: half as many if memory was short, else each by itself, as
        it is unknown whose fault it was."""
        size = 1
        if halved:
            size = self.limit = (len(part) + 1) // 2
            say(
                f"out of memory with {len(part)} items of {part[0].options}; trying {size} together"
            )
        start = 0
        while start < len(part):
            self._attempt(part[start : start + size], needed)
            start += size
            size = min(size, self.limit or size)  # it may have been halved again

    def _draw_together(self, part: Sequence[Job]) -> list[tuple[ImageRun, EditRun | None]]:
        """Draw, edit or explain jobs of one shape in one batch."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about single items, whose rows list truncated words
            item = part[0].item
            if item.edit_to is not None:
                options: dict[str, Any] = {**item.edit, **part[0].options, "preset": self.preset}
                if item.negative_prompt is not None:
                    options["negative_prompt"] = item.negative_prompt
                run = edit(self.pipe, item.prompt, item.text, seed=item.seed, **options)
                return [(run[1], run)]
            if part[0].is_alone:
                return [(self._best_of(part[0]), None)]
            return [(image_run, None) for image_run in self._run(part)]

    def _best_of(self, job: Job) -> ImageRun:
        """Draw an item from the best of its seeds; as of other items, no single steps are kept."""
        options: dict[str, Any] = {**job.options, "preset": self.preset, "words": job.item.words}
        if job.item.negative_prompt is not None:
            options["negative_prompt"] = job.item.negative_prompt
        [run] = generate(self.pipe, job.item.prompt, seed=job.item.seed, **options)
        return replace(run, details=Details())

    def _run(self, jobs: Sequence[Job]) -> Run:
        pipe = self.pipe
        options = dict(jobs[0].options)
        prompts = [job.item.prompt for job in jobs]
        seeds = [job.item.seed for job in jobs]
        if images := [job.item.image.open() for job in jobs if job.item.image is not None]:
            return explain(pipe, images, prompts, seed=seeds, preset=self.preset, **options)
        if jobs[0].item.negative_prompt is not None:
            options["negative_prompt"] = [job.item.negative_prompt for job in jobs]
        return sample(prepare(pipe, prompts, options, seed=seeds, preset=self.preset, videos=True))


def check_device(device: torch.device) -> None:
    """Raise DeviceLostError if a device no longer answers: after an illegal access or a fault of
    the hardware, each later call of CUDA in the process fails, too."""
    if device.type == "cpu":
        return
    try:
        torch.ones(1, device=device).item()
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise DeviceLostError(
            f"{device} no longer answers: {said} Finished shards stay; the same command does the "
            "rest."
        ) from error


def trim_heap() -> None:
    """Return freed memory to the system: glibc keeps it in gaps, ever more with many threads."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
