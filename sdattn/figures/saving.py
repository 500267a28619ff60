"""Files of figures: what a file's name asks for, and writing it whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from uuid import uuid4


def format_of(path: str | Path, formats: Collection[str]) -> str:
    """What a file's name ends in, without the dot.

    Raises:
        ValueError: it is none of ``formats``.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in formats:
        raise ValueError(f"{path}: choose a file name that ends in {' or '.join(formats)}.")
    return suffix[1:]


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file, with its folders; whatever goes wrong leaves what was there before.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Name a file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid4().hex}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
