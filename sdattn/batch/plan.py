"""The plan of a run: a list, checked line by line, as numbered shards of items that run together.

with make_plan(request, pipe, tell) as plan:
    plan.shard(12).jobs
"""

import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from posixpath import splitext
from tempfile import TemporaryDirectory
from typing import Any
from unicodedata import normalize

from ..errors import InvalidValueError, OptionError
from ..files.terminal import say, shown
from ..models.facts import makes_videos
from ..models.pipeline import Options, Pipeline
from ..models.values import checked_seeds
from ..runs.explaining import is_decided
from .checks import Checks, Job
from .columns import Columns
from .items import BadLine, Item, item_of
from .photos import Photo, photo_rows
from .request import Request
from .tables import Row, list_rows

Tell = Callable[[int, int, int], None]  # of lines checked, good and bad ones
_CHUNK = 100  # lines between two calls of it
_SHOWN = 100  # bad lines in memory


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive jobs of one shape, in the order of the list; shards are numbered from 0."""

    number: int
    jobs: tuple[Job, ...]


def default_shard_items(number: int, batch_size: int, *, videos: bool) -> int:
    """Return the number of items of a full shard, by its number: the first 16 have a batch, so that
    a short list is work for several workers; every 16 shards the size doubles, up to a minute or
    two of work. It does not depend on the list's length, so that lines can be added.

    >>> [default_shard_items(n, 8, videos=False) for n in (0, 15, 16, 32, 48, 64, 10**4)]
    [8, 8, 16, 32, 64, 100, 100]
    """
    return min(4 if videos else 100, batch_size << min(number // 16, 7))


class Plan(ExitStack):
    """A checked list, in a temporary file, and which of its items are in which shard.

    Args:
        shard_items: number of items of a full shard, by the shard's number.

    Attributes:
        items: number of items that can be drawn.
        bad_lines: number of lines that are not items.
        bad: the first 100 of them.
        bad_file: all of them, as lines of JSON.
        has_edits: some items are edits.
        digest: checksum of all items, with their options and images.
        columns: names of kept columns, or None.
    """

    def __init__(self, shard_items: Callable[[int], int]) -> None:
        super().__init__()
        folder = Path(self.enter_context(TemporaryDirectory(prefix="sdattn-plan-")))
        self.bad_file = folder / "bad_lines.jsonl"
        self._file = folder / "items"
        self._bad = self.enter_context(self.bad_file.open("wb"))
        self._items = self.enter_context(self._file.open("wb"))
        self._shard_items = shard_items
        self._shards: list[array[int]] = []  # where each item is in the file
        self._sums: list[Any] = []  # of each shard
        self._firsts: list[int] = []  # number of items before each shard's first
        self._open: dict[int, int] = {}  # shape -> the shard that is not full
        self._options: dict[int, Options] = {}  # by shape
        self._taken: dict[int, int] = {}  # hash of each id -> its line
        self._suffixes: dict[str, int] = {}  # the last one of each photo's name
        self._sum = sha256()
        self.items = 0
        self.has_edits = False
        self.bad_lines = 0
        self.bad: list[BadLine] = []
        self.columns: list[str] | None = None

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def digest(self) -> str:
        return self._sum.hexdigest()[:16]

    def shard(self, number: int) -> Shard:
        """Return a shard, read from the file."""
        jobs = []
        with self._file.open("rb") as file:
            for start in self._shards[number]:
                file.seek(start)
                jobs.append(self._job(file.readline()))
        return Shard(number, tuple(jobs))

    def shard_size(self, number: int) -> int:
        return len(self._shards[number])

    def first_shards(self, limit: int | None) -> int:
        """Return the number of shards that the first items are in; None: all items."""
        return len(self) if limit is None else bisect_left(self._firsts, limit)

    def digests(self) -> list[str]:
        """Return the checksum of each shard's items, with their options and images."""
        return [one.hexdigest()[:16] for one in self._sums]

    def _told(self, line: bytes) -> bytes:
        """Return what an item is: without the number of its shape and the place of its image."""
        shape, _, item = line.split(b"\t")
        return _json(self._options[int(shape)]) + item

    def _job(self, line: bytes) -> Job:
        shape, place, told = map(json.loads, line.split(b"\t"))
        fields = dict(zip(_FIELDS, told, strict=False))
        fields["words"] = fields["words"] and tuple(fields["words"])
        if self.columns is not None:
            fields["columns"] = {name: fields["columns"].get(name, "") for name in self.columns}
        if place is not None:
            where, *parts = place
            name, checksum, size = told[-1]
            span, row = (part and tuple(part) for part in parts)
            fields["image"] = Photo(where, name, span, row, checksum, tuple(size))
        return Job(Item(**fields), self._options[shape], shape)

    # Making it

    def add(self, found: Job | BadLine) -> None:
        """Add a job to the open shard of its shape, and a bad line to those; a job whose id is
        taken, or with a text that cannot be written, is one too."""
        if isinstance(found, Job):
            try:
                self._add(found)
                return
            except ValueError as error:
                found = BadLine.of(found.item.line, error, found.item.prompt)
        self.bad_lines += 1
        if len(self.bad) < _SHOWN:
            self.bad.append(found)
        self._bad.write(_json(asdict(found)) + b"\n")

    def _add(self, job: Job) -> None:
        item = job.item
        photo = item.image
        if photo is not None and not item.id:
            item = replace(item, id=self._free_id(splitext(photo.name)[0]))
        key = hash(item.id.lower())
        if key in self._taken:
            raise InvalidValueError(
                f"id={item.id!r} is already in line {self._taken[key]}. Write another; case is "
                "ignored."
            )
        place = None
        values = [getattr(item, name) for name in _FIELDS]
        if photo is not None:
            place = [photo.where, photo.span, photo.row]
            values.append([photo.name, photo.sha256, photo.size])
        try:
            line = b"%d\t%s\t%s\n" % (job.shape, _json(place), _json(values))
        except UnicodeEncodeError as error:
            sign = error.object[error.start]
            raise InvalidValueError(f"{sign!r} is half a character. Write it whole.") from None
        number = self._open.get(job.shape)
        if number is None or len(self._shards[number]) == self._shard_items(number):
            number = self._open[job.shape] = len(self._shards)
            self._shards.append(array("Q"))
            self._sums.append(sha256())
            self._firsts.append(self.items)
        self._shards[number].append(self._items.tell())
        self._items.write(line)
        self._taken[key] = item.line
        self.items += 1
        self._options.setdefault(job.shape, job.options)
        told = self._told(line)
        self._sum.update(told)
        self._sums[number].update(told)
        self.has_edits |= item.edit_to is not None

    def _free_id(self, name: str) -> str:
        """Return a photo's name as an id that is not taken yet."""
        plain = re.sub(r"[\u0300-\u036f]", "", normalize("NFKD", name))  # without accents
        plain = re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", plain)[-90:].strip(".-_") or "photo"
        number = self._suffixes.get(plain.lower(), 1)
        found = plain
        while hash(found.lower()) in self._taken:
            number += 1
            found = f"{plain}-{number}"
        self._suffixes[plain.lower()] = number
        return found

    def end(self, columns: list[str] | None) -> None:
        """Note the kept columns; from now on shards can be read."""
        self.columns = columns
        self._taken.clear()
        self._items.flush()
        self._bad.flush()


