"""Images to explain: files with captions, members of tar files, rows of tables and data sets.

photo.jpg photo.txt                                     # pairs, in a folder or a tar
{"image": "photo.jpg", "prompt": "a cat on a sofa"}     # next to the list's file
"""

import os
import tarfile
import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from itertools import accumulate
from pathlib import Path, PurePosixPath
from posixpath import normpath, splitext
from typing import Any
from unicodedata import normalize

from PIL import Image

from ..errors import InvalidValueError
from ..files.addresses import AnyPath, is_address, path_of
from ..files.images import SUFFIXES, UNREAD, read_image, size_of
from ..files.terminal import counted, say, shown
from ..files.writing import sha256
from . import tables
from .columns import IMAGES, Columns
from .parquet import image_columns, open_parquet, read_batches
from .tables import Row

_RUNS = {"run.json", "batch.json"}  # in the folders of runs
_METADATA = ("metadata.jsonl", "metadata.csv")  # of datasets' imagefolder
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
            return _bytes_in(self.where, *self.row)
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


def _bytes_in(where: str, row: int, column: str) -> bytes:
    path = path_of(where)
    if path.is_dir():
        value = _saved(where)[row][column]
    else:
        changed = path.stat().st_mtime_ns if isinstance(path, Path) else 0
        starts = _starts(where, changed)
        if row >= starts[-1]:
            raise InvalidValueError(f"{where} has fewer rows by now. Run the same command again.")
        group = bisect_right(starts, row) - 1
        value = _value_in_group((where, column, group, changed), row - starts[group])
    return value["bytes"] if isinstance(value, dict) else value


_saved = lru_cache(maxsize=1)(tables.open_saved)


@lru_cache(maxsize=1)
def _starts(where: str, _changed: int) -> list[int]:
    """Return the first row of each row group of a Parquet file, and the number of all rows."""
    with path_of(where).open("rb") as file:
        groups = open_parquet(file).metadata
        sizes = [groups.row_group(group).num_rows for group in range(groups.num_row_groups)]
    return [0, *accumulate(sizes)]


_Group = tuple[str, str, int, int]  # a Parquet file, a column, a row group, when it was written


class _GroupReader:
    """Reads a column of a row group forward, a few rows at a time: a group may be larger than
    memory."""

    def __init__(self, group: _Group):
        self.group = group
        self.first = 0  # row of the values in memory
        self._values: Sequence[Any] = ()
        self._batches = self._read()

    def value(self, row: int) -> Any:
        while row >= self.first + len(self._values):
            self.first += len(self._values)
            self._values = next(self._batches)
        return self._values[row - self.first].as_py()

    def _read(self) -> Iterator[Sequence[Any]]:
        where, column, group, _ = self.group
        with path_of(where).open("rb") as file:
            opened = open_parquet(file)
            for batch in read_batches(opened, [column], row_groups=[group]):
                yield batch[0]


_readers = deque[_GroupReader](maxlen=2)  # a process has two shards under way
_reading = threading.Lock()


def _value_in_group(group: _Group, row: int) -> Any:
    """Return a value of a row group's column from the reader that is nearest before it."""
    with _reading:
        readers = [reader for reader in _readers if reader.group == group and reader.first <= row]
        if not readers:
            readers = [_GroupReader(group)]
            _readers.append(readers[0])
        return max(readers, key=lambda reader: reader.first).value(row)


