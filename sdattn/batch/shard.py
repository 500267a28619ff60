"""`draw_shard`: a pure function from a shard of the input to its files and its record.

Its bytes depend on the input and the settings alone. So it may run anywhere, twice, or at the same
time as itself, and nobody has to say who draws what.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ..errors import InvalidValueError
from ..files.place import Files, Place
from ..files.videos import best_format, preview, smaller
from ..files.writing import sha256
from ..loading.digests import digest, digest_model
from ..loading.pipelines import load_pipeline
from ..maps.masks import MaskSettings
from ..maps.requirements import columns_of
from ..models.denoiser import find_denoiser
from ..models.facts import makes_videos
from ..models.pipeline import Pipeline
from ..models.threads import limit_threads
from ..runs.drawings import drawings
from ..runs.editrun import EditRun
from ..runs.folder import pack_with_page
from ..runs.imagerun import ImageRun
from ..runs.info import RunInfo, read_info
from ..runs.parts import MAPS
from ..runs.unpacking import open_png, unpack_run
from .checks import Job
from .drawing import BatchDrawer, trim_heap
from .formats import RUN, Format, format_of, whole_items
from .gallery.sheets import Tile, make_sheet, tile, tile_of_images
from .items import Item
from .plan import Shard
from .records import (
    ItemRow,
    Manifest,
    ShardFile,
    ShardRecord,
    publish_record,
    row_of,
    sound_record,
)
from .request import Request

Tell = Callable[[int, int], None]  # items that are whole now, and that failed


class Loaded(NamedTuple):
    """Facts of a run's pipeline: a checksum of weights and configurations, its class, its dtype,
    its default preset, and the format in which this machine writes videos, if it makes any."""

    weights: str
    pipeline: str
    dtype: str
    preset: str
    video_format: str | None


class _Cached(NamedTuple):
    request: tuple[object, ...]
    pipe: Pipeline
    loaded: Loaded
    lock: threading.Lock  # of whoever draws with it


_cached: list[_Cached] = []  # at most one
_loading = threading.Lock()


def describe(request: Request) -> Loaded:
    """Return what a run's pipeline is, from the one that this process draws with."""
    return load(request).loaded


def forget_pipeline() -> None:
    _cached.clear()


def load(request: Request) -> _Cached:
    """Return this process's pipeline, loaded once."""
    key = request.model, str(request.device), str(request.dtype), repr(request.loading)
    with _loading:
        if not _cached or _cached[0].request != key:
            _cached.clear()
            arguments = request.loading.arguments()
            arguments |= {"device": request.device, "dtype": request.dtype}
            pipe = load_pipeline(request.model, **arguments)
            pipe.set_progress_bar_config(disable=True)
            limit_threads(pipe)
            loaded = Loaded(
                weights=digest_model(pipe),
                pipeline=type(pipe).__name__,
                dtype=str(pipe.dtype).removeprefix("torch."),
                preset=find_denoiser(pipe).family.preset,
                video_format=best_format() if makes_videos(pipe) else None,
            )
            _cached.append(_Cached(key, pipe, loaded, threading.Lock()))
        return _cached[0]


def is_done(format: Format, record: ShardRecord | None) -> bool:
    """Check that a shard has a record, and its data and thumbnails where that says."""
    if record is None or not format.is_there(record):
        return False
    return record.sheet is None or format.place.size(record.sheet.name) == record.sheet.bytes


def draw_shard(
    request: Request, manifest: Manifest, shard: Shard, tell: Tell | None = None
) -> ShardRecord:
    """Draw a shard's items, publish them and then the shard's record, which is returned.

    Whole items that an earlier attempt left are kept. An item that cannot be drawn becomes a failed
    row; only a disk or a storage that fails raises, OSError.
    """
    place = Place(request.out)
    format = format_of(place, manifest)
    fingerprint = manifest.input.shards[shard.number]
    found = sound_record(place, shard.number, fingerprint)
    is_drawn = is_done(format, found)
    if found is not None and is_drawn and not (request.retry_failed and found.failed):
        if tell is not None:
            tell(len(found.whole), len(found.failed))
        return found  # another command drew it meanwhile
    # An item's bytes depend a little on the others of its batch, so on all of the shard.
    expected = {job.item.id: digest([fingerprint, job.item.id]) for job in shard.jobs}
    kept = whole_items(format, shard.number, found, expected)
    missing = expected.keys() - kept.keys()
    save = manifest.settings.save
    with format.writer(shard.number) as writer, ThreadPoolExecutor(_threads()) as pool:
        packed = _InOrder(shard.jobs, writer.add, tell or (lambda whole, failed: None))
        for item, files in kept.items():
            packed.found[item] = pool.submit(_read_back, save, request.masks, files)

        def store(job: Job, run: ImageRun, edit: EditRun | None) -> None:
            key = expected[job.item.id]
            pack = partial(pack_item, save, request.masks, job, run, edit, fingerprint=key)
            packed.found[job.item.id] = pool.submit(pack)

        def fail(job: Job, reason: str, text: str) -> None:
            packed.found[job.item.id] = failed_row(job.item, reason, text)

        if missing:
            _check_same(describe(request), manifest)
            pipeline = load(request)
            drawer = BatchDrawer(pipeline.pipe, request.preset, store, fail)
            size = manifest.settings.batch_size
            for start in range(0, len(shard.jobs), size):
                with pipeline.lock:
                    drawer.draw(shard.jobs[start : start + size], missing)
                packed.write(at_most=2 * size)
        packed.write(at_most=0)
        data, locations = writer.finish()
    trim_heap()
    sheet, thumbs = _publish_sheet(place, shard.number, packed.done)
    rows = []
    for held, thumb in zip(packed.done, thumbs, strict=True):
        if isinstance(held, _Packed):
            row = row_of(held.info, locations[held.info.id or ""], held.checksum, held.sizes)
            rows.append({**row, "thumb": thumb})
        else:
            rows.append(held)
    record = ShardRecord(shard.number, fingerprint, data, sheet, rows)
    publish_record(place, record)
    return record


