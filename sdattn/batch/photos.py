"""Images to explain: files with captions, members of tar files, rows of tables and data sets.

photo.jpg photo.txt                                     # pairs, in a folder or a tar
{"image": "photo.jpg", "prompt": "a cat on a sofa"}     # next to the list's file
"""

import os
import tarfile
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path, PurePosixPath
from posixpath import normpath, splitext
from typing import Any
from unicodedata import normalize

from PIL import Image

from ..errors import InvalidValueError
from ..files.addresses import AnyPath, is_address, path_of
from ..files.images import SUFFIXES, UNREAD, read_image, size_of
from ..files.paths import refuse
from ..files.terminal import counted, say, shown
from ..files.writing import sha256
from . import tables
from .columns import IMAGES, Columns
from .parquet import image_columns, open_parquet, read_batches
from .tables import Row

_RUNS = {"run.json", "batch.json"}  # in the folders of runs
_METADATA = ("metadata.jsonl", "metadata.csv")  # of datasets' imagefolder
_IMAGES = {*SUFFIXES, *UNREAD}
_NEAR = 1000  # rows that a reader goes forward
_HIDDEN = ""  # among the endings of files that are not read


@dataclass(frozen=True, slots=True)
class Photo:
    """An image to explain.

    Attributes:
        where: its file, or the tar file, Parquet file or data set that holds it.
        name: the name of its own file; of a pair, with its folder below the source's.
        span: first byte and length in a tar file.
        row: row and column in a Parquet file, or in a data set that ``save_to_disk()`` wrote.
        sha256: checksum when the list was read.
        size: upright (width, height) in pixels.
    """

    where: str
    name: str
    span: tuple[int, int] | None = None
    row: tuple[int, str] | None = None
    sha256: str = ""
    size: tuple[int, int] = (0, 0)

    def seen(self, data: bytes | None = None) -> "Photo":
        """Return the image with its checksum and size; raise ValueError for anything else."""
        data = self.read() if data is None else data
        if not data:
            raise InvalidValueError(f"{self.name} is empty.")
        return replace(self, sha256=sha256(data), size=size_of(data, self.name))

    def open(self) -> Image.Image:
        """Read the image; raise ValueError if it is broken, or another one by now."""
        data = self.read()
        if sha256(data) != self.sha256:
            raise InvalidValueError(
                f"{self.name} has changed since the list was read. Run the same command again."
            )
        return read_image(BytesIO(data), self.name)

    def read(self) -> bytes:
        """Return the file's bytes; raise ValueError if it cannot be read."""
        if self.row is not None:
            value = _cell(self.where, *self.row)
            return value["bytes"] if isinstance(value, dict) else value
        path = path_of(self.where)
        if path.exists() and not path.is_file():
            raise InvalidValueError(f"{self.name} is no file: a folder, pipe, socket or device.")
        try:
            with path.open("rb") as file:
                first, length = self.span or (0, -1)
                file.seek(first)
                return file.read(length)
        except OSError as error:
            reason = error.strerror or error
            raise InvalidValueError(f"{self.name} cannot be read: {reason}.") from error


# Images in rows


class _Reader:
    """Reads a column forward, a few rows at a time: a row group may be larger than memory."""

    def __init__(self, key: tuple[str, str, int], row: int):
        self.key = key  # a Parquet file, a column, when it was written
        self.first = row  # of the values in memory
        self._values: Sequence[Any] = ()
        self._batches = self._read(row)

    def _read(self, row: int) -> Iterator[tuple[int, Any]]:
        with path_of(self.key[0]).open("rb") as file:
            yield from read_batches(open_parquet(file), [self.key[1]], row)

    def value(self, row: int) -> Any:
        while row >= self.first + len(self._values):
            found = next(self._batches, None)
            if found is None:
                raise InvalidValueError(
                    f"{self.key[0]} has fewer rows by now. Run the same command again."
                )
            self.first = found[0]
            self._values = found[1][0]
        return self._values[row - self.first].as_py()


_readers = deque[_Reader](maxlen=2)  # a process has two shards under way
_reading = threading.Lock()
_saved = lru_cache(maxsize=1)(tables.open_saved)


def _cell(where: str, row: int, column: str) -> Any:
    """Return a cell; in a Parquet file, from the reader that is nearest before it."""
    path = path_of(where)
    if path.is_dir():
        return _saved(where)[row][column][0].as_py()
    key = where, column, path.stat().st_mtime_ns if isinstance(path, Path) else 0
    with _reading:
        near = [one for one in _readers if one.key == key and 0 <= row - one.first < _NEAR]
        if not near:
            near = [_Reader(key, row)]
            _readers.append(near[0])
        return max(near, key=lambda one: one.first).value(row)


