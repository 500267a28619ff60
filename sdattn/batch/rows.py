"""The rows of ``metadata.jsonl``: what they say of an item, and how they are read again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Known(NamedTuple):
    """An item that is whole: where its row stands and what it says."""

    line: int
    place: str
    fingerprint: str
    file: Path
    start: int
    length: int


def row_of(info: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The row of ``metadata.jsonl`` for an item, from its ``run.json``."""
    options, columns = info["options"], set(info["columns"])
    image = {}
    if "image.png" in info["files"] and not place.endswith(".safetensors"):
        image = {"file_name": f"{place}/image.png"}  # the key that imagefolder looks for
    guidance = options.get("guidance_scale")
    return {
        **image,
        "id": info["id"],
        "line": info["line"],
        "prompt": info["prompt"],
        "negative_prompt": options.get("negative_prompt"),
        "seed": info["seed"],
        "width": info["size"][0],
        "height": info["size"][1],
        "num_inference_steps": options.get("num_inference_steps"),
        "guidance_scale": None if guidance is None else float(guidance),
        "words": [
            w["text"] for w in info["words"] if w["columns"] and columns.issuperset(w["columns"])
        ],
        "truncated": info["truncated"],
        "blanked": info.get("blanked", False),  # by the pipeline's safety checker
        "place": place,
        "fingerprint": info["fingerprint"],
    }


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of items in a file, perhaps none; a line that a crash cut off is none."""
    return (row for row, _, _ in _placed_rows(path))


def known_in(path: Path) -> Iterator[tuple[str, Known]]:
    """The id and the place of each row in a file of rows of whole items."""
    for row, start, length in _placed_rows(path):
        if row.keys() >= {"line", "place", "fingerprint"}:
            own = row["line"], row["place"], row["fingerprint"]
            yield row["id"], Known(*own, path, start, length)


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
            if isinstance(row, dict) and "id" in row:
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