def _check_same(loaded: Loaded, manifest: Manifest) -> None:
    """Raise ValueError if this worker, perhaps on another machine, has another model than the run,
    or would write its videos in another format."""
    for name, value in loaded._asdict().items():
        known = getattr(manifest.settings, name) if name != "preset" else value
        if value != known:
            do = "Give all machines the same files."
            if name == "video_format":
                do = "Install PyAV on all machines, pip install 'sdattn[video]', or on none."
            raise InvalidValueError(
                f"A worker on {socket.gethostname()} has {name} {value}, the run {known}. {do}"
            )


def _publish_sheet(
    place: Place, number: int, items: Sequence[_Packed | ItemRow]
) -> tuple[ShardFile | None, Sequence[object]]:
    """Publish a shard's thumbnails, if any; return its file, and where each item's are in it."""
    image, thumbs = make_sheet([one.tile if isinstance(one, _Packed) else None for one in items])
    if not image:
        return None, thumbs
    checksum = sha256(image)
    sheet = ShardFile(f"shards/{number:06d}-{checksum[:6]}.webp", len(image), checksum)
    place.publish(sheet.name, image)
    return sheet, thumbs


def failed_row(item: Item, reason: str, text: str = "") -> ItemRow:
    row = {"id": item.id, "line": item.line, "prompt": item.prompt, "seed": item.seed}
    return {**row, "failed": reason, "traceback": text}


def record_failure(request: Request, manifest: Manifest, shard: Shard, reason: str) -> ShardRecord:
    """Publish the record of a shard whose items all failed, since no worker lived to draw it."""
    fingerprint = manifest.input.shards[shard.number]
    rows = [failed_row(job.item, reason) for job in shard.jobs]
    record = ShardRecord(shard.number, fingerprint, None, None, rows)
    publish_record(Place(request.out), record)
    return record


# Packing


class _Packed:
    """An item's files, which are let go once written, and what its row needs of them."""

    def __init__(self, files: Files, info: RunInfo, tile: Tile):
        self.files = files
        self.info = info
        self.tile = tile
        self.checksum = sha256(files[RUN])
        self.sizes = {name: len(data) for name, data in files.items()}


def pack_item(
    parts: Collection[str],
    masks: MaskSettings,
    job: Job,
    run: ImageRun,
    edit: EditRun | None,
    *,
    fingerprint: str = "",
) -> _Packed:
    """Return a drawn item's files, with the maps of the requested words, and its tile."""
    item = job.item
    if item.words is not None:
        run = run.keep(columns_of(item.words, [run.heatmaps.prompt]))
    settings = replace(
        run.settings,
        id=item.id,
        line=item.line,
        fingerprint=fingerprint,
        list_columns=dict(item.columns) or None,
    )
    beside = edit.beside_target(parts) if edit else _beside_video(run, parts)
    packed = pack_with_page(replace(run, settings=settings), parts, beside, masks)
    shown = _shown(parts) if "image.png" in packed.files else []
    source = edit[0].image if edit else None
    # as a reader gets them, so that an item that is kept and read back has the same thumbnails
    seen = tile(replace(run, heatmaps=packed.heatmaps), shown, masks, source)
    return _Packed(packed.files, packed.info, seen)


def _read_back(parts: Collection[str], masks: MaskSettings, files: Files) -> _Packed:
    """Return an item that an earlier attempt left."""
    names = ("image.png", "source.png")
    image, source = (open_png(files[n], n) if n in files else None for n in names)
    if image is not None and MAPS in files:
        seen = tile(unpack_run(files, "an item"), _shown(parts), masks, source)
    else:
        seen = tile_of_images(image, source)
    return _Packed(files, read_info(files, "an item"), seen)


def _shown(parts: Collection[str]) -> list[str]:
    return [part for part in parts if part in ("image", "video", "maps")]


class _InOrder:
    """Packed items and failed rows, written in the order of their shard as soon as that allows."""

    def __init__(self, jobs: Sequence[Job], add: Callable[[str, Files], None], tell: Tell):
        self.waiting = deque(job.item for job in jobs)
        self.found: dict[str, Future[_Packed] | ItemRow] = {}
        self.add = add
        self.tell = tell
        self.done: list[_Packed | ItemRow] = []

    def write(self, at_most: int) -> None:
        """Write items until only so many wait."""
        while len(self.found) > at_most and self.waiting and self.waiting[0].id in self.found:
            item = self.waiting.popleft()
            held = _made(item, self.found.pop(item.id))
            if isinstance(held, _Packed):
                self.add(item.id, held.files)
                held.files = {}
            self.done.append(held)
            self.tell(int(isinstance(held, _Packed)), int(not isinstance(held, _Packed)))


def _made(item: Item, found: Future[_Packed] | ItemRow) -> _Packed | ItemRow:
    if not isinstance(found, Future):
        return found
    try:
        return found.result()
    except OSError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return failed_row(item, reason, "".join(traceback.format_exception(error)))


def _threads() -> int:
    """Return how many threads pack items: this process's share of the cores but one."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # If the system tells: the cores granted by a batch system, not all of the machine's.
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return max(1, min(8, len(usable) // here - 1))


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