def _table_rows(path: AnyPath, kind: str | None, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a table, each with its image, in the table or named next to it."""
    for row in tables.table_rows(path, kind, columns.choose):
        fields = dict(row.fields)
        try:
            if row.reason:
                raise InvalidValueError(row.reason)
            column = columns.image_in(fields)
            photo = _photo(fields.pop(column), path, row.line - 1, column)
            yield row._replace(fields=fields, image=photo)
        except ValueError as error:
            yield row._replace(reason=str(error))


def _photo(cell: Any, table: AnyPath, row: int, column: str) -> Photo:
    """Return the image in a cell: ``{bytes, path}``, or either alone."""
    name = cell.get("path") if isinstance(cell, dict) else cell
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    if isinstance(data, bytes):
        own = PurePosixPath(name).name if isinstance(name, str) else ""
        return Photo(str(table), own or f"{row + 1:06d}", row=(row, column)).seen(data)
    if not isinstance(name, str) or not name.strip() or is_address(name):
        raise InvalidValueError(f"{column}={shown(name)}: write the path of an image on the disk.")
    return Photo(str(table.parents[0] / name), name).seen()


# Pairs: an image and its caption have one name, up to their endings


def _pair_rows(files: Iterable[tuple[Photo, str]], skipped: Counter[str]) -> Iterator[Row]:
    """Yield a row for each image with its caption, and a bad one for what lacks one of both;
    ``files`` come with the reason why they cannot be opened."""
    groups: dict[str, dict[Photo, str]] = {}
    for file, reason in files:
        if reason or _ending(file.name) in {*_IMAGES, ".txt"}:
            groups.setdefault(splitext(normalize("NFC", file.name))[0], {})[file] = reason
        else:
            skipped[_ending(file.name) or file.name] += 1
    for key, group in groups.items():
        yield _pair(key, group)


def _pair(key: str, group: Mapping[Photo, str]) -> Row:
    captions = [file for file in group if _ending(file.name) == ".txt"]
    images = [file for file in group if file not in captions]
    names = " and ".join(file.name for file in group)
    reason = next((f"{file.name} {reason}" for file, reason in group.items() if reason), "")
    if reason:
        pass
    elif twice := [same for same in (images, captions) if len(same) > 1]:
        same = " and ".join(file.name for file in twice[0])
        reason = f"{same} have one name. Write one image and one caption of a name."
    elif not images:
        reason = f"{key}.txt is a caption without an image next to it."
    elif not captions:
        reason = f"{names} is an image without a caption. Write one into {key}.txt."
    elif _ending(images[0].name) in UNREAD:
        reason = f"{images[0].name} is of a format that is not read. Convert it to PNG."
    else:
        try:
            text = captions[0].read().decode("utf-8-sig").strip()
            return Row(0, {"prompt": text}, names, image=images[0].seen())
        except UnicodeDecodeError:
            reason = f"{key}.txt is not UTF-8. Save it as UTF-8."
        except ValueError as error:
            reason = str(error)
    return Row(0, text=names, reason=reason)


def _tar_rows(path: AnyPath, skipped: Counter[str]) -> Iterator[Row]:
    """Yield the pairs in a tar file."""
    files = []
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                name = member.name.removeprefix("./")
                plain = member.isreg() and not member.issparse()
                if PurePosixPath(name).name.startswith("."):
                    skipped[_HIDDEN] += 1
                elif not member.isdir():
                    reason = "" if plain else "is a link, a device or a sparse file in the tar."
                    span = member.offset_data, member.size
                    files.append((Photo(str(path), name, span), reason))
    except (tarfile.TarError, EOFError) as error:
        raise InvalidValueError(
            f"{path} is not a readable tar file: {error}. A compressed one has to be unpacked."
        ) from error
    yield from _pair_rows(files, skipped)


def _ending(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


# Sources


def photo_rows(source: str, kind: str | None, columns: Columns) -> tables.Rows:
    """Yield the rows of a source of images with captions, each with its image or a reason.

    The source is a folder (of pairs, of tars, of Parquet files, or with datasets' metadata.jsonl),
    a tar, a table, or a saved data set. Raise ValueError for anything else.
    """
    path = tables.existing(source)
    path = path.absolute() if isinstance(path, Path) else path
    skipped = Counter[str]()
    rows: Iterable[Row] = ()
    is_table = False
    if path.is_dir() and not tables.is_saved(path):
        rows = _folder_rows(path, columns, skipped)
    elif _ending(path.name) == ".tar":
        rows = _tar_rows(path, skipped)
    elif is_table := bool(kind) or path.is_dir() or tables.kind_of(path.name) not in (None, "txt"):
        rows = _table_rows(path, kind, columns)
    number = 0
    for number, row in enumerate(rows, 1):
        yield row if is_table else row._replace(line=number)
    if hidden := skipped.pop(_HIDDEN, 0):
        say(f"{source}: {counted(hidden, 'file')} or folders skipped: hidden, or of a run")
    if skipped:
        names = ", ".join(f"{name} ({n:,})" for name, n in skipped.most_common(10))
        say(f"{source}: {counted(skipped.total(), 'other file')} not read: {names}")
    if not number:
        raise InvalidValueError(
            f"{source} holds no images with captions. Pass a folder or .tar with NAME.txt next to "
            "each NAME.jpg, a .jsonl, .csv, .tsv or .parquet file with a column image (or "
            "file_name) and one of captions, or a data set that was saved to the disk."
        )


def _folders(root: AnyPath, skipped: Counter[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a folder and those below it, but hidden ones and runs: its path from the root, "" or
    with "/" at the end, and its files, named likewise, with the reason why one is not opened."""
    if not isinstance(root, Path):
        tree: dict[str, dict[str, str]] = {}
        for name in tables.names_below(root):
            tree.setdefault(name[: name.rfind("/") + 1], {})[name] = ""
        yield from sorted(tree.items())
        return
    for place, folders, files in os.walk(root, onerror=refuse):
        above = Path(place)
        prefix = "" if above == root else f"{above.relative_to(root).as_posix()}/"
        names = sorted(name for name in (*folders, *files) if not name.startswith("."))
        skipped[_HIDDEN] += len(folders) + len(files) - len(names)
        if prefix and not _RUNS.isdisjoint(files):
            skipped[_HIDDEN] += 1
            folders.clear()
            continue
        found = {name: _reason_against(above / name, root) for name in names}
        names.sort(key=lambda name: not found[name])
        folders[:] = [name for name in names if name in folders and not found[name]]
        yield prefix, {prefix + name: found[name] for name in names if name not in folders}


def _reason_against(path: Path, root: Path) -> str:
    if path.is_symlink() and (path.is_dir() or not path.resolve().is_relative_to(root.resolve())):
        return "is a link out of the folder, or to a folder. Copy its target."
    if path.is_dir():
        is_open = os.access(path, os.R_OK | os.X_OK)
        return "" if is_open else "is a folder that cannot be looked into."
    return "" if path.is_file() else "is no file: a pipe, a socket, a device or a broken link."


def _folder_rows(root: AnyPath, columns: Columns, skipped: Counter[str]) -> Iterator[Row]:
    above = ""  # of the folder that imagefolder's metadata is in
    metadata = ""
    named = set[int]()
    for prefix, files in _folders(root, skipped):
        if not metadata or not prefix.startswith(above):
            above = prefix
            found = (prefix + name for name in _METADATA)
            metadata = next((name for name in found if name in files), "")
            named = set()
            for row in _table_rows(root / metadata, None, columns) if metadata else ():
                yield row
                name = str(row.image.name if row.image else row.fields.get("file_name"))
                named.add(hash(normpath(normalize("NFC", prefix + name))))
        if not metadata:
            yield from _loose_rows(root, files, columns, skipped)
            continue
        for name, reason in files.items():
            is_named = hash(normalize("NFC", name)) in named
            if reason or (not is_named and _ending(name) in _IMAGES):
                reason = reason or f"is not named in {metadata}."
                yield Row(0, text=name, reason=f"{name} {reason}")


def _loose_rows(
    root: AnyPath, files: Mapping[str, str], columns: Columns, skipped: Counter[str]
) -> Iterator[Row]:
    """Yield the rows of a folder's tars, of its Parquet files with images, and of its pairs."""
    tables.check_splits(root, files)
    pairs = []
    for name, reason in files.items():
        path = root / name
        try:
            if not reason and _ending(name) == ".tar":
                yield from _tar_rows(path, skipped)
            elif not reason and _ending(name) == ".parquet" and _has_images(path):
                yield from _table_rows(path, None, columns)
            else:
                pairs.append((Photo(str(path), name), reason))
        except InvalidValueError as error:
            yield Row(0, text=name, reason=f"{name}: {error}")
    yield from _pair_rows(pairs, skipped)


def _has_images(path: AnyPath) -> bool:
    with path.open("rb") as file:
        schema = open_parquet(file).schema_arrow
        return bool(image_columns(schema)) or not {*IMAGES}.isdisjoint(schema.names)
