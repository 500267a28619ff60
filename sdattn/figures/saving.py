from collections.abc import Collection
from pathlib import Path

from ..errors import InvalidValueError, IsFolderError
from ..files.paths import check_writable
from ..files.writing import write_whole


def format_of(path: str | Path, formats: Collection[str]) -> str:
    """Return the file's extension without the dot; raise ValueError if it is not in ``formats``."""
    suffix = Path(path).suffix.lower()
    if suffix not in formats:
        raise InvalidValueError(f"{path}: choose a file name that ends in {' or '.join(formats)}.")
    return suffix[1:]


def save_file(path: str | Path, data: bytes) -> None:
    """Write a file, with its folders; after an error the previous file is still there."""
    path = Path(path)
    if path.is_dir():
        raise IsFolderError(f"{path} is a folder. Name a file.")
    check_writable(path.parent)
    write_whole(path, [data])
