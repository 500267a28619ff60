"""`run_batch`: the plan of an input, an engine that draws its missing shards, and the end."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from ..errors import AccessError, InvalidValueError, RunError
from ..files.place import Files, Place
from ..files.records import plain
from ..files.terminal import counted, say, shorter
from ..files.version import versions
from ..files.writing import sha256
from ..loading.devices import checked_device
from ..loading.digests import digest
from ..maps.presets import preset_for, preset_of
from ..maps.requirements import capture_settings
from ..models.facts import makes_videos
from ..runs.editrun import EditRun
from ..runs.imagerun import ImageRun
from ..runs.info import FORMAT as RUN_FORMAT
from .checking import remove_litter, write_summaries
from .checks import Job
from .drawing import BatchDrawer
from .engines import Engine, ThisProcess, engine_for, map_shards, worker_devices
from .formats import format_of
from .plan import Plan, make_plan
from .progress import Progress
from .records import (
    BatchInput,
    BatchSettings,
    Manifest,
    ShardRecord,
    read_manifest,
    records_there,
    remove_record,
    sound_record,
)
from .request import STOPS, Outcome, Request, part_of_environment
from .shard import Loaded, forget_pipeline, is_done, load, pack_item

# Settings that determine the items' files
_DECISIVE = ["weights", "dtype", "save", "preset", "batch_size", "edits", "photos"]
_DECISIVE += ["video_format", "mask_words", "mask_threshold"]
_COMPARED = [name for name in _DECISIVE if name != "edits"]  # the input's digest tells those
_COMPARED += ["pipeline", "options", "format", "shard_items"]
# Seconds in which a signal that comes again is the same one: a launcher may repeat what its
# processes already got; a terminal does not, and a hand is slower.
_ECHO = 3.0
_HAND = 0.1


def run_batch(request: Request) -> Outcome:
    """Draw every item of an input that the folder does not hold yet.

    The same call again does only what is missing, also at the same time, and on another machine
    that sees the folder.

    Raises:
        ValueError: an invalid request, an input without an item or (``strict``) with bad lines, or
            a folder that another input, model or setting made.
        OSError: the folder cannot be written; finished shards stay.
    """
    request.check()
    place = Place(request.out)
    if request.engine == "ray":  # its workers may start elsewhere
        request = replace(request, out=str(place.root))
    with _planned(request) as plan:
        place.begin()
        engine = engine_for(request)
        try:
            manifest = manifest_of(request, engine.describe(), plan)
            claim(place, manifest, plan, force=request.force)
            outcome = _draw_missing(request, place, manifest, plan, engine)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise AccessError(
                f"{str(error).rstrip('.')}. Finished shards stay in {place.root}; once this is "
                "fixed, the same command does the rest."
            ) from error
        finally:
            engine.close()
    return outcome


class Forecast(NamedTuple):
    """The size of a run, before it is drawn.

    Attributes:
        items, bad_lines, shards: numbers for the whole input, or up to the request's ``limit``.
        files: approximate number of files.
        seconds: time that one worker of this machine would take; None for Ray.
        nbytes: approximate bytes of all files; None for Ray.
    """

    items: int
    bad_lines: int
    shards: int
    files: int
    seconds: float | None
    nbytes: int | None


def forecast(request: Request) -> Forecast:
    """Draw the first batch of an input, into memory alone, and say how much all of it would be.

    Raises as :func:`run_batch`, and RuntimeError if an item of that batch cannot be drawn.
    """
    request.check()
    with _planned(request) as plan:
        shards = plan.first_shards(request.limit)
        items = sum(map(plan.shard_size, range(shards)))
        files = (2 if request.format == "folder" else 3) * shards + 4
        if request.engine == "ray":
            return Forecast(items, plan.bad_lines, shards, files, None, None)
        engine = ThisProcess(request)
        try:
            seconds, packed = _draw_first(engine.request, plan)
        finally:
            engine.close()
        share = items / len(packed)
        if request.format == "folder":
            files += round(share * sum(map(len, packed)))
        nbytes = round(share * sum(sum(map(len, item.values())) for item in packed))
        return Forecast(items, plan.bad_lines, shards, files, share * seconds, nbytes)


def _draw_first(request: Request, plan: Plan) -> tuple[float, list[Files]]:
    """Draw the first batch; return the seconds that it takes, and its items' files."""
    pipe = load(request).pipe
    jobs = plan.shard(0).jobs[: request.batch_of(videos=makes_videos(pipe))]
    packed: list[Files] = []

    def keep(job: Job, run: ImageRun, edit: EditRun | None) -> None:
        parts = request.parts(videos=run.video is not None)
        packed.append(pack_item(parts, request.masks, job, run, edit).files)

    def fail(job: Job, reason: str, _: str) -> None:
        raise RunError(f"{job.item.id}, {job.item.prompt!r}, cannot be drawn: {reason}")

    drawer = BatchDrawer(pipe, request.preset, keep, fail)
    seconds = 0.0
    for _ in range(2):  # the first makes the model's slow first call
        packed.clear()
        start = time.perf_counter()
        drawer.draw(jobs, {job.item.id for job in jobs})
        seconds = time.perf_counter() - start
    return seconds, packed


