from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from .locks import Ownership

Files = Mapping[str, bytes]


class Storage(Protocol):
    """The methods in which a disk and a bucket differ; names are paths in a run's folder.

    All methods raise OSError if the storage fails, and ValueError for a name that leads out. If it
    ``is_remote``, requests are slow, and rows are trusted without looking at the items.
    """

    root: Any
    lock: Ownership
    is_remote: bool

    # Single files

    def listing(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder, by name."""

    def copies(self, names: Iterable[str]) -> list[Path]:
        """Return paths to read the current files; a missing file has a path without a file."""

    def reading(self, name: str) -> AbstractContextManager[Path]:
        """Return a block in which a file that never changes can be read at a path."""

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a file, completely or not at all, if the job still has the folder."""

    def tidy(self) -> None:
        """Remove unfinished files of processes that have ended, if there can be any."""
        return None

    # Folders of items

    def folders(self) -> Iterator[tuple[str, bool]]:
        """Yield the folder of each item, and whether it was written to the end."""

    def names(self, folder: str) -> list[str]:
        """Return the files in a folder and below, including links."""

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int]:
        """Return the bytes of a folder's files, of those names that exist."""

    def read(self, folder: str, names: Iterable[str] | None = None) -> dict[str, bytes]:
        """Return a folder's files, or only the existing ones of these names."""

    def write_folder(self, folder: str, files: Files) -> None:
        """Write a folder, completely or not at all."""

    def link_folder(self, folder: str, other: Storage, source: str) -> bool:
        """Write a folder with another one's files without copies; return False if impossible."""
        return False

    def delete_folder(self, folder: str) -> None: ...

    # Rows that processes append

    def append(self, kind: str, writer: str, data: bytes) -> None:
        """Append rows to this process's own file in ``.batch/KIND``, perhaps with a delay."""

    def appended(self, kind: str) -> list[str]:
        """Return the files of all processes in ``.batch/KIND``."""

    def forget(self, kind: str, names: Iterable[str]) -> None:
        """Remove files of ``.batch/KIND``; this process begins a new one."""

    def together(self) -> AbstractContextManager[None]:
        """Return a block that writes the rows appended in it at its end, all or none of a kind,
        unless each is written at once."""
        return nullcontext()

    def flush(self) -> None:
        """Write what has been appended, unless it is written at once; after an error the next call
        tries again."""
        return None

    def close(self) -> None:
        """Write what has been appended, and close this process's files."""
