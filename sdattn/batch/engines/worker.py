"""A pipeline at work for a batch run, in any process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

from ...files.videos import best_format, preview, smaller
from ...loading.pipelines import load_pipeline
from ...maps.presets import preset_for
from ...maps.requirements import capture_settings, columns_of
from ...models.facts import makes_videos
from ...models.layers import find_denoiser
from ...models.pipeline import Pipeline
from ...runs.drawings import drawings
from ...runs.editrun import EditRun
from ...runs.folder import pack_with_page
from ...runs.imagerun import ImageRun
from ..input.items import BadLine, Item
from ..input.plan import Job, check_items, digest_model
from ..input.request import Request
from ..storage.folder import BatchFolder
from ..storage.locks import Ownership
from .drawing import BatchDrawer, writer_for
from .progress import Tally

_LOOKS = 8  # tries to see another machine's lock, before the disk counts as a separate one


class Loaded(NamedTuple):
    """Facts of a run's pipeline: a checksum of weights and configurations, its class, its dtype,
    its default preset, and the format in which this machine writes videos, if it makes any."""

    weights: str
    pipeline: str
    dtype: str
    preset: str
    video_format: str | None

    @classmethod
    def of(cls, pipe: Pipeline) -> Loaded:
        dtype = str(pipe.dtype).removeprefix("torch.")
        preset, videos = find_denoiser(pipe).family.preset, makes_videos(pipe)
        name, written = type(pipe).__name__, best_format() if videos else None
        return cls(digest_model(pipe), name, dtype, preset, written)


def load(request: Request, device: Any) -> Pipeline:
    loading = request.loading.arguments()
    pipe = load_pipeline(request.model, device=device, dtype=request.dtype, **loading)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def check(
    pipe: Pipeline, items: Iterable[Item], request: Request
) -> tuple[list[Job], list[BadLine]]:
    """Return the items that a pipeline, or its outline, can draw, and the bad ones; raise
    ValueError if the preset or options rule out all."""
    request.parts(videos=makes_videos(pipe))  # or refuse
    capture_settings(pipe, preset_for(pipe, request.preset), (), request.options)
    return check_items(pipe, items, request.options)


def of_words(item: Item, run: ImageRun) -> ImageRun:
    """Return an item's run with the maps of the requested words."""
    if item.words is None:
        return run
    return run.keep(columns_of(item.words, [run.heatmaps.prompt]))


def _beside_video(run: ImageRun, parts: Collection[str]) -> dict[str, bytes]:
    """Return a video's files for a gallery, none for an image: ``preview.webp``, and the overlays
    of its middle frame, on the scale of the whole video."""
    if run.video is None:
        return {}
    files = {"preview.webp": preview(run.video)} if "video" in parts else {}
    if "overlays" in parts:
        still = run.frame(run.video.middle)
        still = replace(still, image=smaller(still.image))
        maps = still.heatmaps.occurrences()
        files |= drawings(still, maps, still.heatmaps.prompt.text, ["overlays"])
    return files


def join_lock(lock: Ownership, job: str) -> bool:
    """Share the lock that the job's first process took; return False if it is not visible here."""
    for _ in range(_LOOKS):
        if lock.join(job):
            return True
        time.sleep(0.5)  # a shared disk or a storage may show another machine's writes late
    return False


class Worker:
    """Draws items into a run's open and claimed folder, under a name for this process's notes.

        with Worker(pipe, folder, name, request, size) as worker:
            worker.draw(batch, wanted)     # waits while many items are still to be written

    On leaving all of them are on the disk. ``size`` is the largest batch's.
    """

    def __init__(self, pipe: Pipeline, folder: BatchFolder, name: str, request: Request, size: int):
        self.folder, self.name, self.request = folder, name, request
        self.layout, self.tally = folder.layout, Tally(folder.storage)
        self.parts = request.parts(videos=makes_videos(pipe))
        self.writer = writer_for(size)
        self.drawer = BatchDrawer(pipe, request.preset, self._store, self._fail)
        self.wanted: Mapping[str, str] = {}

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            self.writer.__exit__(kind, *error)
            if kind is None:
                self.layout.flush()  # the items held back
        finally:
            self.folder.storage.close()  # the files are removed when they are gathered

    def draw(self, batch: Sequence[Job], wanted: Mapping[str, str]) -> None:
        self.wanted = wanted
        self.drawer.draw(batch, wanted)

    def _store(self, item: Item, run: ImageRun, edit: EditRun | None) -> None:
        self.writer.submit(self._write, item, self.wanted[item.id], run, edit)

    def _write(self, item: Item, fingerprint: str, run: ImageRun, edit: EditRun | None) -> None:
        try:
            run = of_words(item, run)
            settings = replace(run.settings, id=item.id, line=item.line, fingerprint=fingerprint)
            settings = replace(settings, list_columns=dict(item.columns) or None)
            run = replace(run, settings=settings)
            beside = edit.beside_target(self.parts) if edit else _beside_video(run, self.parts)
            packed = pack_with_page(run, self.parts, beside)
        except Exception as error:
            self._fail(item, f"{type(error).__name__}: {error}", traceback.format_exc())
            return
        note = partial(self.folder.note_whole, self.name, info=packed.info)
        self.layout.add(item.id, item.line, packed.files, note)

    def _fail(self, item: Item, reason: str, text: str) -> None:
        asked = {name: value for name, value in asdict(item).items() if name != "foreign"}
        self.folder.note_failed(self.name, asked, reason, text)
        most = self.request.max_errors
        if most is not None and self.tally.count("failed") >= most:
            self.folder.stop(f"{most} item(s) have failed, all that max_errors allows")
