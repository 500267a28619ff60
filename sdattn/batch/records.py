"""``batch.json`` and the shards' records: what a run is, and what of it is done.

A shard is done when its record is there. ``shards/000012.jsonl`` has a head that names the shard's
files, a row for each item, and a seal, the checksum of the lines above it. Nothing in a record
depends on time or machine: the same shard, drawn again, has the same record.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from typing_extensions import TypedDict

from ..errors import InvalidValueError, MissingFileError
from ..files.place import File, Place
from ..files.records import (
    Record,
    RecordError,
    check_object,
    from_json,
    read_document,
    read_sealed,
    sealed,
)
from ..files.records import read_record as read_entries
from ..files.writing import sha256
from ..loading.options import LoadingOptions
from ..runs.info import RunInfo

FORMAT = "sdattn-batch-5"
LOST = "Draw the run again into another `folder`."
_SEAL = "digest"
ItemRow = dict[str, Any]  # of a record: an item, whole or failed
_AT_ONCE = 16  # records read together: in a bucket each is a request


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Record):
    """Settings common to all items of a run.

    Attributes:
        weights: a checksum of the model's weights and configurations, including LoRAs.
        format: one of :data:`sdattn.batch.formats.FORMATS`.
        batch_size: items drawn together.
        shard_items: items of a full shard; None: by its number.
        edits, photos: some items are edits; all of them are photos to explain.
        video_format: ``"mp4"`` or ``"webp"``; None for images.
        fingerprint: differs for settings that give different files.
    """

    model: str
    weights: str
    pipeline: str
    dtype: str
    save: list[str]
    preset: dict[str, Any]
    options: dict[str, Any]
    format: str
    batch_size: int
    shard_items: int | None = None
    edits: bool = False
    photos: bool = False
    loading: LoadingOptions | None = None
    video_format: str | None = None
    mask_words: list[str] | None = None
    mask_threshold: float | str | None = None
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class BatchInput(Record):
    """The input of a run.

    Attributes:
        digest: a checksum of all its items.
        items: items that can be drawn.
        shards: each shard's fingerprint, a checksum of its items and the settings, which its record
            carries too.
        bad_lines: lines that cannot, and the checksum of ``bad_lines.jsonl``, which lists them.
        columns: further columns of the list that the rows have; None if none were kept.
    """

    source: str
    digest: str
    items: int
    shards: list[str]
    bad_lines: int
    bad_lines_sha256: str | None = None
    columns: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """``batch.json``, with a checksum of its own."""

    settings: BatchSettings
    input: BatchInput
    versions: dict[str, str]

    def sealed(self) -> bytes:
        return sealed({"format": FORMAT, **self.to_json()}, _SEAL)


def read_manifest(place: Place) -> Manifest:
    """Read ``batch.json``; raise FileNotFoundError, or ValueError if it is not what was written."""
    try:
        data = place.read("batch.json")
    except FileNotFoundError as error:
        reason = f"There is no folder {place.root}. Check the path."
        if place.root.exists():
            reason = (
                f"{place.root} has no batch.json: it is not a batch run's folder. `run_batch()` "
                "makes those."
            )
        raise MissingFileError(reason) from error
    where = place.root / "batch.json"
    document = read_sealed(data, where, FORMAT, LOST, _SEAL)
    return read_document(Manifest, document, where, LOST)


# Shards


@dataclass(frozen=True)
class ShardFile(Record):
    """A file of a shard, ``shards/000012-3fa9c1.tar``, its bytes and its checksum."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Head(Record):
    """The first line of a record, with the numbers of its items, and the bytes of all files;
    ``missing`` of the whole ones have words that probably did not arrive."""

    shard: int
    fingerprint: str
    data: ShardFile | None
    sheet: ShardFile | None
    whole: int
    failed: int
    nbytes: int
    missing: int = 0


