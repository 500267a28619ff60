"""Images to explain: files with captions, members of tar files, rows of tables and data sets.

photo.jpg photo.txt                                     # pairs, in a folder or a tar
{"image": "photo.jpg", "prompt": "a cat on a sofa"}     # next to the list's file
"""

import os
import stat
import tarfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import BytesIO
from itertools import accumulate
from pathlib import Path, PurePosixPath
from posixpath import normpath, splitext
from typing import Any, BinaryIO, NamedTuple
from unicodedata import normalize

from PIL import Image

from ..errors import InvalidValueError
from ..files.addresses import AnyPath, is_address, path_of
from ..files.images import SUFFIXES, UNREAD, read_image, size_of
from ..files.terminal import counted, say, shown
from ..files.writing import sha256
from .columns import IMAGES, Columns
from .tables import (
    Row,
    check_splits,
    image_columns,
    is_saved,
    kind_of,
    names_below,
    open_parquet,
    open_saved,
    table_rows,
)

_RUNS = {"run.json", "batch.json"}  # in the folders of runs
_METADATA = ("metadata.jsonl", "metadata.csv")  # of datasets' imagefolder
_AT_ONCE = 16  # images of a Parquet file in memory


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

    def seen(self, data: bytes) -> "Photo":
        """Return the image with its checksum and size; raise ValueError if it is none."""
        if not data:
            raise InvalidValueError(f"{self.name} is empty.")
        return replace(self, sha256=sha256(data), size=size_of(data, self.name))

    def open(self) -> Image.Image:
        """Read the image; raise ValueError if it is broken, or another one by now."""
        data = self._read()
        if sha256(data) != self.sha256:
            raise InvalidValueError(
                f"{self.name} has changed since the list was read. Run the same command again."
            )
        return read_image(BytesIO(data), self.name)

    def _read(self) -> bytes:
        if self.row is not None:
            return _bytes_in(self.where, *self.row)
        with path_of(self.where).open("rb") as file:
            return _at(file, self.span or (0, -1))


def _at(file: BinaryIO, span: tuple[int, int]) -> bytes:
    file.seek(span[0])
    return file.read(span[1])


# Images in rows


def _bytes_in(where: str, row: int, column: str) -> bytes:
    if Path(where).is_dir():
        value = _saved(where)[row][column]
    else:
        path = path_of(where)
        changed = path.stat().st_mtime_ns if isinstance(path, Path) else 0
        value = _parquet(where, column, changed).value(row)
    return value["bytes"] if isinstance(value, dict) else value


_saved = lru_cache(maxsize=1)(open_saved)


@lru_cache(maxsize=1)
def _parquet(where: str, column: str, _changed: int) -> "_Cursor":
    return _Cursor(path_of(where).open("rb"), column)


class _Cursor:
    """A column of a Parquet file, which may be larger than memory; read forwards from row to row."""

    def __init__(self, file: BinaryIO, column: str):
        self.file, self.column = open_parquet(file), column
        groups = self.file.metadata
        sizes = [groups.row_group(group).num_rows for group in range(groups.num_row_groups)]
        self.starts = [0, *accumulate(sizes)]
        self.group, self.first = -1, 0
        self.values: list[Any] = []

    def value(self, row: int) -> Any:
        if row >= self.starts[-1]:
            raise InvalidValueError("The list has fewer rows by now. Run the same command again.")
        group = bisect_right(self.starts, row) - 1
        if group != self.group or row < self.first:
            self.group, self.first, self.values = group, self.starts[group], []
            options = {"row_groups": [group], "columns": [self.column], "use_threads": False}
            self.batches = self.file.iter_batches(_AT_ONCE, **options)
        while row >= self.first + len(self.values):
            self.first += len(self.values)
            self.values = next(self.batches)[0].to_pylist()
        return self.values[row - self.first]


