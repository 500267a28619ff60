"""The plan of a run: a list, checked line by line, as numbered shards of items that run together.

with make_plan(request, pipe, tell) as plan:
    plan.shard(12).jobs
"""

import inspect
import json
import re
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import islice
from math import ceil
from pathlib import Path
from posixpath import splitext
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import InvalidValueError, OptionError
from ..files.terminal import say, shown
from ..models.pipeline import Options, Pipeline
from ..models.sizes import makes_videos
from ..models.values import checked_seeds
from ..runs.explaining import is_decided
from .checks import Checks, Job
from .columns import Columns
from .items import BadLine, Item, item_of
from .photos import Photo, photo_rows
from .request import Request
from .tables import Row, list_rows

Tell = Callable[[int, int, int], None]  # of lines checked, good and bad ones
_CHUNK, _SECONDS = 1000, 1.0  # lines, or time, between two calls of it
_SHOWN = 100  # bad lines in memory


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive jobs of one shape, in the order of the list; shards are numbered from 0."""

    number: int
    jobs: tuple[Job, ...]


def default_shard_items(items: int, batch_size: int, *, videos: bool) -> int:
    """Return a number of items such that a shard takes a minute or two, and there are some for
    several workers.

    >>> default_shard_items(40, 8, videos=False), default_shard_items(10**6, 8, videos=False)
    (8, 100)
    """
    return min(4 if videos else 100, max(batch_size, ceil(items / 16)))


class Plan:
    """A checked list, in a temporary file, and which of its items are in which shard.

    Attributes:
        items: number of items that can be drawn.
        bad_lines: number of lines that are not items.
        bad: the first 100 of them.
        bad_file: all of them, as lines of JSON.
        has_edits: some items are edits.
        digest: checksum of all items, with their options and images.
        columns: names of kept columns, or None.
        shard_items: items in a full shard.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sdattn-plan-")
        self.bad_file = Path(self._folder.name) / "bad_lines.jsonl"
        self._bad = self.bad_file.open("w", encoding="utf-8")
        self._spool = (Path(self._folder.name) / "items").open("wb")
        self._offsets, self._shapes = array("Q"), array("L")
        self._options: dict[int, Options] = {}  # by shape
        self._keys: dict[int, bytes] = {}  # the same, as text
        self._taken: dict[int, int] = {}  # hash of each id -> its line
        self._again: dict[str, int] = {}  # the last suffix of a photo's name
        self._sum = sha256()
        self._end = 0
        self.has_edits = False
        self.bad_lines = 0
        self.bad: list[BadLine] = []
        self.columns: list[str] | None = None
        self.shard_items = 1

    def __enter__(self) -> "Plan":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary files."""
        self._spool.close()
        self._bad.close()
        self._folder.cleanup()

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def items(self) -> int:
        return len(self._offsets)

    @property
    def digest(self) -> str:
        return self._sum.hexdigest()[:16]

    def shard(self, number: int) -> Shard:
        """Return a shard, read from the file."""
        return Shard(number, tuple(map(self._job, self._written(number))))

    def shard_size(self, number: int) -> int:
        return int(self._starts[number + 1] - self._starts[number])

    def shard_digest(self, number: int) -> str:
        """Return a checksum of a shard's items, with their options and images."""
        found = sha256()
        for line in self._written(number):
            shape, _, item = line.split(b"\t")
            found.update(self._keys[int(shape)] + item)
        return found.hexdigest()[:16]

    def _written(self, number: int) -> Iterator[bytes]:
        with open(self._spool.name, "rb") as file:
            for index in self._order[self._starts[number] : self._starts[number + 1]]:
                file.seek(self._offsets[index])
                yield file.readline()

    def _job(self, line: bytes) -> Job:
        shape, where, rest = line.split(b"\t")
        *fields, words, image = json.loads(rest)
        fields = dict(zip(_FIELDS, fields, strict=True))
        if self.columns:
            fields["columns"] = {name: fields["columns"].get(name, "") for name in self.columns}
        if image is not None:
            image = Photo(**json.loads(where), **{**image, "size": tuple(image["size"])})
        item = Item(**fields, words=None if words is None else tuple(words), image=image)
        return Job(item, self._options[int(shape)], int(shape))

    # Making it

    def add(self, job: Job, name: str | None = None) -> None:
        """Add a job, with a free id made from ``name`` or else its own; raise ValueError if that is
        taken, or a text or number cannot be written."""
        item = job.item
        if name is not None:
            item = replace(item, id=self._free_id(name))
        key = hash(item.id.lower())
        if key in self._taken:
            raise InvalidValueError(
                f"id={item.id!r} is already in line {self._taken[key]}. Write another; case is "
                "ignored."
            )
        line = _line_of(item, job.shape)
        if job.shape not in self._options:
            self._options[job.shape], self._keys[job.shape] = job.options, _json(job.options)
        self._taken[key] = item.line
        self.has_edits |= item.edit_to is not None
        self._offsets.append(self._end)
        self._shapes.append(job.shape)
        self._end += self._spool.write(line)
        self._sum.update(self._keys[job.shape] + line.split(b"\t")[2])

    def refuse(self, line: BadLine) -> None:
        """Note a line that is not an item."""
        self.bad_lines += 1
        if len(self.bad) < _SHOWN:
            self.bad.append(line)
        self._bad.write(json.dumps(asdict(line), ensure_ascii=False) + "\n")

    def divide(self, shard_items: int, columns: list[str] | None) -> None:
        """Divide the items into shards: each is put into the open shard of its shape."""
        self.shard_items, self.columns = shard_items, columns
        numbers = array("L")
        open_shards: dict[int, list[int]] = {}  # shape -> number of the shard, free places
        n_shards = 0
        for shape in self._shapes:
            if not open_shards.get(shape, [0, 0])[1]:
                open_shards[shape] = [n_shards, shard_items]
                n_shards += 1
            place = open_shards[shape]
            numbers.append(place[0])
            place[1] -= 1
        shards = np.asarray(numbers)
        self._order = np.argsort(shards, kind="stable")
        self._starts = np.searchsorted(shards[self._order], np.arange(n_shards + 1))
        self._bad.flush()
        self._spool.flush()
        self._taken.clear()

    def _free_id(self, name: str) -> str:
        """Return an id for a name: signs that an id does not take are "-", one that is taken gets a
        suffix."""
        plain = re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", name)[-90:].strip(".-_ ") or "photo"
        number = self._again.get(plain.lower(), 1)
        found = plain
        while hash(found.lower()) in self._taken:
            number += 1
            found = f"{plain}-{number}"
        if number > 1:
            self._again[plain.lower()] = number
        return found


