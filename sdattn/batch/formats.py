"""How a shard holds its items: a folder for each, or a tar file. A new format is a class here.

folder      shards/000012/ID-1b2c3d/        an item's files, as `sdattn generate` writes them
webdataset  shards/000012-3fa9c1.tar        ID.png, ID.maps.safetensors, ID.json (run.json), ...

Names carry a checksum of what they name, so whatever is written at once never mixes.
"""

from __future__ import annotations

import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from ..errors import InvalidValueError, MissingFileError
from ..files.place import Files, Place
from ..files.writing import file_sha256, sha256
from ..runs.info import read_info
from .records import Manifest, ShardFile, ShardRecord

RUN = "run.json"
_SHORT = {"image.png": "png", RUN: "json"}  # names in a tar
_LONG = {short: name for name, short in _SHORT.items()}
_CHECKSUM = 6  # its digits in names


class Format(ABC):
    """A format, for the shards of one run.

    with FORMATS["webdataset"](place).writer(12) as writer:
        writer.add("000768", files)
        data, locations = writer.finish()
    """

    ending: ClassVar[str | None]  # None: no file holds all items

    def __init__(self, place: Place):
        self.place = place

    @abstractmethod
    def writer(self, number: int) -> ShardWriter: ...

    @abstractmethod
    def read(
        self, location: str, item: str, names: Collection[str] | None = None
    ) -> dict[str, bytes]:
        """Return an item's files, or only the existing ones of these names. Raise FileNotFoundError
        if it is not there, ValueError if the shard is damaged."""

    def is_there(self, record: ShardRecord) -> bool:
        """Check that a shard's data is there with its size, in this format."""
        if record.data is None:
            return not record.whole
        name = record.data.name
        return name.endswith(self.ending or "") and self.place.size(name) == record.data.bytes

    def items(self, record: ShardRecord | None, number: int) -> Iterator[tuple[str, str]]:
        """Yield (location, id) of the items that a shard's record names."""
        for row in record.whole if record else ():
            if row["place"].endswith(self.ending or ""):  # a run may have got another format
                yield row["place"], row["id"]


class ShardWriter(ExitStack, ABC):
    """Writes a shard's items in their order. Nothing has its name before :meth:`finish`; what was
    not finished is removed at the end of the block."""

    def __init__(self, format: Format, number: int):
        super().__init__()
        self.format = format
        self.number = number

    @abstractmethod
    def add(self, item: str, files: Files) -> None: ...

    @abstractmethod
    def finish(self) -> tuple[ShardFile | None, dict[str, str]]:
        """Publish the shard; return its file and each item's location."""


# Folders


class Folders(Format):
    ending = None

    def writer(self, number: int) -> ShardWriter:
        return _FolderWriter(self, number)

    def read(
        self, location: str, item: str, names: Collection[str] | None = None
    ) -> dict[str, bytes]:
        found = {}
        for name in self.place.files(location, deep=True) if names is None else names:
            with suppress(FileNotFoundError):
                found[name] = self.place.read(f"{location}/{name}")
        if RUN not in found and (names is None or RUN in names):
            raise MissingFileError(f"{self.place.root / location} has no {RUN}")
        return found

    def is_there(self, record: ShardRecord) -> bool:
        if record.data is not None:
            return False
        found = self.place.files(f"shards/{record.number:06d}", deep=True)
        there = {f"shards/{record.number:06d}/{name}": file.size for name, file in found.items()}
        for row in record.whole:
            for file in row["files"]:
                if there.get(f"{row['place']}/{file['name']}") != file["bytes"]:
                    return False
        return True

    def items(self, record: ShardRecord | None, number: int) -> Iterator[tuple[str, str]]:
        """Yield the items that are there, whether or not a record names them, or they are whole."""
        begins = f"shards/{number:06d}"
        names = self.place.files(begins, deep=True)
        for folder in sorted({name.partition("/")[0] for name in names if "/" in name}):
            yield f"{begins}/{folder}", folder.rpartition("-")[0]


class _FolderWriter(ShardWriter):
    def __init__(self, format: Format, number: int):
        super().__init__(format, number)
        self.locations: dict[str, str] = {}

    def add(self, item: str, files: Files) -> None:
        # One item at a time: after a kill those that are there need not be drawn again.
        location = f"shards/{self.number:06d}/{item}-{sha256(files[RUN])[:_CHECKSUM]}"
        self.format.place.publish_folder(location, files, last=RUN)
        self.locations[item] = location

    def finish(self) -> tuple[ShardFile | None, dict[str, str]]:
        return None, self.locations