def _with_photo(row: Row, columns: Columns, where: AnyPath, folder: AnyPath) -> Row:
    """Return the row of a list with its image; ``where`` holds it, or it is a file named from
    ``folder``."""
    if row.reason:
        return row
    fields = dict(row.fields)
    try:
        column = columns.image_in(tuple(fields))
        value = fields.pop(column)
        data, name = value, ""
        if isinstance(value, dict):
            data, name = value.get("bytes"), value.get("path") or ""
        elif isinstance(value, str):
            data, name = None, value
        if data is None and not name.strip():
            raise InvalidValueError(f"{column} is missing. Write the path of an image.")
        if data is None:
            photo = photo_at(folder, name)
        elif isinstance(data, bytes):
            at = row.line - 1, column
            name = PurePosixPath(name).name or f"{row.line:06d}"
            photo = Photo(_absolute(where), name, row=at).seen(data)
        else:
            raise InvalidValueError(f"{column}={shown(value)}: write the path of an image.")
        return row._replace(fields=fields, image=photo)
    except ValueError as error:
        return row._replace(reason=str(error))


def photo_at(folder: AnyPath, name: str, shown_as: str = "") -> Photo:
    """Return the image of this name, relative to a folder; raise ValueError for none."""
    if is_address(name):
        raise InvalidValueError(
            f"{shown(name)} is an address. Download the image, and write a path relative to the list."
        )
    path = folder / name
    return Photo(_absolute(path), shown_as or name).seen(_file_bytes(path, name))


def _file_bytes(path: AnyPath, name: str) -> bytes:
    try:
        if isinstance(path, Path) and not stat.S_ISREG(path.stat().st_mode):
            raise InvalidValueError(f"{name} is no file but a folder, pipe, socket or device.")
        return path.read_bytes()
    except OSError as error:
        raise InvalidValueError(f"{name} cannot be read: {error.strerror or error}.") from error


def _absolute(path: AnyPath) -> str:
    return str(path.absolute() if isinstance(path, Path) else path)


# Pairs: an image and its caption have one name, up to their endings


class _Member(NamedTuple):
    """A file of a folder or a tar: its name, the image that it may be, and how it is read."""

    name: str
    photo: Photo
    read: Callable[[], bytes]
    reason: str = ""


def _pair_rows(members: Iterable[_Member], skipped: Counter[str], tables: str) -> Iterator[Row]:
    """Yield a row for each image with its caption, and a bad one for what lacks one of both."""
    groups: dict[str, list[_Member]] = {}
    for member in members:
        if member.reason or ending(member.name) in (*SUFFIXES, *UNREAD, ".txt"):
            groups.setdefault(splitext(normalize("NFC", member.name))[0], []).append(member)
        else:
            skipped[PurePosixPath(member.name).suffix or member.name] += 1
    lower = Counter(key.lower() for key in groups)
    for key, group in groups.items():
        twin = " Another name here differs only in case." if lower[key.lower()] > 1 else ""
        names = " and ".join(member.name for member in group)
        try:
            image, caption = _pair(key, group, twin or tables)
            text = caption.read().decode("utf-8-sig").strip()
            photo = image.photo.seen(image.read())
            yield Row(0, {"prompt": text}, names, image=photo)
        except UnicodeDecodeError:
            yield Row(0, text=names, reason=f"{key}.txt is not UTF-8. Save it as UTF-8.")
        except (ValueError, OSError) as error:
            yield Row(0, text=names, reason=str(error))


def _pair(key: str, group: Sequence[_Member], hint: str) -> tuple[_Member, _Member]:
    captions = [member for member in group if member.name.lower().endswith(".txt")]
    images = [member for member in group if member not in captions]
    for member in group:
        if member.reason:
            raise InvalidValueError(f"{member.name} {member.reason}")
    if len(images) > 1 or len(captions) > 1:
        twice = " and ".join(member.name for member in (images if len(images) > 1 else captions))
        raise InvalidValueError(f"{twice} have one name. Write a pair: one image, one caption.")
    if not images:
        raise InvalidValueError(f"{key}.txt is a caption without an image next to it.{hint}")
    [image] = images
    if ending(image.name) in UNREAD:
        raise InvalidValueError(f"{image.name} is of a format that is not read. Convert it to PNG.")
    if not captions:
        raise InvalidValueError(
            f"{image.name} is an image without a caption. Write one into {key}.txt.{hint}"
        )
    return image, captions[0]


