"""Images to explain, and where a list finds them: files, members of tar files, rows of a data set.

{"image": "photo.jpg", "prompt": "a cat on a sofa"}     # next to the list's file
photo.jpg photo.txt                                     # pairs, in a folder or a tar
"""

from __future__ import annotations

import json
import tarfile
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

from PIL import Image

from ...errors import InvalidValueError
from ...files.addresses import AnyPath, is_address, path_of
from ...files.images import SUFFIXES, read_image, size_of
from ...files.paths import files_below
from ...files.terminal import shown
from ...files.writing import sha256
from .values import ID, decoded, parsed

_RUNS = {"run.json", "batch.json"}  # in the folders of runs


@dataclass(frozen=True, slots=True)
class Photo:
    """An image to explain.

    Attributes:
        where: its file, or the tar file, Parquet file or data set that holds it.
        name: the name of its own file; of a pair, with its folder below the source's.
        span: first byte and length in a tar file.
        row: row in a Parquet file, or in a data set that ``save_to_disk()`` wrote.
        sha256: checksum when the list was read.
        size: upright (width, height) in pixels.
    """

    where: str
    name: str
    span: tuple[int, int] | None = None
    row: int | None = None
    sha256: str = ""
    size: tuple[int, int] = (0, 0)

    def seen(self, data: bytes | None = None) -> Photo:
        """Return the image with its checksum and size; raise ValueError if it is none, OSError if
        it cannot be read."""
        data = self.read() if data is None else data
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
        if self.row is not None:
            image = _image_at(self.where, self.row)
            return image["bytes"] or Path(image["path"]).read_bytes()
        with path_of(self.where).open("rb") as file:
            return _at(file, self.span or (0, -1))


def _at(file: BinaryIO, span: tuple[int, int]) -> bytes:
    file.seek(span[0])
    return file.read(span[1])


class Found(NamedTuple):
    """A list, its kind, and the function that finds an image by its name in the list."""

    data: bytes
    kind: str
    find: Callable[[str], Photo]


def json_lines(rows: Iterable[Mapping[str, object]]) -> bytes:
    """Write rows as JSON; other values, such as bytes, become objects, which no field accepts."""
    texts = (json.dumps(row, default=lambda value: {"type": type(value).__name__}) for row in rows)
    return "".join(f"{text}\n" for text in texts).encode()


def photo_in(folder: AnyPath, name: str) -> Photo:
    """Return the image of this name, relative to a folder; raise ValueError for none."""
    if is_address(name):
        raise InvalidValueError(
            f"image={shown(name)} is an address. Write a path, relative to the list."
        )
    where = folder / name
    where = where.absolute() if isinstance(where, Path) else where
    try:
        return Photo(str(where), where.name).seen()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidValueError(f"image={shown(name)} cannot be read: {reason}.") from error


def find_photos(path: AnyPath) -> Found | None:
    """Return the list that a tar file, or a folder of images with captions, is, or None."""
    if not (isinstance(path, Path) and path.is_dir()):
        return _pairs(_members([path])) if path.name.lower().endswith(".tar") else None
    described = path / "metadata.jsonl"  # as the Hub's imagefolder has it
    if described.is_file() and b'"file_name"' in (data := described.read_bytes()):
        lines = map(_with_image, data.splitlines(keepends=True))
        return Found(b"".join(lines), "rows", partial(photo_in, path))
    files = _files_of_photos(path)
    if tars := [file for file in files if file.suffix.lower() == ".tar"]:
        return _pairs(_members(tars))
    captions = {file.with_suffix("") for file in files if file.suffix == ".txt"}
    photos = (file for file in files if file.suffix.lower() in SUFFIXES)
    if captions.isdisjoint(file.with_suffix("") for file in photos):
        return None
    return _pairs(_member(file, path) for file in files)


def _with_image(line: bytes) -> bytes:
    """Return a line of imagefolder's metadata with the image under ``image``."""
    try:
        row = parsed(decoded(line))
        row["image"] = row.pop("file_name")
    except (ValueError, TypeError, KeyError, AttributeError):  # a bad line, reported as it is
        return line
    return json.dumps(row).encode() + b"\n"


# Pairs: an image and its caption have one name, up to its ending


class _Member(NamedTuple):
    """A file in a folder or tar: its name, without and from the dot that ends it, the image that it
    may be, and a function that reads it."""

    key: str
    ending: str
    photo: Photo
    read: Callable[[], bytes]


def _files_of_photos(folder: Path) -> list[Path]:
    """Return the files of a folder and those in it, without what is hidden and runs' folders."""
    names = [PurePosixPath(name) for name in files_below(folder)]
    runs = {name.parent for name in names if name.name in _RUNS}
    kept = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return [folder / name for name in kept if runs.isdisjoint(name.parents)]