# Tar files


class Tars(Format):
    """Tar files as WebDataset has them, whose members have no owner and no time. A file's kind is
    what follows the first dot, so a dot in an id is written ``%2E``."""

    ending = ".tar"

    def writer(self, number: int) -> ShardWriter:
        return _TarWriter(self, number)

    def read(
        self, location: str, item: str, names: Collection[str] | None = None
    ) -> dict[str, bytes]:
        found = {}
        path = self.place.local(location)
        known = path.stat()
        try:
            members = _members(path, known.st_size, known.st_mtime_ns).get(item, {})
        except (tarfile.TarError, EOFError) as error:
            raise InvalidValueError(f"{location} cannot be read: {error}") from error
        with path.open("rb") as file:
            for name, (start, size) in members.items():
                if names is None or name in names:
                    file.seek(start)
                    found[name] = file.read(size)
        if not found:
            raise MissingFileError(f"{location} holds no item {item!r}")
        return found


class _TarWriter(ShardWriter):
    """Fills a temporary file, which gets its name from its checksum."""

    def __init__(self, format: Format, number: int):
        super().__init__(format, number)
        self.ids: list[str] = []
        self.path = self.enter_context(format.place.temporary_file())
        self.tar = tarfile.open(self.path, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self.callback(self.tar.fileobj.close)

    def add(self, item: str, files: Files) -> None:
        self.ids.append(item)
        for name, data in sorted(files.items()):
            kind = _SHORT.get(name, name.replace("/", "."))
            member = tarfile.TarInfo(f"{item.replace('.', '%2E')}.{kind}")
            member.size = len(data)
            self.tar.addfile(member, io.BytesIO(data))

    def finish(self) -> tuple[ShardFile | None, dict[str, str]]:
        if not self.ids:
            return None, {}
        self.tar.close()
        checksum = file_sha256(self.path)
        name = f"shards/{self.number:06d}-{checksum[:_CHECKSUM]}{self.format.ending}"
        made = ShardFile(name, self.path.stat().st_size, checksum)
        self.format.place.publish_file(name, self.path)
        return made, dict.fromkeys(self.ids, name)


@lru_cache(16)
def _members(path: Path, size: int, time: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Return, by item and name, where each file of a tar begins and its size in bytes; the tar's
    own size and time tell one file from another."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    with tarfile.open(path, "r:", encoding="utf-8") as tar:
        for member in tar:
            item, name = _owner(member.name)
            if member.isfile():
                found.setdefault(item, {})[name] = member.offset_data, member.size
    return found


def _owner(member: str) -> tuple[str, str]:
    """Return the item and the file name of a tar member.

    >>> _owner("a%2Eb.heatmaps.01-cat.png")
    ('a.b', 'heatmaps/01-cat.png')
    """
    item, _, kind = member.partition(".")
    stem, _, ending = kind.rpartition(".")
    name = _LONG.get(kind, f"{stem.replace('.', '/')}.{ending}")
    return item.replace("%2E", "."), name


FORMATS: Mapping[str, type[Format]] = {"folder": Folders, "webdataset": Tars}


def format_of(place: Place, manifest: Manifest) -> Format:
    """Return a run's format; raise ValueError for one of another version."""
    name = manifest.settings.format
    if name not in FORMATS:
        raise InvalidValueError(
            f"{place.root} holds items of the format {name!r}, and this version reads "
            f"{', '.join(FORMATS)}. Read it with the version that wrote it."
        )
    return FORMATS[name](place)


def whole_items(
    format: Format, number: int, record: ShardRecord | None, expected: Mapping[str, str]
) -> dict[str, dict[str, bytes]]:
    """Return the files of a shard's items that are there as they were written, with the
    ``expected`` fingerprints, by id."""
    found = {}
    for location, item in format.items(record, number):
        try:
            files = format.read(location, item)
            info = read_info(files, location)
            is_whole = all(sha256(files[name]) == digest for name, digest in info.files.items())
        except (ValueError, KeyError, FileNotFoundError):
            is_whole = False
        if not is_whole and format.ending is None and not format.place.is_remote:
            format.place.remove(location)  # a whole one needs its name
        if is_whole and info.id == item and info.fingerprint == expected.get(item):
            found[item] = {name: files[name] for name in (*info.files, RUN)}
            if format.ending is None:
                for foreign in files.keys() - found[item].keys():  # a file browser's, for example
                    format.place.remove(f"{location}/{foreign}")
    return found
