"""The rows of ``metadata.jsonl``: what they say of an item, and how they are read again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..runs.info import RunInfo


class Known(NamedTuple):
    """An item that is whole: where its row stands and what it says."""

    line: int
    place: str
    fingerprint: str
    file: Path
    start: int
    length: int


def row_of(info: RunInfo, place: str, checksum: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The row of ``metadata.jsonl`` for an item.

    Args:
        info: what its ``run.json`` says.
        place: of the item.
        checksum: of the bytes of ``run.json``, which holds those of the other files.
        sizes: bytes of each file, see :meth:`sdattn.batch.layouts.Layout.sizes`.

    Raises:
        ValueError: ``run.json`` does not say all that a row tells.
    """
    try:
        row = _told(info, place)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}/run.json is damaged, a row needs more ({error})") from error
    files = [{"name": name, "bytes": sizes[name]} for name in sorted(sizes)]
    return {**row, "run_sha256": checksum, "files": files}


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row as it stands in its file."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def sizes_in(row: Mapping[str, Any]) -> dict[str, int] | None:
    """Bytes of an item's files as its row tells them; None for a row that does not, as those of
    the first format."""
    try:
        return {one["name"]: one["bytes"] for one in row["files"]}
    except (KeyError, TypeError):
        return None


def _told(info: RunInfo, place: str) -> dict[str, Any]:
    needed = ("id", "line", "options", "size", "truncated", "fingerprint")
    if lacking := [name for name in needed if getattr(info, name) is None]:
        raise ValueError(f"it lacks {', '.join(lacking)}")
    options, columns, size = info.options or {}, set(info.columns), info.size or (0, 0)
    image = {}
    if "image.png" in info.files and not place.endswith(".safetensors"):
        image = {"file_name": f"{place}/image.png"}  # the key that imagefolder looks for
    guidance = options.get("guidance_scale")
    return {
        **image,
        "id": info.id,
        "line": info.line,
        "prompt": info.prompt,
        "negative_prompt": options.get("negative_prompt"),
        "seed": info.seed,
        "width": size[0],
        "height": size[1],
        "num_inference_steps": options.get("num_inference_steps"),
        "guidance_scale": None if guidance is None else float(guidance),
        "words": [
            word.text for word in info.words if word.columns and columns.issuperset(word.columns)
        ],
        "truncated": info.truncated,
        "blanked": bool(info.blanked),  # by the pipeline's safety checker
        "place": place,
        "fingerprint": info.fingerprint,
    }


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of items in a file, perhaps none; a line that a crash cut off is none."""
    return (row for row, _, _ in _placed_rows(path))


def bad_lines_in(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of ``errors.jsonl`` that tell of lines that could not be read."""
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "id" not in row and type(row.get("line")) is int:
            yield row


def known_in(path: Path) -> Iterator[tuple[str, Known]]:
    """The id and the place of each row in a file of rows of whole items."""
    for row, start, length in _placed_rows(path):
        own = row.get("line"), row.get("place"), row.get("fingerprint")
        if type(own[0]) is int and isinstance(own[1], str) and isinstance(own[2], str):
            yield row["id"], Known(own[0], own[1], own[2], path, start, length)


def _placed_rows(path: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Row, first byte and length of each."""
    if not path.is_file():
        return
    start = 0
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if isinstance(row, dict) and isinstance(row.get("id"), str):
                yield row, start, len(line)
            start += len(line)


def copies_of(rows: Iterable[Known]) -> Iterator[bytes]:
    """The rows as they stand in their files."""
    files: dict[Path, Any] = {}
    try:
        for one in rows:
            if one.file not in files:
                files[one.file] = one.file.open("rb")
            files[one.file].seek(one.start)
            yield files[one.file].read(one.length)
    finally:
        for file in files.values():
            file.close()
