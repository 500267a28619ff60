"""The plan of a run: a list, checked line by line, as numbered shards of items that run together.

with make_plan(request, pipe, tell) as plan:
    plan.shard(12).jobs
"""

import inspect
import json
import re
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from posixpath import splitext
from tempfile import TemporaryDirectory
from unicodedata import normalize

import numpy as np

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
_CHUNK = 1000  # lines between two calls of it,
_SECONDS = 1.0  # or time
_SHOWN = 100  # bad lines in memory


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive jobs of one shape, in the order of the list; shards are numbered from 0. The
    ``digest`` is a checksum of its items, with their options and images."""

    number: int
    jobs: tuple[Job, ...]
    digest: str


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

    Attributes:
        items: number of items that can be drawn.
        bad_lines: number of lines that are not items.
        bad: the first 100 of them.
        bad_file: all of them, as lines of JSON.
        has_edits: some items are edits.
        digest: checksum of all items, with their options and images.
        columns: names of kept columns, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        folder = Path(self.enter_context(TemporaryDirectory(prefix="sdattn-plan-")))
        self.bad_file = folder / "bad_lines.jsonl"
        self._file = folder / "items"
        self._bad = self.enter_context(self.bad_file.open("wb"))
        self._items = self.enter_context(self._file.open("wb"))
        self._offsets = array("Q")
        self._shapes = array("L")
        self._end = 0
        self._options: dict[int, Options] = {}  # by shape
        self._taken: dict[int, int] = {}  # hash of each id -> its line
        self._suffixes: dict[str, int] = {}  # the last one of each photo's name
        self._sum = sha256()
        self.has_edits = False
        self.bad_lines = 0
        self.bad: list[BadLine] = []
        self.columns: list[str] | None = None

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
        jobs = tuple(map(self._job, self._lines(number)))
        return Shard(number, jobs, self.shard_digest(number))

    def shard_size(self, number: int) -> int:
        return int(self._starts[number + 1] - self._starts[number])

    def first_shards(self, limit: int | None) -> int:
        """Return the number of shards that the first items are in; None: all items."""
        return max(self._numbers[:limit]) + 1 if self._numbers else 0

    def shard_digest(self, number: int) -> str:
        """Return a shard's digest without its jobs."""
        return sha256(b"".join(map(self._told, self._lines(number)))).hexdigest()[:16]

    def _lines(self, number: int) -> Iterator[bytes]:
        with self._file.open("rb") as file:
            for index in self._order[self._starts[number] : self._starts[number + 1]]:
                file.seek(self._offsets[index])
                yield file.readline()

    def _told(self, line: bytes) -> bytes:
        """Return what an item is: without the number of its shape and the place of its image."""
        shape, _, item = line.split(b"\t")
        return _json(self._options[int(shape)]) + item

    def _job(self, line: bytes) -> Job:
        shape, place, told = map(json.loads, line.split(b"\t"))
        words, columns, *photo = told[len(_FIELDS) :]
        image = None
        if photo:
            where, span, row = place
            [[name, checksum, size]] = photo
            span = span and tuple(span)
            row = row and tuple(row)
            image = Photo(where, name, span, row, checksum, tuple(size))
        if self.columns is not None:
            columns = {name: columns.get(name, "") for name in self.columns}
        words = None if words is None else tuple(words)
        fields = dict(zip(_FIELDS, told, strict=False))
        item = Item(**fields, words=words, columns=columns, image=image)
        return Job(item, self._options[shape], shape)

    # Making it

    def add(self, job: Job, name: str | None = None) -> None:
        """Add a job, with a free id made from ``name`` or else its own; raise ValueError if that is
        taken, or a text cannot be written."""
        item = job.item if name is None else replace(job.item, id=self._free_id(name))
        key = hash(item.id.lower())
        if key in self._taken:
            raise InvalidValueError(
                f"id={item.id!r} is already in line {self._taken[key]}. Write another; case is "
                "ignored."
            )
        line = _line_of(item, job.shape)
        self._taken[key] = item.line
        self.has_edits |= item.edit_to is not None
        self._options.setdefault(job.shape, job.options)
        self._offsets.append(self._end)
        self._shapes.append(job.shape)
        self._end += self._items.write(line)
        self._sum.update(self._told(line))

    def _free_id(self, name: str) -> str:
        """Return an id like a name: signs that an id does not take are "-", and if it is taken it
        gets a suffix."""
        plain = re.sub(r"[\u0300-\u036f]", "", normalize("NFKD", name))  # without accents
        plain = re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", plain)[-90:].strip(".-_") or "photo"
        number = self._suffixes.get(plain.lower(), 1)
        found = plain
        while hash(found.lower()) in self._taken:
            number += 1
            found = f"{plain}-{number}"
        self._suffixes[plain.lower()] = number
        return found

    def refuse(self, line: BadLine) -> None:
        """Note a line that is not an item."""
        self.bad_lines += 1
        if len(self.bad) < _SHOWN:
            self.bad.append(line)
        self._bad.write(_json(asdict(line)) + b"\n")

    def divide(self, shard_items: Callable[[int], int], columns: list[str] | None) -> None:
        """Put each item into the open shard of its shape; a full one, which has so many items by
        its number, is followed by another."""
        self.columns = columns
        numbers = array("L")
        n_shards = 0
        open_shards: dict[int, list[int]] = {}  # shape -> number of the shard, free places
        for shape in self._shapes:
            if not open_shards.get(shape, [0, 0])[1]:
                open_shards[shape] = [n_shards, shard_items(n_shards)]
                n_shards += 1
            numbers.append(open_shards[shape][0])
            open_shards[shape][1] -= 1
        self._numbers = numbers
        self._order = np.argsort(numbers, kind="stable")
        self._starts = np.searchsorted(np.sort(numbers), np.arange(n_shards + 1))
        self._items.flush()
        self._bad.flush()
        self._taken.clear()


