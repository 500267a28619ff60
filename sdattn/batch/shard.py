"""`draw_shard`: a pure function from a shard of the input to its files and its record.

Its bytes depend on the input and the settings alone. So it may run anywhere, twice, or at the same
time as itself, and nobody has to say who draws what.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard

from ..files.place import Files, Place
from ..files.videos import best_format, preview, smaller
from ..files.writing import sha256
from ..loading.devices import limit_threads
from ..loading.digests import digest, digest_model
from ..loading.pipelines import load_pipeline
from ..maps.masks import MaskSettings
from ..maps.requirements import columns_of
from ..models.layers import find_denoiser
from ..models.pipeline import Pipeline
from ..models.sizes import makes_videos
from ..runs.drawings import drawings
from ..runs.editrun import EditRun
from ..runs.folder import pack_with_page
from ..runs.imagerun import ImageRun
from ..runs.info import read_info
from ..runs.packing import Packed, heatmaps_from
from ..runs.unpacking import open_png, unpack_run
from .checks import Job
from .drawing import BatchDrawer, trim_heap
from .formats import RUN, Format, format_of, whole_items
from .gallery.sheets import Tile, make_sheet, tile, tile_of_images
from .items import Item
from .plan import Shard
from .records import (
    Manifest,
    ShardFile,
    ShardRecord,
    record_name,
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


@dataclass
class _Cached:
    request: tuple[object, ...]
    pipe: Pipeline
    loaded: Loaded
    lock: threading.Lock


_cached: list[_Cached] = []  # at most one
_loading = threading.Lock()


def load(request: Request) -> tuple[Pipeline, threading.Lock]:
    """Return this process's pipeline, loaded once, and the lock of whoever draws with it."""
    cached = _load(request)
    return cached.pipe, cached.lock


def describe(request: Request) -> Loaded:
    """Return what a run's pipeline is, from the one that this process draws with."""
    return _load(request).loaded


def forget_pipeline() -> None:
    _cached.clear()


def _load(request: Request) -> _Cached:
    key = request.model, str(request.device), str(request.dtype), repr(request.loading)
    with _loading:
        if not _cached or _cached[0].request != key:
            _cached.clear()
            arguments = request.loading.arguments()
            device, dtype = request.device, request.dtype
            pipe = load_pipeline(request.model, device=device, dtype=dtype, **arguments)
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


def shard_fingerprint(manifest: Manifest, shard_digest: str) -> str:
    return digest([manifest.settings.fingerprint, shard_digest])


def is_done(format: Format, record: ShardRecord | None, fingerprint: str) -> TypeGuard[ShardRecord]:
    """Check that a record is of this run, and its data where it says."""
    return record is not None and record.fingerprint == fingerprint and format.is_there(record)


def draw_shard(
    request: Request, manifest: Manifest, shard: Shard, fingerprint: str, tell: Tell | None = None
) -> ShardRecord:
    """Draw a shard's items, publish them and then the shard's record, which is returned.

    Whole items that an earlier attempt left are kept. An item that cannot be drawn becomes a failed
    row; only a disk or a storage that fails raises, OSError.
    """
    place = Place(request.out)
    format = format_of(place, manifest)
    found = sound_record(place, shard.number)
    if is_done(format, found, fingerprint) and not (request.retry_failed and found.failed):
        return found  # another command drew it meanwhile
    # An item's bytes depend a little on the others of its batch, so on all of the shard.
    expected = {job.item.id: digest([fingerprint, job.item.id]) for job in shard.jobs}
    packer = _Packer(request, manifest, expected)
    kept = whole_items(format, shard.number, found, expected) if packer.can_read_back else {}
    missing = expected.keys() - kept.keys()
    with format.writer(shard.number) as writer, ThreadPoolExecutor(_threads()) as pool:
        packed = _InOrder(shard.jobs, writer.add, tell or (lambda whole, failed: None))
        for item, files in kept.items():
            packed.put(item, pool.submit(packer.again, item, files))
        if missing:
            pipe, lock = load(request)
            drawer = BatchDrawer(
                pipe,
                request.preset,
                lambda job, run, edit: packed.put(
                    job.item.id, pool.submit(packer.pack, job, run, edit)
                ),
                lambda job, reason, text: packed.put(job.item.id, _Failure(reason, text)),
            )
            size = manifest.settings.batch_size
            for start in range(0, len(shard.jobs), size):
                with lock:
                    drawer.draw(shard.jobs[start : start + size], missing)
                packed.write(at_most=2 * size)
        packed.write(at_most=0)
        data, locations = writer.finish()
    trim_heap()
    return _publish_record(place, shard, fingerprint, packed, data, locations)


def _publish_record(
    place: Place,
    shard: Shard,
    fingerprint: str,
    packed: _InOrder,
    data: ShardFile | None,
    locations: Mapping[str, str],
) -> ShardRecord:
    tiles = [held.tile if isinstance(held, _Packed) else None for held in packed.done]
    sheet = None
    image, thumbs = make_sheet(tiles)
    if image:
        checksum = sha256(image)
        sheet = ShardFile(f"shards/{shard.number:06d}-{checksum[:6]}.webp", len(image), checksum)
        place.publish(sheet.name, image)
    rows = []
    for job, held, thumb in zip(shard.jobs, packed.done, thumbs, strict=True):
        if isinstance(held, _Packed):
            location = locations[job.item.id]
            rows.append({**row_of(held.info, location, held.checksum, held.sizes), "thumb": thumb})
        else:
            rows.append(failed_row(job.item, held.reason, held.traceback))
    record = ShardRecord(shard.number, fingerprint, data, sheet, rows)
    place.publish(record_name(shard.number), record.packed())
    return record