# Before the first image


@contextmanager
def _planned(request: Request) -> Iterator[Plan]:
    """Yield the plan of a request's input; report its bad lines, and refuse it if none is good."""
    if request.engine == "local":
        request.loading.check(request.model, checked_device(request.device))
        here = replace(request, device=worker_devices(request)[0])
    else:  # Ray's workers have other devices and packages
        loading = replace(request.loading, quantization=None, offload=None)
        here = replace(request, device="cpu", loading=loading)
    threads = torch.get_num_threads()  # a small model runs in one
    try:
        pipe = load(here).pipe
        request.parts(videos=makes_videos(pipe))  # or refuse
        capture_settings(pipe, preset_for(pipe, request.preset), (), request.options)
        with Progress(None, is_shown=request.progress) as progress:

            def tell(lines: int, good: int, bad: int) -> None:
                progress.whole = good
                progress.failed = bad

            plan = make_plan(request, pipe, tell)
        with plan:
            _report(plan, request)
            yield plan
    finally:
        forget_pipeline()
        torch.set_num_threads(threads)


def _report(plan: Plan, request: Request) -> None:
    is_of_photos = request.photos is not None
    source = request.photos if is_of_photos else request.source
    noun = "photo" if is_of_photos else "line"
    use = "explained" if is_of_photos else "drawn"
    reasons = {line.reason for line in plan.bad}
    if plan.bad_lines > 1 and not plan.items and len(reasons) == 1:  # an option for all, mostly
        raise InvalidValueError(f"None of {plan.bad_lines} {noun}s can be {use}: {reasons.pop()}")
    for line in plan.bad:
        say(f"{noun} {line.line}: {line.reason}")
    if (more := plan.bad_lines - len(plan.bad)) > 0:
        say(f"and {counted(more, f'more {noun}')}, see bad_lines.jsonl in the run's folder")
    if not plan.items:
        raise InvalidValueError(f"{source} has no {noun} that can be {use}.")
    if plan.bad_lines and request.strict:
        raise InvalidValueError(
            f"{plan.bad_lines} {noun}(s) of {source} cannot be {use}, the first is {noun} "
            f"{plan.bad[0].line}. Nothing was drawn, as `strict=True` asks."
        )


def manifest_of(request: Request, loaded: Loaded, plan: Plan) -> Manifest:
    """Return the ``batch.json`` of a run."""
    known = loaded._asdict()
    preset = preset_of(request.preset, default=known.pop("preset"))
    videos = loaded.video_format is not None
    settings = BatchSettings(
        model=str(request.model),
        loading=request.loading or None,
        **known,
        save=sorted(request.parts(videos=videos)),
        preset=plain(preset.to_json()),  # comparable with a batch.json's
        options=plain(request.options),
        format=request.format,
        batch_size=request.batch_of(videos=videos),
        shard_items=request.shard_items,
        edits=plan.has_edits,
        photos=request.photos is not None,
        mask_words=None if request.mask_words is None else list(request.mask_words),
        mask_threshold=request.mask_threshold,
        fingerprint="",  # of the rest
    )
    decisive = [RUN_FORMAT, *(getattr(settings, name) for name in _DECISIVE)]
    bad = plan.bad_file.read_bytes() if plan.bad_lines else None
    made_of = BatchInput(
        source=str(request.source if request.photos is None else request.photos),
        digest=plan.digest,
        items=plan.items,
        shards=[],  # from the settings' fingerprint
        bad_lines=plan.bad_lines,
        bad_lines_sha256=None if bad is None else sha256(bad),
        columns=plan.columns,
    )
    settings = replace(settings, fingerprint=digest(decisive))
    shards = [digest([settings.fingerprint, one]) for one in plan.digests()]
    made_of = replace(made_of, shards=shards)
    return Manifest(settings=settings, input=made_of, versions=versions())


def claim(place: Place, manifest: Manifest, plan: Plan, *, force: bool) -> None:
    """Make a folder this run's. If another input, model or setting made it, also at the same time,
    raise ValueError; with ``force`` change it: shards that differ have other fingerprints and are
    drawn again."""
    if not place.create("batch.json", manifest.sealed()):
        if not force:
            advice = "Choose another `folder`, or pass `force=True` to draw again what differs."
            check_claimed(place, manifest, advice)
        old = read_manifest(place)
        if replace(old, versions=manifest.versions) != manifest:
            for number in range(len(plan), len(old.input.shards)):
                remove_record(place, number)
            place.publish("batch.json", manifest.sealed())
    check_claimed(place, manifest)
    if plan.bad_lines:
        place.publish("bad_lines.jsonl", plan.bad_file.read_bytes())
    else:
        place.remove("bad_lines.jsonl")


