"""The items of a batch run as WebDataset: tar files in which an item's files are neighbours.

    ID.png               ->  image.png
    ID.maps.safetensors  ->  maps.safetensors
    ID.heatmaps.01-a.png ->  heatmaps/01-a.png
    ID.json              ->  run.json

The part after the first dot is a file's kind, so a dot in an id is written ``%2E``.
"""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from ...errors import InvalidValueError
from .shards import FileSpan, Index, Shards
from .storage import Files

_SHORT = {"image.png": "png", "run.json": "json"}
_LONG = {short: name for name, short in _SHORT.items()}


class Tars(Shards):
    """Shards as tar files, whose members have no owner and no time."""

    ending = ".tar"

    def _pack(self, items: Mapping[str, Files]) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for item, files in sorted(items.items()):
                for name, data in sorted(files.items()):
                    member = tarfile.TarInfo(_member(item, name))
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        return packed.getvalue()

    def _index(self, path: Path) -> Index:
        try:
            with tarfile.open(path, "r:", encoding="utf-8") as tar:
                members = tar.getmembers()
        except (tarfile.TarError, ValueError, IndexError, OverflowError) as error:
            raise InvalidValueError(str(error)) from error
        # Position of each file, so that one is read without the others.
        found: dict[str, dict[str, FileSpan]] = {}
        end = 0
        for member in members:
            if not member.isreg() or member.issparse():
                raise InvalidValueError(f"{member.name!r} in it is not a file")
            item, name = _owner(member.name)
            found.setdefault(item, {})[name] = FileSpan(member.offset_data, member.size)
            end = _up(member.offset_data + member.size, tarfile.BLOCKSIZE)
        # after a damaged header tarfile sees no more members
        if _up(end + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE) != path.stat().st_size:
            raise InvalidValueError("it is cut short, or a header in it is damaged")
        for item, files in found.items():
            if "run.json" not in files:
                raise InvalidValueError(
                    f"it has no {_member(item, 'run.json')}, so no run wrote it"
                )
        return found

    def _read(self, path: Path, item: str, held: Mapping[str, FileSpan]) -> dict[str, bytes]:
        found = {}
        with path.open("rb") as file:
            for name, (start, nbytes) in held.items():
                file.seek(start)
                found[name] = file.read(nbytes)
        return found


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _member(item: str, name: str) -> str:
    """Return the name of an item's file in a tar."""
    return f"{item.replace('.', '%2E')}.{_SHORT.get(name, name.replace('/', '.'))}"


def _owner(member: str) -> tuple[str, str]:
    """Return the item and the file name of a tar member.

    >>> _owner("a%2Eb.heatmaps.01-cat.png")
    ('a.b', 'heatmaps/01-cat.png')
    """
    item, _, kind = member.partition(".")
    stem, _, ending = kind.rpartition(".")
    name = _LONG.get(kind, f"{stem.replace('.', '/')}.{ending}")
    return item.replace("%2E", "."), name