_FIELDS = (
    *("id", "line", "prompt", "seed", "negative_prompt", "options", "edit_to", "edit", "columns"),
)


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _line_of(item: Item, shape: int) -> bytes:
    """Return an item as a line: its shape, where its image is, and what it is, between tabs."""
    where: dict[str, Any] = {}
    image = None
    if item.image is not None:
        photo = item.image
        where = {"where": photo.where, "span": photo.span, "row": photo.row}
        image = {"name": photo.name, "sha256": photo.sha256, "size": photo.size}
    try:
        rest = _json([*(getattr(item, name) for name in _FIELDS), item.words, image])
    except UnicodeEncodeError as error:
        raise InvalidValueError(
            f"{error.object[error.start]!r} is half a character. Write the character itself."
        ) from None
    return b"%d\t%s\t%s\n" % (shape, _json(where), rest)


def make_plan(request: Request, pipe: Pipeline, tell: Tell = lambda *_: None) -> Plan:
    """Read and check a request's list, and divide its items into shards.

    Args:
        pipe: the pipeline that will draw, or its outline.
        tell: called with the lines checked, good and bad ones, after each part of the list.

    Raises:
        ValueError: the source, or its header, cannot be read, or an option is for no item.
        ImportError: a package for the source is not installed.
    """
    checked_seeds(request.seed)
    is_photos = request.photos is not None
    _check_options(request.options, is_photos)
    parameters = inspect.signature(pipe.__call__).parameters
    options = [name for name in parameters if name != "kwargs"]
    columns = Columns(request.prompt_column, request.keep_columns, options, photos=is_photos)
    if is_photos:
        rows = photo_rows(str(request.photos), request.input_format, columns)
    else:
        rows = list_rows(str(request.source), request.input_format, columns.choose)
    plan, checks = Plan(), Checks(pipe, request.options)
    try:
        n_lines = 0
        for part in _parts(rows):
            n_lines += len(part)
            _add(plan, part, checks, columns, request)
            tell(n_lines, plan.items, plan.bad_lines)
            if request.limit is not None and plan.items >= request.limit:
                break
        else:
            columns.check_seen()
        videos = makes_videos(pipe)
        size = request.shard_items or default_shard_items(
            plan.items, request.batch_of(videos=videos), videos=videos
        )
        plan.divide(size, list(columns.kept) or None)
    except BaseException:
        plan.close()
        raise
    _say_unused(columns, pipe)
    return plan


def _add(plan: Plan, part: list[Row], checks: Checks, columns: Columns, request: Request) -> None:
    """Add a part of the list to the plan, in its order, up to the request's limit."""
    items: list[Item] = []
    bad: list[BadLine] = []
    photo_names: dict[int, str] = {}  # by line, of those without an id
    for row in part:
        try:
            if row.reason:
                raise InvalidValueError(row.reason)
            fields, kept = columns.read(row)
            own = {"id": f"{row.line:06d}", "seed": request.seed + row.line - 1}
            items.append(item_of(own, fields, row.line, image=row.image, columns=kept))
            if row.image is not None and fields.get("id") is None:
                photo_names[row.line] = splitext(row.image.name)[0]
        except ValueError as error:
            bad.append(BadLine.of(row.line, error, row.text or str(dict(row.fields))))
    jobs, refused = checks.check(items)
    last = part[-1].line
    for job in jobs:
        try:
            plan.add(job, photo_names.get(job.item.line))
        except ValueError as error:
            bad.append(BadLine.of(job.item.line, error, job.item.prompt))
        if plan.items == request.limit:
            last = job.item.line
            break
    for line in sorted([*bad, *refused], key=lambda line: line.line):
        if line.line <= last:
            plan.refuse(line)


def _parts(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield rows in parts of at most 1000, or of what can be read in a second."""
    while part := list(islice(rows, 1)):
        end = time.monotonic() + _SECONDS
        for row in rows:
            part.append(row)
            if len(part) == _CHUNK or time.monotonic() > end:
                break
        yield part


def _check_options(options: Options, is_photos: bool) -> None:
    decided = [name for name in options if is_photos and is_decided(name)]
    if decided:
        name = decided[0]
        raise OptionError(name, options[name], "an image to explain decides it. Leave it out.")


def _say_unused(columns: Columns, pipe: Pipeline) -> None:
    if columns.left_out:
        why = f"not used, as no {type(pipe).__name__} has such options"
        names = ", ".join(map(shown, columns.left_out))
        say(f"{why}: {names}. keep_columns keeps them in the rows.")
    if columns.decided:
        say(f"not used, as an image decides them: {', '.join(map(shown, columns.decided))}")
