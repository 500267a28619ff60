"""Memory: how many items fit into one batch, and returning freed memory."""

import ctypes
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...files.terminal import counted, say
from ...maps.presets import Preset, preset_for
from ...models.facts import default_frames, default_size, makes_videos
from ...models.pipeline import Options, Pipeline
from ...models.reading import read_prompts
from ...runs.explaining import explain
from ...runs.run import Run
from ...runs.sampling import sample
from ..input.plan import Job

_MOST = 64
_WORTH = 0.95  # a larger batch must take at most this share of the time per item


def find_batch_size(pipe: Pipeline, jobs: Sequence[Job], preset: Preset, share: int) -> int:
    """Return the batch size, a power of two, that takes the least time per item.

    Two steps of the largest image of the ``jobs`` are drawn in ever larger batches until the memory
    is full, the time per item falls no more, or the batch exceeds a process's ``share`` of items.
    """
    most = min(_MOST, max(1, share))
    best, least, size = 1, float("inf"), 1
    preset = preset_for(pipe, preset)
    largest = _largest(pipe, jobs, preset)
    while largest is not None and size <= most:
        try:
            each = _time(pipe, largest, preset, size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        # Not quicker than half as many: larger batches only take more memory.
        if each > _WORTH * least:
            break
        best, least, size = size, each, 2 * size
    release_memory()
    say(f"{counted(best, 'item')} to a batch")
    return best


def _largest(pipe: Pipeline, jobs: Sequence[Job], preset: Preset) -> Job | None:
    """Return a job of the largest image or video that can be drawn alone, or None. One job per
    shape is tried, which also makes the first, slow call of the model."""
    usual = default_size(pipe)
    frames = default_frames(pipe) if makes_videos(pipe) else 1

    def pixels(options: Options) -> int:
        sides = options.get("height", usual[0]), options.get("width", usual[1])
        return int(math.prod(sides) * (options.get("num_frames") or frames))

    size = {job.shape: (pixels(job.options), job) for job in reversed(jobs)}
    for _, job in sorted(size.values(), key=lambda pair: -pair[0]):
        try:
            _time(pipe, job, preset, 1)
            return job
        except Exception:
            release_memory()
    return None


def _time(pipe: Pipeline, job: Job, preset: Preset, size: int) -> float:
    options, item = {**job.options, "num_inference_steps": 2}, replace(job.item, seed=0)
    job = replace(job, item=item, options=options if item.image is None else job.options)
    start = time.perf_counter()
    run_together(pipe, [job] * size, preset)
    return (time.perf_counter() - start) / size


def run_together(pipe: Pipeline, jobs: Sequence[Job], preset: Preset) -> Run:
    """Draw, or explain, jobs of one shape in one batch."""
    prompts, seeds = [job.item.prompt for job in jobs], [job.item.seed for job in jobs]
    images = [job.item.image.open() for job in jobs if job.item.image is not None]
    options = dict(jobs[0].options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about single items, whose rows list truncated words
        if images:
            return explain(pipe, images, prompts, seed=seeds, preset=preset, **options)
        if jobs[0].item.negative_prompt is not None:
            options["negative_prompt"] = [job.item.negative_prompt for job in jobs]
        return sample(pipe, read_prompts(pipe, prompts, **options), seeds, options, preset=preset)


def is_out_of_memory(error: Exception) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


def release_memory() -> None:
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def trim_heap() -> None:
    """Return freed memory to the system: glibc keeps it in gaps, ever more with many threads."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