_FIELDS = (
    *("id", "line", "prompt", "seed", "negative_prompt", "options", "edit_to", "edit"),
    *("words", "columns"),
)
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _json(value: object) -> bytes:
    return _JSON.encode(value).encode()


def make_plan(request: Request, pipe: Pipeline, tell: Tell = lambda *_: None) -> Plan:
    """Read and check a request's list, and divide its items into shards.

    Args:
        pipe: the pipeline that will draw.
        tell: called with the lines checked, good and bad ones, after each part of the list.

    Raises:
        ValueError: the source, or its header, cannot be read, or an option is for no item.
        ImportError: a package for the source is not installed.
    """
    checked_seeds(request.seed)
    is_photos = request.photos is not None
    for name, value in request.options.items() if is_photos else ():
        if is_decided(name):
            raise OptionError(name, value, "an image to explain decides it. Leave it out.")
    checks = Checks(pipe, request.options)
    columns = Columns(request.prompt_column, request.keep_columns, checks.kinds, photos=is_photos)
    if is_photos:
        rows = photo_rows(str(request.photos), request.input_format, columns)
    else:
        rows = list_rows(str(request.source), request.input_format, columns.choose)
    videos = makes_videos(pipe)
    size = request.batch_of(videos=videos)

    def shard_items(number: int) -> int:
        return request.shard_items or default_shard_items(number, size, videos=videos)

    with closing(rows), ExitStack() as undo:
        plan = undo.enter_context(Plan(shard_items))
        while part := list(islice(rows, _CHUNK)):
            for found in checks.check([_item(row, columns, request.seed) for row in part]):
                plan.add(found)
            tell(plan.items + plan.bad_lines, plan.items, plan.bad_lines)
        columns.check_seen()
        plan.end(list(columns.kept) or None)
        if columns.left_out:
            why = "an image decides them, or " if is_photos else ""
            say(
                f"not used, as {why}no {type(pipe).__name__} has such options: "
                f"{', '.join(map(shown, columns.left_out))}. keep_columns keeps them in the rows."
            )
        undo.pop_all()  # the plan stays open
    return plan


def _item(row: Row, columns: Columns, seed: int) -> Item | BadLine:
    try:
        if row.reason:
            raise InvalidValueError(row.reason)
        fields, kept = columns.read(row)
        own = {"id": f"{row.line:06d}", "seed": seed + row.line - 1}
        return item_of(own, fields, row.line, image=row.image, columns=kept)
    except ValueError as error:
        texts = (value for value in row.fields.values() if isinstance(value, str))
        return BadLine.of(row.line, error, row.text or " ".join(texts))
