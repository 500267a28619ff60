"""``batch.json``: what run a folder is of, with a checksum of its own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import InvalidValueError, MissingFileError
from ...files.addresses import AnyPath
from ...files.paths import inside
from ...files.records import Record, RecordError, read_record
from ...files.writing import sha256, to_json
from ...loading.options import LoadingOptions

FORMAT = "sdattn-batch-2"
_LOST = "What it said is lost. Draw the run again into another `folder`."
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Record):
    """How all items of a run are made.

    Attributes:
        model: as it was asked for.
        weights: a checksum of the model's weights and configurations, its LoRAs among them.
        loading: how the model is loaded; None where nothing was asked for.
        pipeline, dtype: names of its class and of its numbers' type.
        save: parts of each item, of :data:`sdattn.runs.drawings.PARTS`.
        preset: of the heatmaps, as JSON has it.
        options: of the pipeline's call, for items that do not have them.
        format, shard_bytes: how the items lie, see :mod:`sdattn.batch.storage.formats`.
        video_format: ``"mp4"`` or ``"webp"``, how videos are written; None where they are images.
        fingerprint: another one for settings of which other files come.
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
    """What a run draws.

    Attributes:
        source: as it was asked for.
        digest: a checksum of all its items.
        part: ``"1/1"``, or the first of two, ``"1/2"``.
        items: of this part.
        all_items: of the whole input.
        bad_lines: that could not be read.
        columns: further columns of the list that the rows have; None: none were kept.
    """

    source: str
    digest: str
    part: str
    items: int
    all_items: int
    bad_lines: int
    columns: list[str] | None = None

    def share_of(self, ids: Sequence[T]) -> Sequence[T]:
        """Those of the whole input's that are of this part."""
        which, of = map(int, self.part.split("/"))
        return ids[which - 1 :: of]


@dataclass(frozen=True, kw_only=True)
class Ended(Record):
    """What a run left when it ended: how many items were whole, and the checksums of the other
    files of the folder."""

    whole: int
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """``batch.json``.

    Attributes:
        settings, input: of the run.
        batch_size: items that run together.
        versions: of the packages.
        ended: None while it runs, and of a run that was killed.
    """

    settings: BatchSettings
    input: BatchInput
    batch_size: int
    versions: dict[str, str]
    ended: Ended | None = None

    def sealed(self) -> bytes:
        """``batch.json``, with the checksum of the rest."""
        return sealed({"format": FORMAT, **self.to_json()})


def read_manifest(root: AnyPath) -> Manifest:
    """``batch.json`` as it was written.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is of another version, or not what was written.
    """
    path = inside(root, "batch.json")
    if not path.is_file():
        raise MissingFileError(
            f"{root} has no batch.json, so it is no batch run's folder. Those are made by "
            "`run_batch()`."
        )
    written = path.read_bytes()  # once: a run that goes on may replace the file at any time
    document = parsed(written, path)
    if sealed(document) != written:
        raise InvalidValueError(f"{path} is damaged: its own checksum differs. {_LOST}")
    try:
        manifest: Manifest = read_record(Manifest, document)
    except RecordError as problem:
        raise InvalidValueError(f"{path} is damaged: {problem}. {_LOST}") from None
    return manifest


def parsed(written: bytes, path: AnyPath) -> dict[str, Any]:
    """What ``batch.json`` says, if it is of this version's format.

    Raises:
        ValueError: it is no JSON, or of another version.
    """
    try:
        document = json.loads(written)
    except ValueError as error:
        raise InvalidValueError(f"{path} is corrupt: {error}. {_LOST}") from error
    if not isinstance(document, dict) or "format" not in document:
        raise InvalidValueError(f"{path} is no batch run's: it names no format. {_LOST}")
    if document["format"] != FORMAT:
        raise InvalidValueError(
            f"{path} is of the format {document['format']!r}, and this version reads {FORMAT!r} "
            "alone. Draw the run again into another `folder`, or read it with the version that "
            "wrote it."
        )
    return document


def sealed(document: Mapping[str, object]) -> bytes:
    """A document with the checksum of the rest behind it."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    return to_json({**rest, "digest": sha256(to_json(rest))})
