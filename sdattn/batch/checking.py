"""Summaries of a run, made from its records, and `verify`, which reads everything again.

metadata.jsonl  a row per whole item, in the layout of datasets' "imagefolder"
errors.jsonl    a row per item that could not be drawn
index.html      the items to browse, see gallery
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from PIL import Image, UnidentifiedImageError
from safetensors.torch import load

from ..files.paths import inside
from ..files.place import Place
from ..files.writing import file_sha256, sha256
from ..runs.info import RunInfo, read_info
from ..runs.parts import MAPS, VIDEOS
from ..runs.unpacking import map_shapes
from .formats import RUN, Format, format_of
from .gallery import gallery_pages
from .records import (
    ItemRow,
    Manifest,
    line_of,
    read_heads,
    read_manifest,
    read_record,
    read_records,
    record_name,
    records_there,
    row_of,
    rows_in_order,
)

_LITTER = 3600.0  # seconds after which data without a record is nobody's
_SHARD_NAME = re.compile(r"\d{6,}(\.jsonl|-[0-9a-f]{6}\.\w+)?")  # names that runs give in shards/
_ITEM_NAME = re.compile(r".+-[0-9a-f]{6}")  # and in a shard's folder


# Summaries


def write_summaries(place: Place, manifest: Manifest) -> None:
    """Write what is made from the records. If another command publishes records meanwhile, write
    it once more: that one may have ended with older records, and any that publishes yet more of
    them writes it after this one."""
    for _ in range(2):
        before = records_there(place, manifest)
        written = set()
        for name, parts in _summaries(place, manifest):
            place.publish(name, parts)
            written.add(name)
        for name in place.files():
            if name.startswith("index-") and name not in written:  # of an earlier, larger run
                place.remove(name)
        if records_there(place, manifest) == before:
            return


def summarize(root: str | Path) -> None:
    """Write the summaries of a run as far as it is, also while others draw it; raise as
    :func:`verify` does."""
    place = Place(root)
    write_summaries(place, read_manifest(place))


def _summaries(place: Place, manifest: Manifest) -> Iterator[tuple[str, Iterator[bytes]]]:
    def rows() -> Iterator[ItemRow]:
        return rows_in_order(read_records(place, manifest))

    yield "metadata.jsonl", _lines(rows(), failed=False)
    yield "errors.jsonl", _lines(rows(), failed=True)
    for name, page in gallery_pages(manifest, rows):
        yield name, iter([page])


def _lines(rows: Iterator[ItemRow], *, failed: bool) -> Iterator[bytes]:
    """Yield the rows of the failed items, or of the others, without where their thumbnails are."""
    for row in rows:
        if ("failed" in row) == failed:
            yield line_of({name: row[name] for name in row if name not in ("thumb", "sheet")})


def remove_litter(place: Place, manifest: Manifest) -> list[str]:
    """Remove what no record names from ``shards/`` and return it: what another attempt wrote. What
    is younger than an hour may still get a record, and stays; so does all of a shard without a
    sound record, whose items need not be lost, and what has a name that no run gives."""
    place.remove_temporary()
    named = set[str]()
    done = set[str]()
    for record in read_records(place, manifest):
        done.add(f"{record.number:06d}")
        named |= {record_name(record.number)} | record.places
    unfinished = {f"{number:06d}" for number in range(len(manifest.input.shards))} - done
    removed = []
    for name, written in _entries(place, "shards").items():
        path = f"shards/{name}"
        if name[:6] in unfinished or not _SHARD_NAME.fullmatch(name):
            continue
        if manifest.settings.format != "folder" or name not in done:
            if path not in named and time.time() - written > _LITTER:
                removed.append(path)
        else:
            items = _entries(place, path).items()
            for item, at in items:
                is_old = time.time() - at > _LITTER and _ITEM_NAME.fullmatch(item)
                if is_old and f"{path}/{item}" not in named:
                    removed.append(f"{path}/{item}")
    for path in removed:
        place.remove(path)
    return removed


def _entries(place: Place, folder: str) -> dict[str, float]:
    """Return the files and folders in a folder, and when each was written last."""
    found: dict[str, float] = {}
    for path, file in place.files(folder, deep=place.is_remote).items():
        name = path.partition("/")[0]
        found[name] = max(file.time, found.get(name, 0.0))
    return found


# Verifying


def verify(root: str | Path) -> tuple[int, list[str]]:
    """Read everything again and compare it with what was written; write and remove nothing.

    Returns:
        The number of items, and the problems, a line each: a shard without a record; a file that is
        missing or has another checksum; an image that does not open; maps that are not finite or
        not on the right grid; a row that disagrees with ``run.json``; another number of items than
        ``batch.json`` has; a summary that is not what the records say.

    Raises:
        FileNotFoundError: no such folder, or it is not a batch run's.
        ValueError: ``batch.json`` is corrupt or of another version.
    """
    place = Place(root)
    manifest = read_manifest(place)
    problems = list[str]()
    items = 0
    if made := manifest.input.bad_lines_sha256:
        problems += _compare(place, "bad_lines.jsonl", made)
    with ThreadPoolExecutor() as pool:
        numbers = range(len(manifest.input.shards))
        look = partial(_check_shard, place.root, manifest)
        for count, told in pool.map(look, numbers):
            items += count
            problems += told
    records_are_whole = not problems
    if records_are_whole:
        rows = sum(head.whole + head.failed for head in read_heads(place, manifest) if head)
        if rows != manifest.input.items:
            problems.append(
                f"the records have {rows} items and batch.json {manifest.input.items}: one is of "
                "another input. The run's command draws its shard again"
            )
    for name, parts in _summaries(place, manifest):
        written = hashlib.sha256()
        for part in parts:
            written.update(part)
        problems += _compare(place, name, written.hexdigest()) if records_are_whole else ()
    return items, problems


def _compare(place: Place, name: str, checksum: str) -> Iterator[str]:
    try:
        if file_sha256(inside(place.root, name)) != checksum:
            yield f"{name} is not what was written; the run's command writes it again"
    except FileNotFoundError:
        yield f"{name} is missing; the run's command writes it again"


def _check_shard(root: Path, manifest: Manifest, number: int) -> tuple[int, list[str]]:
    """Return the number of a shard's whole items, and its problems."""
    place = Place(root)  # of its own: a copy of the shard is kept while it is checked, no longer
    format = format_of(place, manifest)
    name = record_name(number)
    try:
        record = read_record(place, number, manifest.input.shards[number])
    except (OSError, ValueError) as error:
        return 0, [f"{_line(error)}; the run's command draws it anew"]
    if record is None:
        return 0, [f"{name} is missing: the shard is not drawn, or its record was removed"]
    problems = []
    for file in (record.data, record.sheet):
        if file is None:
            continue
        try:
            if file_sha256(place.local(file.name)) != file.sha256:
                problems.append(f"{file.name} is not what was written: its checksum differs")
        except (OSError, ValueError):
            problems.append(f"{file.name} is missing")
    for row in record.whole:
        told = _check_item(format, row, manifest.settings.save)
        problems += [f"{row['id']}: {problem} (in {row['place']})" for problem in told]
    return len(record.whole), problems


