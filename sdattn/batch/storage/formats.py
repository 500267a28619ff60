"""The formats of a batch run, in one place. A new format is a line here."""

from typing import NamedTuple

from ...errors import InvalidValueError
from .layouts import Folders, Layout
from .parquets import Parquets
from .storage import Storage
from .tars import Tars


class Format(NamedTuple):
    layout: type[Layout]
    data: str


FORMATS = {
    "folder": Format(Folders, "metadata.jsonl"),
    "webdataset": Format(Tars, "shards/*.tar"),
    "parquet": Format(Parquets, "shards/*.parquet"),
}


def layout_of(format: str, storage: Storage, shard_bytes: int = 0) -> Layout:
    """Return the layout of a format in :data:`FORMATS`; raise ValueError for any other."""
    if format not in FORMATS:
        raise InvalidValueError(
            f"{storage.root} holds items of the format {format!r}, and this version reads "
            f"{', '.join(FORMATS)}. Draw the run again into another `folder`, or read it with the "
            "version that wrote it."
        )
    return FORMATS[format].layout(storage, shard_bytes)