def _tar_rows(path: AnyPath, skipped: Counter[str]) -> Iterator[Row]:
    """Yield the pairs in a tar file."""
    where = _absolute(path)
    with path.open("rb") as file:
        members = []
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for found in tar:
                    tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                    name = found.name.removeprefix("./")
                    span = found.offset_data, found.size
                    plain = found.isreg() and not found.issparse()
                    reason = "" if plain else "is a link, a sparse file or a device. Pack a file."
                    if PurePosixPath(name).name.startswith("."):
                        skipped[""] += 1
                    elif not found.isdir():
                        photo = Photo(where, name, span)
                        members.append(_Member(name, photo, partial(_at, file, span), reason))
        except (tarfile.TarError, EOFError) as error:
            raise InvalidValueError(
                f"{path} is not a readable tar file: {error}. A compressed one has to be unpacked."
            ) from error
        yield from _pair_rows(members, skipped, "")


# Sources


def photo_rows(source: str, kind: str | None, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a source of images with captions, each with its image or a reason.

    The source is a folder (of pairs, of tars, of Parquet files, or with datasets' metadata.jsonl),
    a tar, a table, or a saved data set. Raise ValueError for anything else.
    """
    path = path_of(source)
    skipped = Counter[str]()
    rows: Iterable[Row] = ()
    if path.is_dir() and not is_saved(path):
        rows = _folder_rows(path, columns, skipped)
    elif path.name.lower().endswith(".tar"):
        rows = _tar_rows(path, skipped)
    elif kind or kind_of(path.name) not in (None, "txt") or is_saved(path):
        rows = _table_rows(path, kind, columns)
    line = 0
    for number, row in enumerate(rows, 1):
        line = row.line or number
        yield row._replace(line=line)
    if hidden := skipped.pop("", 0):
        say(f"{counted(hidden, 'hidden file')} or folders of runs skipped in {source}")
    if skipped:
        names = ", ".join(f"{name} ({n:,})" for name, n in skipped.most_common(10))
        say(f"{counted(skipped.total(), 'other file')} not read in {source}: {names}")
    if not line:
        raise InvalidValueError(
            f"{source} holds no images with captions. Pass a folder or .tar with NAME.txt next to "
            "each NAME.jpg, a .jsonl, .csv, .tsv or .parquet file with a column image (or "
            "file_name) and a column of captions, or a data set that was saved to the disk."
        )


def _table_rows(path: AnyPath, kind: str | None, columns: Columns) -> Iterator[Row]:
    folder = path.parent if isinstance(path, Path) else path.parents[0]
    for row in table_rows(path, kind, columns.choose):
        yield _with_photo(row, columns, path, folder)


class _Folder(NamedTuple):
    """A folder below a source: its path from there, "" or with "/" at the end, and, named likewise,
    its files and what cannot be opened, with the reason."""

    prefix: str
    files: list[str]
    bad: dict[str, str]


def _folders(root: AnyPath, skipped: Counter[str]) -> Iterator[_Folder]:
    """Yield a folder and those below it, each before what is in it, without what is hidden."""
    if not isinstance(root, Path):
        tree: dict[str, list[str]] = {"": []}
        for name in names_below(root):
            folder, slash, _ = name.rpartition("/")
            tree.setdefault(folder + slash, []).append(name)
        yield from (_Folder(prefix, tree[prefix], {}) for prefix in sorted(tree))
        return
    real, waiting = root.resolve(), [""]
    while waiting:
        found, folders = _Folder(waiting.pop(), [], {}), []
        try:
            entries = sorted(os.scandir(root / found.prefix), key=lambda entry: entry.name)
        except OSError as error:
            found.bad[found.prefix] = f"cannot be looked into: {error.strerror}."
            entries = []
        if found.prefix and not _RUNS.isdisjoint(entry.name for entry in entries):
            skipped[""] += 1
            continue
        for entry in entries:
            name = found.prefix + entry.name
            if entry.name.startswith("."):
                skipped[""] += 1
            elif entry.is_symlink() and (entry.is_dir() or not _is_inside(entry, real)):
                found.bad[name] = "is a link out of the folder, or to a folder. Copy its target."
            elif entry.is_dir():
                folders.append(f"{name}/")
            elif entry.is_file():
                found.files.append(name)
            else:
                found.bad[name] = "is no file: a pipe, a socket, a device or a broken link."
        waiting += reversed(folders)
        yield found


def _is_inside(link: os.DirEntry[str], folder: Path) -> bool:
    return Path(link.path).resolve().is_relative_to(folder)


def _folder_rows(root: AnyPath, columns: Columns, skipped: Counter[str]) -> Iterator[Row]:
    described, metadata, named = "", "", set[int]()  # the folder that imagefolder's metadata is in
    for prefix, files, bad in _folders(root, skipped):
        if not metadata or not prefix.startswith(described):
            tables = (f"{prefix}{name}" for name in _METADATA if f"{prefix}{name}" in files)
            metadata = next((name for name in tables if _names_files(root / name)), "")
            if metadata:
                described, named = prefix, set()
                for row in table_rows(root / metadata, None, columns.choose):
                    name = str(row.fields.get("file_name"))
                    named.add(hash(normpath(normalize("NFC", prefix + name))))
                    yield _with_photo(row, columns, root / metadata, root / prefix)._replace(line=0)
        members = [_Member(name, Photo("", ""), bytes, reason) for name, reason in bad.items()]
        if metadata:
            yield from (Row(0, text=m.name, reason=f"{m.name} {m.reason}") for m in members)
            images = (name for name in files if ending(name) in (*SUFFIXES, *UNREAD))
            for name in images:
                if hash(normalize("NFC", name)) not in named:
                    yield Row(0, text=name, reason=f"{name} is an image not named in {metadata}.")
            continue
        yield from _packed_rows(root, files, columns, skipped)
        lists = [name for name in files if ending(name) in (".csv", ".tsv", ".json", ".jsonl")]
        hint = f" {lists[0]} is no metadata.jsonl or .csv with a column file_name." if lists else ""
        for name in files:
            if ending(name) not in (".tar", ".parquet"):
                path = root / name
                read = partial(_file_bytes, path, name)
                members.append(_Member(name, Photo(_absolute(path), name), read))
        yield from _pair_rows(members, skipped, hint)


def _packed_rows(
    root: AnyPath, files: Sequence[str], columns: Columns, skipped: Counter[str]
) -> Iterator[Row]:
    """Yield the rows of a folder's tars, and of its Parquet files with images."""
    check_splits(root, files)
    for name in files:
        try:
            if ending(name) == ".tar":
                yield from _tar_rows(root / name, skipped)
            elif ending(name) == ".parquet" and _has_images(root / name):
                for row in _table_rows(root / name, None, columns):
                    yield row._replace(line=0)
            elif ending(name) == ".parquet":
                skipped[name] += 1
        except InvalidValueError as error:
            yield Row(0, text=name, reason=f"{name}: {error}")


def ending(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _names_files(path: AnyPath) -> bool:
    with path.open("rb") as file:
        return b"file_name" in file.readline()


def _has_images(path: AnyPath) -> bool:
    with path.open("rb") as file:
        schema = open_parquet(file).schema_arrow
        return bool(image_columns(schema)) or not {*IMAGES}.isdisjoint(schema.names)