@dataclass(frozen=True)
class ShardRecord:
    """The outcome of drawing a shard.

    Attributes:
        number: the shard's, from 0.
        fingerprint: a checksum of its items and of the run's settings.
        data: the file that holds the items; None in the format ``"folder"``, or if all failed.
        sheet: its thumbnails, if any.
        rows: one per item, in the order of the list: of a whole item as in ``metadata.jsonl``, of
            one that could not be drawn with the reason in ``failed``.
    """

    number: int
    fingerprint: str
    data: ShardFile | None
    sheet: ShardFile | None
    rows: Sequence[ItemRow]

    @property
    def whole(self) -> list[ItemRow]:
        return [row for row in self.rows if "failed" not in row]

    @property
    def failed(self) -> list[ItemRow]:
        return [row for row in self.rows if "failed" in row]

    @property
    def head(self) -> Head:
        sized = [file.bytes for file in (self.data, self.sheet) if file is not None]
        if self.data is None:
            sized += [file["bytes"] for row in self.whole for file in row["files"]]
        missing = sum(bool(row.get("missing")) for row in self.whole)
        counts = len(self.whole), len(self.failed), sum(sized), missing
        return Head(self.number, self.fingerprint, self.data, self.sheet, *counts)

    @property
    def places(self) -> set[str]:
        """Files and folders that it names."""
        files = {file.name for file in (self.data, self.sheet) if file is not None}
        return files | {row["place"] for row in self.whole}

    def packed(self) -> bytes:
        lines = b"".join(line_of(line) for line in (self.head.to_json(), *self.rows))
        return lines + line_of({"seal": sha256(lines)})


# Entries that a row needs for its readers; it has further ones


class _Row(TypedDict):
    id: str
    line: int
    prompt: str
    seed: int


class _FailedRow(_Row):
    failed: str
    traceback: str


class _SavedFile(TypedDict):
    name: str
    bytes: int


class _Statistics(TypedDict):
    word: str
    peak: float
    mean: float
    mass: float
    centre_row: float | None
    centre_col: float | None
    area: float
    entropy: float | None


class _WholeRow(_Row):
    width: int
    height: int
    words: list[str]
    statistics: list[_Statistics]
    place: str
    run_sha256: str
    files: list[_SavedFile]


def record_name(number: int) -> str:
    return f"shards/{number:06d}.jsonl"


def read_record(place: Place, number: int, fingerprint: str | None = None) -> ShardRecord | None:
    """Return a shard's record, or None if there is none; raise ValueError if it is damaged, of
    another version or, with the shard's ``fingerprint``, of another run."""
    try:
        data = place.read(record_name(number))
    except FileNotFoundError:
        return None
    where = place.root / record_name(number)
    lines = _sealed_lines(data)
    if not lines:
        raise InvalidValueError(f"{where} is not what was written: its own checksum differs")
    try:
        head, *rows = map(from_json, lines)
        told = read_entries(Head, head)
        for row in rows:
            check_object(_FailedRow if "failed" in row else _WholeRow, row)
        found = ShardRecord(told.shard, told.fingerprint, told.data, told.sheet, rows)
        if found.head != told:
            raise RecordError("its first line tells other numbers than the rest")
    except (RecordError, ValueError, TypeError, RecursionError) as error:
        raise InvalidValueError(f"{where} is not of this version: {error}") from error
    if found.number != number:
        raise InvalidValueError(f"{where} is the record of shard {found.number}")
    if fingerprint not in (None, found.fingerprint):
        raise InvalidValueError(
            f"{where} is of another run: of other items or settings than batch.json says"
        )
    return found


def _sealed_lines(data: bytes) -> list[bytes]:
    """Return a record's lines without its seal; none if the seal is missing or of other lines."""
    *lines, seal = data.splitlines(keepends=True) or [b""]
    return lines if seal == line_of({"seal": sha256(b"".join(lines))}) else []


def sound_record(place: Place, number: int, fingerprint: str | None = None) -> ShardRecord | None:
    """Do as :func:`read_record`, with None for one that it refuses."""
    try:
        return read_record(place, number, fingerprint)
    except ValueError:
        return None


def publish_record(place: Place, record: ShardRecord) -> None:
    """Publish a shard's record; then what the one before named goes, also another run's: those who
    read files by a pattern would find items twice."""
    before = sound_record(place, record.number)
    place.publish(record_name(record.number), record.packed())
    if before is not None and before.places != record.places:
        now = sound_record(place, record.number) or record  # perhaps another command's
        for name in sorted(before.places - record.places - now.places):
            place.remove(name)


def remove_record(place: Place, number: int) -> None:
    """Remove a shard's record, and then what it names."""
    before = sound_record(place, number)
    place.remove(record_name(number))
    for name in sorted(before.places) if before is not None else ():
        place.remove(name)


# All of them


def read_records(place: Place, manifest: Manifest) -> Iterator[ShardRecord]:
    """Yield the whole records of a run in their order."""
    found = _each(partial(sound_record, place), manifest.input.shards)
    return (record for record in found if record is not None)