_FILES = {"image": "image.png", "grid": "grid.png", "report": "report.html", "maps": MAPS}


def _check_item(format: Format, row: ItemRow, save: Collection[str]) -> list[str]:
    """Return an item's problems, a line each; none if every bit is as written."""
    problems: list[str] = []
    location = row["place"]
    try:
        files = format.read(location, row["id"])
        info = read_info(files, location)
        checksum = sha256(files[RUN])
        sizes = {name: len(files[name]) for name in (RUN, *info.files) if name in files}
        expected = row_of(info, location, checksum, sizes)
        # An older version's row has fewer entries; its record's seal tells that none was lost.
        others = [name for name in row if name != "thumb" and row[name] != expected.get(name)]
        if checksum != row["run_sha256"]:
            problems.append("run.json is not what was written: its checksum differs")
        elif others:
            problems.append(f"its row is not what run.json says, of {', '.join(others[:3])}")
        lacking = [_FILES[part] for part in save if part in _FILES]
        problems += [f"run.json names no {name}" for name in lacking if name not in info.files]
        if "video" in save and info.files.keys().isdisjoint(VIDEOS):
            problems.append("run.json names no video")
        if foreign := files.keys() - {RUN, *info.files}:
            problems.append(f"{min(foreign)} is not the run's")
        for name, digest in info.files.items():
            problems += _check_file(name, files.get(name), digest, info)
    except (OSError, ValueError) as error:
        problems.append(_line(error))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        problems.append(f"run.json is damaged: it is incomplete ({type(error).__name__}: {error})")
    return problems


def _check_file(name: str, data: bytes | None, digest: str, info: RunInfo) -> Iterator[str]:
    if data is None:
        yield f"{name} is missing"
    elif sha256(data) != digest:
        yield f"{name} is not what was written: its checksum differs"
    elif name.endswith(".png"):
        try:
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                image.load()
        except (OSError, UnidentifiedImageError, SyntaxError) as error:
            yield f"{name} does not open: {error}"
    elif name == MAPS:
        maps = load(data)
        if {name: tuple(held.shape) for name, held in maps.items()} != map_shapes(info):
            yield "maps.safetensors has other layers or sizes than run.json says"
        # NaN is the least and the largest of its layer; each value by itself costs tenfold
        ends = {layer: map(float, held.aminmax()) for layer, held in maps.items()}
        if bad := [layer for layer, both in ends.items() if not all(map(math.isfinite, both))]:
            yield f"maps.safetensors holds values that are not finite, in {bad[0]}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