def _member(file: Path, folder: Path) -> _Member:
    name = file.relative_to(folder)
    key, photo = name.with_suffix("").as_posix(), Photo(str(file.absolute()), name.as_posix())
    return _Member(key, file.suffix, photo, file.read_bytes)


def _members(tars: Iterable[AnyPath]) -> Iterator[_Member]:
    """Yield the files of tar files, in which a name ends at its first dot, as webdataset has it."""
    for path in tars:
        where = str(path.absolute() if isinstance(path, Path) else path)
        try:
            with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
                for member in filter(tarfile.TarInfo.isreg, tar):
                    folder, slash, name = member.name.rpartition("/")
                    key, dot, ending = name.partition(".")
                    span = member.offset_data, member.size
                    photo, read = Photo(where, name, span), partial(_at, file, span)
                    yield _Member(folder + slash + key, dot + ending, photo, read)
        except tarfile.TarError as error:
            raise InvalidValueError(f"{path} is not a readable tar file: {error}") from error


def _pairs(members: Iterable[_Member]) -> Found:
    """Return a line for each image with its caption; what lacks one of both is a bad line."""
    photos, captions = dict[str, Photo | str](), dict[str, str]()
    for key, ending, photo, read in members:
        try:
            if ending.lower() in SUFFIXES:
                twice = f"{photo.name} is another image of this name. Rename it, with a caption."
                photos[key] = twice if key in photos else photo.seen(read())
            elif ending == ".txt":
                captions[key] = decoded(read().removeprefix(BOM_UTF8)).strip()
        except (ValueError, OSError) as error:
            photos[key] = f"{photo.name}: {error}"
    lines = []
    for key in {**photos, **captions}:
        if key not in photos:
            photos[key] = f"{key}.txt is a caption without an image next to it."
        elif key not in captions and isinstance(photos[key], Photo):
            photos[key] = f"{key} is an image without a caption. Write one into {key}.txt."
        name = key.replace("/", "-")
        own = {"id": name} if ID.fullmatch(name) else {}
        lines.append({"image": key, "prompt": captions.get(key, ""), **own})
    return Found(json_lines(lines), "jsonl", partial(_found, photos))


def _found(photos: Mapping[str, Photo | str], key: str) -> Photo:
    found = photos[key]
    if isinstance(found, str):
        raise InvalidValueError(found)
    return found


# Data sets


def rows_of(rows: Any, where: str, *, saved: bool) -> Found:
    """Return a data set as a list, see :func:`list_rows`."""
    return list_rows(_undecoded(rows), where, saved=saved)


def list_rows(rows: Iterable[dict[str, Any]], where: str, *, saved: bool) -> Found:
    """Return rows, whose images are ``{bytes, path}``, as a list; ``saved`` ones hold their images,
    of others only files are read."""
    found = []
    for number, row in enumerate(rows):
        image = row.get("image")
        if isinstance(image, dict) and image.keys() == {"bytes", "path"}:
            path = image["path"] if image["bytes"] is None else b""
            row = {**row, "image": str(number) if saved else path}
        found.append(row)
    find = partial(_in_saved if saved else photo_in, Path(where).absolute())
    return Found(json_lines(found), "rows", find)


def _in_saved(where: Path, row: str) -> Photo:
    name = _image_at(str(where), int(row))["path"] or row
    return Photo(str(where), Path(name).name, row=int(row)).seen()


def _image_at(where: str, row: int) -> dict[str, Any]:
    """Return an image's ``{bytes, path}``."""
    if Path(where).is_dir():
        return cast(dict[str, Any], _saved(where)[row]["image"])
    written = Path(where).stat().st_mtime_ns  # what was read of an earlier file is not its rows
    for group, rows in enumerate(_row_groups(where, written)):
        if row < rows:
            return _row_group(where, written, group)[row]
        row -= rows
    raise InvalidValueError(f"{where} has fewer rows by now. Run the same command again.")


@lru_cache(maxsize=1)
def _row_groups(where: str, _written: int) -> list[int]:
    """Return the number of rows of each row group of a Parquet file."""
    from pyarrow import parquet

    found = parquet.read_metadata(where)
    return [found.row_group(group).num_rows for group in range(found.num_row_groups)]


@lru_cache(maxsize=2)  # a file may be larger than memory
def _row_group(where: str, _written: int, group: int) -> list[dict[str, Any]]:
    from pyarrow import parquet

    read = parquet.ParquetFile(where).read_row_group(group, columns=["image"])
    return cast(list[dict[str, Any]], read["image"].to_pylist())


@lru_cache(maxsize=1)
def _saved(folder: str) -> Any:
    import datasets

    found = datasets.load_from_disk(folder)
    [rows] = found.values() if isinstance(found, dict) else [found]
    return _undecoded(rows)


def _undecoded(rows: Any) -> Any:
    """Return a data set with its images as bytes."""
    from datasets import Image as Feature

    held = isinstance((rows.features or {}).get("image"), Feature)
    return rows.cast_column("image", Feature(decode=False)) if held else rows
