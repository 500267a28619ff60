"""How a shard holds its items: a folder for each, a tar file, or a Parquet file. A new format is a
class here.

folder      shards/000012/ID-1b2c3d/        an item's files, as `sdattn generate` writes them
webdataset  shards/000012-3fa9c1.tar        ID.png, ID.maps.safetensors, ID.json (run.json), ...
parquet     shards/000012-3fa9c1.parquet    a row per item, each a row group of its own

Names carry a checksum of what they name, so whatever is written at once never mixes.
"""

from __future__ import annotations

import io
import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ..errors import InvalidValueError, MissingFileError, optional
from ..files.place import Files, Place
from ..files.writing import file_sha256, sha256
from ..runs.info import read_info
from ..runs.packing import pack_maps
from ..runs.parts import MAPS, VIDEOS
from .columns import ROW
from .records import Manifest, ShardFile, ShardRecord, row_of

RUN = "run.json"
# Columns of a Parquet file before and after those of an item's row
_FILE = {"bytes": "binary", "path": "string"}
_IMAGES = {"image": _FILE, "video": _FILE}
_FILES: dict[str, Any] = {
    "maps": [{"layer": "string", "shape": ["int32"], "values": ["halffloat"]}],
    "files": [{"name": "string", "bytes": "binary"}],
    "run": "binary",
}
_SHORT = {"image.png": "png", RUN: "json"}  # names in a tar
_LONG = {short: name for name, short in _SHORT.items()}
_CHECKSUM = 6  # its digits in names


class Format(ABC):
    """A format, for the shards of one run.

    with FORMATS["webdataset"](place, manifest).writer(12) as writer:
        writer.add("000768", files)
        data, locations = writer.finish()
    """

    ending: ClassVar[str | None]  # None: no file holds all items
    pattern: ClassVar[str]  # which files datasets reads

    def __init__(self, place: Place, manifest: Manifest):
        self.place = place
        self.manifest = manifest

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
        is_ours = record.data.name.endswith(self.ending or "")
        return is_ours and self.place.size(name) == record.data.bytes

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
    pattern = "metadata.jsonl"

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
        return all(
            there.get(f"{row['place']}/{file['name']}") == file["bytes"]
            for row in record.whole
            for file in row["files"]
        )

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


# Files of many items


class _FileWriter(ShardWriter):
    """Fills a temporary file, which gets its name from its checksum."""

    def __init__(self, format: Format, number: int):
        super().__init__(format, number)
        self.ids: list[str] = []
        self.path = self.enter_context(self.format.place.temporary_file())

    def finish(self) -> tuple[ShardFile | None, dict[str, str]]:
        if not self.ids:
            return None, {}
        self.end_file()
        checksum = file_sha256(self.path)
        name = f"shards/{self.number:06d}-{checksum[:_CHECKSUM]}{self.format.ending}"
        made = ShardFile(name, self.path.stat().st_size, checksum)
        self.format.place.publish_file(name, self.path)
        return made, dict.fromkeys(self.ids, name)

    @abstractmethod
    def end_file(self) -> None: ...


class Tars(Format):
    """Tar files as WebDataset has them, whose members have no owner and no time. A file's kind is
    what follows the first dot, so a dot in an id is written ``%2E``."""

    ending = ".tar"
    pattern = "shards/*.tar"

    def writer(self, number: int) -> ShardWriter:
        return _TarWriter(self, number)

    def read(
        self, location: str, item: str, names: Collection[str] | None = None
    ) -> dict[str, bytes]:
        found = {}
        try:
            with tarfile.open(self.place.local(location), "r:", encoding="utf-8") as tar:
                for member in tar:
                    owner, name = _owner(member.name)
                    if owner == item and (names is None or name in names):
                        found[name] = tar.extractfile(member).read()  # type: ignore[union-attr]
        except (tarfile.TarError, AttributeError, EOFError) as error:
            raise InvalidValueError(f"{location} cannot be read: {error}") from error
        if not found:
            raise MissingFileError(f"{location} holds no item {item!r}")
        return found