_FIELDS = ("id", "line", "prompt", "seed", "negative_prompt", "options", "edit_to", "edit")
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _json(value: object) -> bytes:
    return _JSON.encode(value).encode()


def _line_of(item: Item, shape: int) -> bytes:
    """Return an item as a line: its shape, where its image is, and what it is, between tabs."""
    values = [*(getattr(item, name) for name in _FIELDS), item.words, item.columns]
    place = None
    photo = item.image
    if photo is not None:
        place = [photo.where, photo.span, photo.row]
        values.append([photo.name, photo.sha256, photo.size])
    try:
        return b"%d\t%s\t%s\n" % (shape, _json(place), _json(values))
    except UnicodeEncodeError as error:
        sign = error.object[error.start]
        raise InvalidValueError(f"{sign!r} is half a character. Write it whole.") from None


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
    parameters = inspect.signature(pipe.__call__).parameters
    options = [name for name in parameters if name != "kwargs"]
    columns = Columns(request.prompt_column, request.keep_columns, options, photos=is_photos)
    if is_photos:
        rows = photo_rows(str(request.photos), request.input_format, columns)
    else:
        rows = list_rows(str(request.source), request.input_format, columns.choose)
    checks = Checks(pipe, request.options)
    n_lines = 0
    with closing(rows), ExitStack() as undo:
        plan = undo.enter_context(Plan())
        for part in _parts(rows):
            n_lines += len(part)
            _add(plan, part, checks, columns, request)
            tell(n_lines, plan.items, plan.bad_lines)
        columns.check_seen()
        videos = makes_videos(pipe)
        size = request.batch_of(videos=videos)
        plan.divide(
            lambda number: request.shard_items or default_shard_items(number, size, videos=videos),
            list(columns.kept) or None,
        )
        _say_unused(columns, pipe)
        undo.pop_all()  # the plan stays open
    return plan


def _add(plan: Plan, part: list[Row], checks: Checks, columns: Columns, request: Request) -> None:
    """Add a part of the list to the plan, in its order."""
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
            texts = (value for value in row.fields.values() if isinstance(value, str))
            bad.append(BadLine.of(row.line, error, row.text or " ".join(texts)))
    jobs, refused = checks.check(items)
    for job in jobs:
        try:
            plan.add(job, photo_names.get(job.item.line))
        except ValueError as error:
            bad.append(BadLine.of(job.item.line, error, job.item.prompt))
    for line in sorted([*bad, *refused], key=lambda line: line.line):
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


def _say_unused(columns: Columns, pipe: Pipeline) -> None:
    if columns.left_out:
        why = f"not used, as no {type(pipe).__name__} has such options"
        names = ", ".join(map(shown, columns.left_out))
        say(f"{why}: {names}. keep_columns keeps them in the rows.")
    if columns.decided:
        say(f"not used, as an image decides them: {', '.join(map(shown, columns.decided))}")
