"""``batch.json``: what run a folder is of, with a checksum of its own.

{"format", "settings": {...}, "input": {...}, "batch_size", "versions", "ended", "digest"}
"""

import json
from collections.abc import Mapping
from typing import Any

from ...errors import InvalidValueError, Message, MissingFileError
from ...files.addresses import AnyPath
from ...files.paths import inside
from ...files.writing import sha256, to_json

FORMAT = "sdattn-batch-2"
# Rows of the first say nothing of run.json's checksum and of sizes: the next run adds it.
FIRST_FORMAT = "sdattn-batch-1"
ADOPT = Message(
    "If its items are there, the command that made them, with {adopt=True}, checks them and writes "
    "batch.json anew."
)


def read_manifest(root: AnyPath) -> dict[str, Any]:
    """``batch.json`` as it was written.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is of another version, or not what was written.
    """
    path = inside(root, "batch.json")
    if not path.is_file():
        has_items = any((root / name).is_dir() for name in ("items", "shards"))
        text = "{0} has no batch.json, so it is no batch run's folder. Those are made by "
        text += "{run_batch()}. {1}" if has_items else "{run_batch()}."
        raise MissingFileError(Message(text, root, ADOPT))
    written = path.read_bytes()  # once: a run that goes on may replace the file at any time
    manifest = parsed(written, path)
    if manifest["format"] == FORMAT and sealed(manifest) != written:
        raise InvalidValueError(
            Message("{0} is damaged: its own checksum differs. {1}", path, ADOPT)
        )
    return manifest


def read_unchecked(root: AnyPath) -> dict[str, Any]:
    """``batch.json`` of a format that can be read, its checksum aside."""
    path = inside(root, "batch.json")
    return parsed(path.read_bytes(), path)


def parsed(written: bytes, path: AnyPath) -> dict[str, Any]:
    """What ``batch.json`` says, if it is of a format that can be read.

    Raises:
        ValueError: it is no JSON, or of another version.
    """
    try:
        manifest = json.loads(written)
    except ValueError as error:
        raise InvalidValueError(Message("{0} is corrupt: {1}. {2}", path, error, ADOPT)) from error
    if not isinstance(manifest, dict) or manifest.get("format") not in (FORMAT, FIRST_FORMAT):
        text = "{0} is not of this version's format {1!r}. {2}"
        raise InvalidValueError(Message(text, path, FORMAT, ADOPT))
    return manifest


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """``batch.json`` as it is written, with the checksum of the rest."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    return to_json({**rest, "digest": sha256(to_json(rest))})