def _table_rows(path: AnyPath, kind: str | None, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a table, each with its image, in the table or named next to it."""
    folder = path if not isinstance(path, Path) else path.parent
    folder = folder if isinstance(folder, Path) else folder.parents[0]
    for row in tables.table_rows(path, kind, columns.choose):
        fields = dict(row.fields)
        try:
            if row.reason:
                raise InvalidValueError(row.reason)
            column = columns.image_in(fields)
            value = fields.pop(column)
            at = row.line - 1, column
            yield row._replace(fields=fields, image=_photo(value, _absolute(path), at, folder))
        except ValueError as error:
            yield row._replace(reason=str(error))


def _photo(cell: Any, where: str, at: tuple[int, str], folder: AnyPath) -> Photo:
    """Return the image in a cell at a row and a column: ``{bytes, path}``, or either alone."""
    name = cell.get("path") if isinstance(cell, dict) else cell
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    if isinstance(data, bytes):
        own = PurePosixPath(name).name if isinstance(name, str) else ""
        return Photo(where, own or f"{at[0] + 1:06d}", row=at).seen(data)
    if not isinstance(name, str) or not name.strip() or is_address(name):
        raise InvalidValueError(f"{at[1]}={shown(name)}: write the path of an image on the disk.")
    return Photo(_absolute(folder / name), name).seen()


def _absolute(path: AnyPath) -> str:
    return str(path.absolute() if isinstance(path, Path) else path)


# Pairs: an image and its caption have one name, up to their endings


def _pair_rows(files: Iterable[tuple[Photo, str]], skipped: Counter[str]) -> Iterator[Row]:
    """Yield a row for each image with its caption, and a bad one for what lacks one of both;
    ``files`` come with the reason why they cannot be opened."""
    groups: dict[str, dict[Photo, str]] = {}
    for file, reason in files:
        if reason or _ending(file.name) in (*SUFFIXES, *UNREAD, ".txt"):
            groups.setdefault(splitext(normalize("NFC", file.name))[0], {})[file] = reason
        else:
            skipped[_ending(file.name) or file.name] += 1
    for key, group in groups.items():
        names = " and ".join(file.name for file in group)
        try:
            image, caption = _pair(key, group)
            text = caption.read().decode("utf-8-sig").strip()
            yield Row(0, {"prompt": text}, names, image=image.seen())
        except UnicodeDecodeError:
            yield Row(0, text=names, reason=f"{key}.txt is not UTF-8. Save it as UTF-8.")
        except ValueError as error:
            yield Row(0, text=names, reason=str(error))


def _pair(key: str, group: Mapping[Photo, str]) -> tuple[Photo, Photo]:
    captions = [file for file in group if _ending(file.name) == ".txt"]
    images = [file for file in group if file not in captions]
    reasons = [f"{file.name} {reason}" for file, reason in group.items() if reason]
    if twice := [same for same in (images, captions) if len(same) > 1]:
        names = " and ".join(file.name for file in twice[0])
        reasons.append(f"{names} have one name. Write one image and one caption of a name.")
    elif not images:
        reasons.append(f"{key}.txt is a caption without an image next to it.")
    elif not captions:
        name = images[0].name
        reasons.append(f"{name} is an image without a caption. Write one into {key}.txt.")
    elif _ending(images[0].name) in UNREAD:
        reasons.append(f"{images[0].name} is of a format that is not read. Convert it to PNG.")
    if reasons:
        raise InvalidValueError(reasons[0])
    return images[0], captions[0]


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
                    files.append((Photo(_absolute(path), name, span), reason))
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
    skipped = Counter[str]()
    rows: Iterable[Row] = ()
    if path.is_dir() and not tables.is_saved(path):
        rows = _folder_rows(path, columns, skipped)
    elif _ending(path.name) == ".tar":
        rows = _tar_rows(path, skipped)
    elif kind or tables.kind_of(path.name) not in (None, "txt") or tables.is_saved(path):
        rows = _table_rows(path, kind, columns)
    number = 0
    for number, row in enumerate(rows, 1):
        yield row._replace(line=row.line or number)
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


def _folders(
    root: AnyPath, skipped: Counter[str]
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Yield a folder and those below it, without hidden ones: its path from the root, "" or with
    "/" at the end, and, named likewise, its files and what cannot be opened, with the reason."""
    if not isinstance(root, Path):
        tree: dict[str, list[str]] = {"": []}
        for name in tables.names_below(root):
            folder, slash, _ = name.rpartition("/")
            tree.setdefault(folder + slash, []).append(name)
        yield from ((prefix, tree[prefix], {}) for prefix in sorted(tree))
        return
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        folders = list[str]()
        files = list[str]()
        bad = dict[str, str]()
        for entry in sorted(os.scandir(root / prefix), key=lambda entry: entry.name):
            name = prefix + entry.name
            if entry.name.startswith("."):
                skipped[_HIDDEN] += 1
            elif reason := _reason_against(entry, root):
                bad[name] = reason
            elif entry.is_dir():
                folders.append(f"{name}/")
            else:
                files.append(name)
        if prefix and any(prefix + name in files for name in _RUNS):
            skipped[_HIDDEN] += 1
        else:
            waiting += reversed(folders)
            yield prefix, files, bad


def _reason_against(entry: os.DirEntry[str], root: Path) -> str:
    is_link = entry.is_symlink()
    if is_link and (entry.is_dir() or not Path(entry).resolve().is_relative_to(root.resolve())):
        return "is a link out of the folder, or to a folder. Copy its target."
    if entry.is_dir() and not os.access(entry, os.R_OK | os.X_OK):
        return "is a folder that cannot be looked into."
    is_openable = entry.is_dir() or entry.is_file()
    return "" if is_openable else "is no file: a pipe, a socket, a device or a broken link."


def _folder_rows(root: AnyPath, columns: Columns, skipped: Counter[str]) -> Iterator[Row]:
    above = ""  # of the folder that imagefolder's metadata is in
    metadata = ""
    named = set[int]()
    for prefix, names, bad in _folders(root, skipped):
        if not metadata or not prefix.startswith(above):
            above = prefix
            found = (prefix + name for name in _METADATA if prefix + name in names)
            metadata = next((name for name in found if _names_files(root / name)), "")
            named = set()
            for row in _table_rows(root / metadata, None, columns) if metadata else ():
                yield row._replace(line=0)
                name = str(row.image.name if row.image else row.fields.get("file_name"))
                named.add(hash(normpath(normalize("NFC", prefix + name))))
        if metadata:
            for name in (*bad, *names):
                is_named = hash(normalize("NFC", name)) in named
                if name in bad or (not is_named and _ending(name) in (*SUFFIXES, *UNREAD)):
                    reason = bad.get(name, f"is not named in {metadata}.")
                    yield Row(0, text=name, reason=f"{name} {reason}")
        else:
            yield from _packed_rows(root, names, columns, skipped)
            alone = [n for n in (*bad, *names) if _ending(n) not in (".tar", ".parquet")]
            files = ((Photo(_absolute(root / name), name), bad.get(name, "")) for name in alone)
            yield from _pair_rows(files, skipped)


def _packed_rows(
    root: AnyPath, names: Sequence[str], columns: Columns, skipped: Counter[str]
) -> Iterator[Row]:
    """Yield the rows of a folder's tars, and of its Parquet files with images."""
    tables.check_splits(root, names)
    for name in names:
        try:
            if _ending(name) == ".tar":
                yield from _tar_rows(root / name, skipped)
            elif _ending(name) == ".parquet" and _has_images(root / name):
                yield from (r._replace(line=0) for r in _table_rows(root / name, None, columns))
            elif _ending(name) == ".parquet":
                skipped[name] += 1
        except InvalidValueError as error:
            yield Row(0, text=name, reason=f"{name}: {error}")


def _names_files(path: AnyPath) -> bool:
    with path.open("rb") as file:
        return b"file_name" in file.readline()


def _has_images(path: AnyPath) -> bool:
    with path.open("rb") as file:
        schema = open_parquet(file).schema_arrow
        return bool(image_columns(schema)) or not {*IMAGES}.isdisjoint(schema.names)
