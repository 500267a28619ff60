from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from io import FileIO
from pathlib import Path
from uuid import uuid4

from ...files.paths import files_below, inside
from ...files.writing import flush, flush_tree, write_files, write_whole
from .locks import FolderLock, Ownership
from .storage import Storage


class Disk(Storage):
    """A disk: all is written in ``.batch/tmp`` and renamed to its place once the disk holds it."""

    is_remote = False

    def __init__(self, root: Path):
        self.root = root
        self.lock: Ownership = FolderLock(root / ".batch/lock", root)
        self._temporary = root / ".batch/tmp"
        self._open: dict[str, FileIO] = {}  # this process's files of rows, by kind
        self._writing = threading.Lock()

    # Single files

    def listing(self, folder: str) -> dict[str, int]:
        paths = sorted((self.root / folder).glob("*"))
        return {f"{folder}/{path.name}": path.lstat().st_size for path in paths}

    def copies(self, names: Iterable[str]) -> list[Path]:
        return [inside(self.root, name) for name in names]

    def reading(self, name: str) -> AbstractContextManager[Path]:
        return nullcontext(inside(self.root, name))

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        # Shards are named by their contents, so two jobs may write the same one at a time.
        write_whole(path, parts, self._new("" if "/" in name else name))

    def tidy(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(exist_ok=True)

    # Folders of items

    def folders(self) -> Iterator[tuple[str, bool]]:
        for group in sorted((self.root / "items").glob("[0-9]*")):
            with os.scandir(group) as entries:
                for entry in entries:
                    if entry.is_dir() or entry.is_symlink():
                        yield f"items/{group.name}/{entry.name}", True

    def names(self, folder: str) -> list[str]:
        root = self.root / folder
        return [] if root.is_symlink() else files_below(root)

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int]:
        found = {}
        with suppress(ValueError):  # a link, which leads to nothing of ours
            root = inside(self.root, folder)
            for name in names:
                with suppress(OSError, ValueError):
                    known = (inside(root, name) if "/" in name else root / name).lstat()
                    if stat.S_ISREG(known.st_mode):
                        found[name] = known.st_size
        return found

    def read(self, folder: str, names: Iterable[str] | None = None) -> dict[str, bytes]:
        root = inside(self.root, folder)
        names = self.names(folder) if names is None else names
        paths = {name: inside(root, name) for name in names}
        return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}

    def write_folder(self, folder: str, files: Mapping[str, bytes]) -> None:
        self._make(folder, lambda made: write_files(made, files))

    def link_folder(self, folder: str, other: object, source: str) -> bool:
        if not isinstance(other, Disk):
            return False
        tree = other.root / source
        self._make(folder, lambda made: shutil.copytree(tree, made, copy_function=_link))
        return True

    def delete_folder(self, folder: str) -> None:
        gone = self._new()
        os.rename(self.root / folder, gone)
        gone.unlink() if gone.is_symlink() else shutil.rmtree(gone)

    def _make(self, folder: str, fill: Callable[[Path], object]) -> None:
        target, made = self.root / folder, self._new()
        try:
            fill(made)
            flush_tree(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            # A renamed folder is complete or absent.
            os.rename(made, target)
            flush(target.parent)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def _new(self, name: str = "") -> Path:
        self._temporary.mkdir(parents=True, exist_ok=True)
        return self._temporary / (name or uuid4().hex)

    # Rows that processes append

    def append(self, kind: str, writer: str, data: bytes) -> None:
        with self._writing:
            if kind not in self._open:
                path = self.root / ".batch" / kind / f"{writer}.jsonl"
                self._open[kind] = path.open("ab", buffering=0)
            file = self._open[kind]
            written = file.write(data)
            if written < len(data):  # the disk is full: half a row would spoil the next
                os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def appended(self, kind: str) -> list[str]:
        return [*self.listing(f".batch/{kind}")]

    def forget(self, kind: str, names: Iterable[str]) -> None:
        with self._writing:
            if kind in self._open:
                self._open.pop(kind).close()
            for name in names:
                (self.root / name).unlink()

    def close(self) -> None:
        with self._writing:
            for file in self._open.values():
                file.close()
            self._open.clear()


def _link(old: str, new: str) -> None:
    try:
        os.link(old, new)
    except OSError:
        shutil.copy2(old, new)