def records_there(place: Place, manifest: Manifest) -> dict[int, File]:
    """Return the files of a run's records by the shard's number, unread."""
    found = place.files("shards")
    names = (
        record_name(number).removeprefix("shards/") for number in range(len(manifest.input.shards))
    )
    return {number: found[name] for number, name in enumerate(names) if name in found}


def read_heads(place: Place, manifest: Manifest) -> Iterator[Head | None]:
    """Yield the head of each shard's record, None where :func:`read_records` passes it over; its
    rows are not parsed."""
    return _each(partial(_head, place), manifest.input.shards)


def _head(place: Place, number: int, fingerprint: str) -> Head | None:
    try:
        head = read_entries(Head, json.loads(_sealed_lines(place.read(record_name(number)))[0]))
    except (FileNotFoundError, IndexError, RecordError, ValueError, TypeError, RecursionError):
        return None
    return head if (head.shard, head.fingerprint) == (number, fingerprint) else None


T = TypeVar("T")


def _each(look: Callable[[int, str], T], fingerprints: Sequence[str]) -> Iterator[T]:
    """Yield what is seen of each shard by number and fingerprint, a few read ahead."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for start in range(0, len(fingerprints), _AT_ONCE):
            some = fingerprints[start : start + _AT_ONCE]
            yield from pool.map(look, range(start, start + len(some)), some)


# Rows


def rows_in_order(records: Iterator[ShardRecord]) -> Iterator[ItemRow]:
    """Yield the rows of all records in the order of the list, with the ``sheet`` of their shard.

    Shards of several shapes overlap, and are numbered by their first items: so rows wait only until
    a shard begins behind them.
    """
    waiting: list[tuple[int, str, ItemRow]] = []
    for record in records:
        if not record.rows:
            continue
        while waiting and waiting[0][0] < record.rows[0]["line"]:
            yield heapq.heappop(waiting)[2]
        sheet = None if record.sheet is None else record.sheet.name
        for row in record.rows:
            heapq.heappush(waiting, (row["line"], row["id"], {**row, "sheet": sheet}))
    while waiting:
        yield heapq.heappop(waiting)[2]


def line_of(row: Mapping[str, object]) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def row_of(info: RunInfo, location: str, checksum: str, sizes: Mapping[str, int]) -> ItemRow:
    """Return the row of ``metadata.jsonl`` for an item, with :meth:`WordStatistics.flat` of the
    ``words`` and ``run.json``'s ``checksum``."""
    options = info.options or {}
    columns = set(info.columns)
    size = info.size or (0, 0)
    folder = "" if location.endswith(".tar") else f"{location}/"
    row: ItemRow = {}
    if "image.png" in info.files and folder:
        row["file_name"] = f"{folder}image.png"  # the key that imagefolder looks for
    row |= {"id": info.id, "line": info.line, "prompt": info.prompt}
    if info.edited is not None:
        row["source_prompt"] = info.edited.prompt
    if info.explained is not None:
        row["source_file"] = info.explained.file
    row |= {
        "negative_prompt": options.get("negative_prompt"),
        "seed": info.seed,
        "width": size[0],
        "height": size[1],
    }
    if info.frames is not None:
        row["frames"] = info.frames
    guidance = options.get("guidance_scale")
    seen = [word for word in info.words if word.columns and columns.issuperset(word.columns)]
    row |= {
        "num_inference_steps": options.get("num_inference_steps"),
        "guidance_scale": float(guidance) if isinstance(guidance, (int, float)) else None,
        "words": [word.text for word in seen],
    }
    # In the order of the words: their names begin with its number
    masks = [f"{folder}{name}" for name in sorted(info.files) if name.startswith("masks/")]
    if masks:
        row["masks"] = masks
    row |= {
        "statistics": [word.flat() for word in info.statistics],
        "truncated": info.truncated,
        "score": info.score,
        "missing": [word.word for word in info.missing],
    }
    if info.candidates is not None:
        row["candidates"] = [one.to_json() for one in info.candidates]
    row |= {
        "blanked": bool(info.blanked),  # by the pipeline's safety checker
        "place": location,
        "fingerprint": info.fingerprint,
        **(info.list_columns or {}),
        "run_sha256": checksum,
        "files": [{"name": name, "bytes": sizes[name]} for name in sorted(sizes)],
    }
    return row