_MEANWHILE = "Another command has changed it meanwhile. Let one end before the other begins."


def check_claimed(place: Place, manifest: Manifest, advice: str = _MEANWHILE) -> None:
    """Raise ValueError if a folder's ``batch.json`` is of another input, model or setting."""
    if differences := _differences(read_manifest(place), manifest):
        raise InvalidValueError(
            f"{place.root} belongs to another run: {'; '.join(differences)}. {advice}"
        )


def _differences(before: Manifest, now: Manifest) -> list[str]:
    """Return the differences from the run that made a folder, a phrase each."""
    found = []
    for name in _COMPARED:
        old = getattr(before.settings, name)
        new = getattr(now.settings, name)
        if old != new:
            what = "the model's weights or configuration" if name == "weights" else name
            found.append(f"{what} {_short(old)} is now {_short(new)}")
    if before.input.digest != now.input.digest:
        numbers = f"{before.input.items} items, now {now.input.items}"
        if before.input.items == now.input.items:
            numbers = f"{now.input.items} items as before, but other texts, seeds or options"
        found.append(f"the input is another one ({before.input.source}: {numbers})")
    return found


def _short(value: object) -> str:
    if value is None:
        return "the default"
    return shorter(", ".join(map(str, value)) if isinstance(value, list) else str(value), 60)


# Drawing


def _draw_missing(
    request: Request, place: Place, manifest: Manifest, plan: Plan, engine: Engine
) -> Outcome:
    which, of = _part(request)
    numbers = range(which - 1, plan.first_shards(request.limit), of)
    found = _done(place, manifest, numbers)
    again = {n for n, record in found.items() if record.failed} if request.retry_failed else set()
    missing = [number for number in numbers if number not in found or number in again]
    items = sum(plan.shard_size(number) for number in numbers)
    before = sum(len(record.whole) for record in found.values())
    kept = [record for number, record in found.items() if number not in again]
    whole = sum(len(record.whole) for record in kept)
    failed = sum(len(record.failed) for record in kept)
    # Two commands that begin at different places seldom draw the same shard.
    first = random.randrange(len(missing)) if missing else 0
    shards = map(plan.shard, missing[first:] + missing[:first])
    with _Stops() as stops, Progress(items, whole, is_shown=request.progress) as progress:
        for record in map_shards(engine, manifest, shards, progress.add, stops.is_set):
            whole += len(record.whole)
            failed += len(record.failed)
            if request.max_errors is not None and failed >= request.max_errors:
                stops.set(f"{failed} item(s) have failed, as many as `max_errors` allows")
        seconds = progress.seconds
    check_claimed(place, manifest)
    # Each part looks after its own last record, so the last one to end finds no shard missing.
    left = len(plan) - len(records_there(place, manifest))
    if of > 1 and left:
        say(
            f"shards that are not drawn yet: {left:,}. The last part to end writes metadata.jsonl, "
            "errors.jsonl and index.html"
        )
    else:
        remove_litter(place, manifest)
        write_summaries(place, manifest)
    return Outcome(items, before, whole, failed, plan.bad_lines, stops.reason, seconds)


def _part(request: Request) -> tuple[int, int]:
    if request.part is not None:
        return request.part
    if (found := part_of_environment()) is None:
        return 1, 1
    say(f"part {found[0]} of {found[1]}, as the launcher's variables say")
    return found


def _done(place: Place, manifest: Manifest, numbers: range) -> dict[int, ShardRecord]:
    """Return the records of the shards that are done, with their data where they name it."""
    format = format_of(place, manifest)

    def look(number: int) -> ShardRecord | None:
        record = sound_record(place, number, manifest.input.shards[number])
        return record if is_done(format, record) else None

    with ThreadPoolExecutor(16) as pool:
        records = zip(numbers, pool.map(look, numbers), strict=True)
        return {number: record for number, record in records if record is not None}


def _is_launched() -> bool:
    return not {"LOCAL_RANK", "SLURM_JOB_ID"}.isdisjoint(os.environ)


class _Stops:
    """Hears, inside its block, the first SIGINT or SIGTERM, and any other reason to stop; another
    signal ends the process, under a launcher some seconds later."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._first = math.inf
        self._before: dict[int, object] = {}

    def is_set(self) -> bool:
        return self.reason is not None

    def set(self, reason: str) -> None:
        self.reason = self.reason or reason

    def __enter__(self) -> _Stops:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in STOPS):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _hear(self, number: int, _: object) -> None:
        name = signal.Signals(number).name
        if self.reason is None:
            self._first = time.monotonic()
            self.set(name)
            say(f"{name}: finishing the shards in hand; once more ends at once")
        elif time.monotonic() - self._first > (_ECHO if _is_launched() else _HAND):
            signal.signal(number, signal.SIG_DFL)  # a kill does no harm, and threads do not hear
            signal.raise_signal(number)