def failed_row(item: Item, reason: str, text: str = "") -> dict[str, Any]:
    row = {"id": item.id, "line": item.line, "prompt": item.prompt, "seed": item.seed}
    return {**row, "failed": reason, "traceback": text}


def record_failure(request: Request, shard: Shard, fingerprint: str, reason: str) -> ShardRecord:
    """Publish the record of a shard whose items all failed, since no worker lived to draw it."""
    rows = [failed_row(job.item, reason) for job in shard.jobs]
    record = ShardRecord(shard.number, fingerprint, None, None, rows)
    Place(request.out).publish(record_name(shard.number), record.packed())
    return record


# Packing


@dataclass(frozen=True)
class _Failure:
    reason: str
    traceback: str


@dataclass
class _Packed:
    """An item's files, which are let go once written, and what its row needs."""

    files: Files
    info: Any
    checksum: str
    sizes: dict[str, int]
    tile: Tile | None

    @classmethod
    def of(cls, files: Files, info: Any, tile: Tile | None) -> _Packed:
        sizes = {name: len(data) for name, data in files.items()}
        return cls(files, info, sha256(files[RUN]), sizes, tile)


class _Packer:
    """Makes items' files, in any thread."""

    def __init__(self, request: Request, manifest: Manifest, expected: Mapping[str, str]):
        self.masks, self.expected = request.masks, expected
        self.parts = manifest.settings.save
        # What an item that is read back shows, too.
        self.shown = [part for part in self.parts if part in ("image", "video", "maps")]

    def pack(self, job: Job, run: ImageRun, edit: EditRun | None) -> _Packed:
        run = of_words(job.item, run)
        packed = pack_item(job, run, edit, self.parts, self.masks, self.expected[job.item.id])
        maps = heatmaps_from(run.layers.as_saved(), run.heatmaps.prompt, run.heatmaps.preset)
        source = None if edit is None else edit.images[0]
        seen = tile(replace(run, heatmaps=maps), self.shown, self.masks, source)
        return _Packed.of(packed.files, packed.info, seen)

    def again(self, item: str, files: Files) -> _Packed:
        """Return an item that an earlier attempt packed."""
        source = None if "source.png" not in files else open_png(files["source.png"], item)
        if "maps" in self.parts:
            seen = tile(unpack_run(files, item), self.shown, self.masks, source)
        else:
            image = None if "image.png" not in files else open_png(files["image.png"], item)
            seen = tile_of_images(image, source)
        return _Packed.of(files, read_info(files, item), seen)

    @property
    def can_read_back(self) -> bool:
        """Check whether what an item shows can be had from its files."""
        return "maps" not in self.parts or not {"image", "video"}.isdisjoint(self.parts)


class _InOrder:
    """Packed items and failures, written in the order of their shard as soon as that allows."""

    def __init__(self, jobs: Sequence[Job], add: Callable[[str, Files], None], tell: Tell):
        self.waiting = deque(job.item.id for job in jobs)
        self.found: dict[str, Future[_Packed] | _Failure] = {}
        self.add, self.tell = add, tell
        self.done: list[_Packed | _Failure] = []

    def put(self, item: str, found: Future[_Packed] | _Failure) -> None:
        self.found[item] = found

    def write(self, at_most: int) -> None:
        """Write items until only so many wait."""
        while len(self.found) > at_most and self.waiting and self.waiting[0] in self.found:
            item = self.waiting.popleft()
            held = _result(self.found.pop(item))
            if isinstance(held, _Packed):
                self.add(item, held.files)
                held.files = {}
            self.done.append(held)
            self.tell(int(isinstance(held, _Packed)), int(isinstance(held, _Failure)))


def _result(found: Future[_Packed] | _Failure) -> _Packed | _Failure:
    if isinstance(found, _Failure):
        return found
    try:
        return found.result()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return _Failure(reason, "".join(traceback.format_exception(error)))


def pack_item(
    job: Job,
    run: ImageRun,
    edit: EditRun | None,
    parts: Collection[str],
    masks: MaskSettings,
    fingerprint: str,
) -> Packed:
    """Return an item's files."""
    item, run = job.item, of_words(job.item, run)
    settings = replace(
        run.settings,
        id=item.id,
        line=item.line,
        fingerprint=fingerprint,
        list_columns=dict(item.columns) or None,
    )
    beside = edit.beside_target(parts) if edit else _beside_video(run, parts)
    return pack_with_page(replace(run, settings=settings), parts, beside, masks)


def _threads() -> int:
    """Return how many threads pack items: this process's share of the cores but one."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # If the system tells: the cores granted by a batch system, not all of the machine's.
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return max(1, min(8, len(usable) // here - 1))


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
