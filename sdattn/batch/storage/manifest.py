"""``batch.json``: the run that a folder belongs to, with a checksum of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import MissingFileError
from ...files.addresses import AnyPath
from ...files.paths import inside
from ...files.records import Record, read_document, read_sealed, sealed
from ...loading.options import LoadingOptions

FORMAT = "sdattn-batch-2"
LOST = "Draw the run again into another `folder`."
_SEAL = "digest"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Record):
    """Settings common to all items of a run.

    Attributes:
        weights: a checksum of the model's weights and configurations, including LoRAs.
        format, shard_bytes: layout of the items, see :mod:`sdattn.batch.storage.formats`.
        video_format: ``"mp4"`` or ``"webp"``; None for images.
        fingerprint: differs for settings that give different files.
    """

    model: str
    weights: str
    pipeline: str
    dtype: str
    save: list[str]
    preset: dict[str, Any]
    options: dict[str, Any]
    format: str
    shard_bytes: int
    loading: LoadingOptions | None = None
    video_format: str | None = None
    fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class BatchInput(Record):
    """The input of a run.

    Attributes:
        digest: a checksum of all its items.
        part: ``"1/1"``, or the first of two, ``"1/2"``.
        items: number of items in this part.
        all_items: number of items in the whole input.
        columns: further columns of the list that the rows have; None if none were kept.
    """

    source: str
    digest: str
    part: str
    items: int
    all_items: int
    bad_lines: int
    columns: list[str] | None = None

    def share_of(self, ids: Sequence[T]) -> Sequence[T]:
        which, of = map(int, self.part.split("/"))
        return ids[which - 1 :: of]


@dataclass(frozen=True, kw_only=True)
class Ended(Record):
    """A folder when its run ended: the number of whole items, and its other files' checksums."""

    whole: int
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """``batch.json``; ``ended`` is None while the run goes on, and for one that was killed."""

    settings: BatchSettings
    input: BatchInput
    batch_size: int
    versions: dict[str, str]
    ended: Ended | None = None

    def sealed(self) -> bytes:
        return sealed({"format": FORMAT, **self.to_json()}, _SEAL)


def read_manifest(root: AnyPath) -> Manifest:
    """Read ``batch.json``; raise FileNotFoundError, or ValueError if it is not what was written."""
    path = inside(root, "batch.json")
    if not path.is_file():
        raise MissingFileError(
            f"{root} has no batch.json: it is not a batch run's folder. `run_batch()` makes those."
        )
    # once: a run that goes on may replace the file at any time
    document = read_sealed(path.read_bytes(), path, FORMAT, LOST, _SEAL)
    return read_document(Manifest, document, path, LOST)
