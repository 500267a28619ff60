"""The formats of a batch run, the one place that knows them all. A new format is a line here."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...errors import InvalidValueError, Message
from ...files.addresses import Address
from .layouts import Folders, Layout
from .objects import FolderObjects, ParquetObjects, TarObjects
from .parquets import Parquets
from .storage_journals import StorageJournals
from .tars import Tars


class Format(NamedTuple):
    """A layout of a disk, the same in a storage, and the files in which datasets finds the rows."""

    on_disk: Callable[..., Layout]
    in_storage: Callable[..., Layout]
    data: str


FORMATS = {
    "folder": Format(Folders, FolderObjects, "metadata.jsonl"),
    "webdataset": Format(Tars, TarObjects, "shards/*.tar"),
    "parquet": Format(Parquets, ParquetObjects, "shards/*.parquet"),
}


def layout_of(
    format: str,
    root: Path | Address,
    temporary: Path,
    *,
    shard_bytes: int = 0,
    journals: StorageJournals | None = None,
) -> Layout:
    """The layout of a format.

    Args:
        format: of :data:`FORMATS`.
        root: the run's folder, or its address.
        temporary: a folder on the same disk; of no use with an address.
        shard_bytes: a file of many items is written once it holds so much.
        journals: the rows of a run at an address.

    Raises:
        ValueError: a format that this version does not know.
    """
    if format not in FORMATS:
        text = (
            "{0} holds items of the format {1!r}, and this version reads {2}. Draw the run again "
            "into another {folder}, or read it with the version that wrote it."
        )
        raise InvalidValueError(Message(text, root, format, ", ".join(FORMATS)))
    on_disk, in_storage, _ = FORMATS[format]
    nbytes = () if on_disk is Folders else (shard_bytes,)
    if isinstance(root, Path):
        return on_disk(root, temporary, *nbytes)
    return in_storage(root, journals, *nbytes)