class _TarWriter(_FileWriter):
    def __init__(self, format: Format, number: int):
        super().__init__(format, number)
        self.tar = tarfile.open(self.path, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self.callback(self.tar.fileobj.close)

    def add(self, item: str, files: Files) -> None:
        self.ids.append(item)
        for name, data in sorted(files.items()):
            kind = _SHORT.get(name, name.replace("/", "."))
            member = tarfile.TarInfo(f"{item.replace('.', '%2E')}.{kind}")
            member.size = len(data)
            self.tar.addfile(member, io.BytesIO(data))

    def end_file(self) -> None:
        self.tar.close()


def _owner(member: str) -> tuple[str, str]:
    """Return the item and the file name of a tar member.

    >>> _owner("a%2Eb.heatmaps.01-cat.png")
    ('a.b', 'heatmaps/01-cat.png')
    """
    item, _, kind = member.partition(".")
    stem, _, ending = kind.rpartition(".")
    name = _LONG.get(kind, f"{stem.replace('.', '/')}.{ending}")
    return item.replace("%2E", "."), name


class Parquets(Format):
    """Parquet files. Their columns, the same in all shards of a run:

    image                 {bytes, path}, as datasets has images        image.png
    video                 {bytes, path}, as datasets has videos        video.mp4, video.webp
    id, line, prompt, ... its row in ``metadata.jsonl``
    maps                  [{layer, shape, values}], float16            maps.safetensors
    files                 [{name, bytes}]                              its other files
    run                   bytes                                        run.json
    """

    ending = ".parquet"
    pattern = "shards/*.parquet"

    def writer(self, number: int) -> ShardWriter:
        return _ParquetWriter(self, number)

    def read(
        self, location: str, item: str, names: Collection[str] | None = None
    ) -> dict[str, bytes]:
        with _opened(self.place.local(location), location) as file:
            there = set(file.schema_arrow.names)
            ids = file.read(columns=["id"])["id"].to_pylist()
            if item not in ids:
                raise MissingFileError(f"{location} holds no item {item!r}")
            columns = {"image.png": "image", RUN: "run", MAPS: "maps"} | dict.fromkeys(
                VIDEOS, "video"
            )
            wanted = there if names is None else {columns.get(name, "files") for name in names}
            if names is not None and MAPS in names:
                wanted.add("files")  # where maps are that could not become columns
            row = file.read_row_group(ids.index(item), columns=sorted(wanted & there))
            found = _files_of(row)
        return {name: data for name, data in found.items() if names is None or name in names}


class _ParquetWriter(_FileWriter):
    def __init__(self, format: Format, number: int):
        super().__init__(format, number)
        from pyarrow import parquet

        self.schema = _schema(format.manifest)
        how = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
        self.file = parquet.ParquetWriter(self.path, self.schema, **how)
        self.callback(self.file.close)

    def add(self, item: str, files: Files) -> None:
        import pyarrow as pa

        self.ids.append(item)
        self.file.write_table(pa.Table.from_pylist([_row_with_files(item, files)], self.schema))

    def end_file(self) -> None:
        self.file.close()


def require_pyarrow() -> None:
    optional("pyarrow.parquet", "Parquet", "sdattn[parquet]")


@contextmanager
def _opened(path: Path, location: str) -> Iterator[Any]:
    require_pyarrow()
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except FileNotFoundError:
        raise
    except (ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise InvalidValueError(f"{location} cannot be read: {reason}") from error


def _schema(manifest: Manifest) -> Any:
    import pyarrow as pa

    settings = manifest.settings
    is_video = settings.video_format is not None
    has_video = is_video and "video" in settings.save
    has = {
        "image": has_video or "image" in settings.save,
        "video": has_video,
        "source_prompt": settings.edits,
        "source_file": settings.photos,
        "frames": is_video,
        "masks": "masks" in settings.save,
        "maps": "maps" in settings.save,
    }
    own = dict.fromkeys(manifest.input.columns or (), "string")
    columns = {**_IMAGES, **ROW, **own, **_FILES}
    fields = [(name, _arrow_type(kind)) for name, kind in columns.items() if has.get(name, True)]
    features = json.dumps({"info": {"features": {"image": {"_type": "Image"}}}})
    return pa.schema(fields, metadata={"huggingface": features})


def _arrow_type(kind: Any) -> Any:
    import pyarrow as pa

    if isinstance(kind, list):
        return pa.list_(_arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, _arrow_type(held)) for name, held in kind.items()])
    return pa.type_for_alias(kind)


def _row_with_files(item: str, files: Files) -> dict[str, object]:
    rest = dict(files)
    row = row_of(read_info(files, item), Parquets.ending, "", {})
    row |= {"id": item, "run": rest.pop(RUN)}
    if "image.png" in rest:
        row["image"] = {"bytes": rest.pop("image.png"), "path": f"{item}.png"}
    for name in VIDEOS.keys() & rest.keys():  # one of them
        row["video"] = {"bytes": rest.pop(name), "path": f"{item}.{VIDEOS[name]}"}
    # Maps become columns that other programs can read, if the same bytes can be made from them.
    with suppress(SafetensorError):
        maps = load(rest.get(MAPS, b""))
        if pack_maps(maps) == rest[MAPS]:
            del rest[MAPS]
            row["maps"] = [
                {"layer": name, "shape": list(held.shape), "values": held.flatten().numpy()}
                for name, held in sorted(maps.items())
            ]
    row["files"] = [{"name": name, "bytes": rest[name]} for name in sorted(rest)]
    return row


def _files_of(row: Any) -> dict[str, bytes]:
    """Return the files in a table of one row and some columns."""
    columns = set(row.column_names)
    [rest] = row.select(sorted(columns - {"maps"})).to_pylist()
    found = {file["name"]: file["bytes"] for file in rest.get("files") or ()}
    if rest.get("image"):
        found["image.png"] = rest["image"]["bytes"]
    if rest.get("video"):
        ending = rest["video"]["path"].rpartition(".")[2]
        found[f"video.{ending}"] = rest["video"]["bytes"]
    if rest.get("run") is not None:
        found[RUN] = rest["run"]
    if "maps" in columns and row["maps"][0].is_valid:
        maps = {}
        for entry in row["maps"][0].values:  # a list of a million floats would be slow
            values = torch.from_numpy(entry["values"].values.to_numpy(zero_copy_only=False).copy())
            maps[entry["layer"].as_py()] = values.reshape(entry["shape"].as_py())
        found[MAPS] = pack_maps(maps)
    return found


FORMATS: Mapping[str, type[Format]] = {
    "folder": Folders,
    "webdataset": Tars,
    "parquet": Parquets,
}


def format_of(place: Place, manifest: Manifest) -> Format:
    """Return a run's format; raise ValueError for one of another version."""
    name = manifest.settings.format
    if name not in FORMATS:
        raise InvalidValueError(
            f"{place.root} holds items of the format {name!r}, and this version reads "
            f"{', '.join(FORMATS)}. Read it with the version that wrote it."
        )
    return FORMATS[name](place, manifest)


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
    return found
