"""A run's files on a disk or, by fsspec, in a bucket; each is published whole or not at all.

place = Place("s3://bucket/RUN")
place.publish("shards/000012.jsonl", data)      # one rename, or one PUT
place.files("shards")                           # name -> its size and time
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ExistsError, access_error
from .addresses import Address, Copies, path_of
from .paths import check_writable, inside
from .writing import flush, flush_tree, remove_abandoned, temporary_name, write_files

Files = Mapping[str, bytes]
_TEMPORARY = ".sdattn-"  # begins names in the run's folder
_COPIES = 4  # shards


class File(NamedTuple):
    """A file's size in bytes, and when it was written, in seconds since 1970."""

    size: int
    time: float


class Place:
    """A run's folder. Names are relative paths with ``/``; one that leads out, or a link on its
    way, raises ValueError. All methods raise OSError if the disk or the storage fails."""

    def __init__(self, root: str | Path):
        path = path_of(root)
        self.root: Any = path.absolute() if isinstance(path, Path) else path
        self.is_remote = isinstance(path, Address)
        self._copies = Copies(_COPIES)

    # Reading

    def read(self, name: str) -> bytes:
        return inside(self.root, name).read_bytes()

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, or None if it is missing."""
        path = inside(self.root, name)
        if isinstance(path, Address):
            return path.size()
        return path.stat().st_size if path.is_file() else None

    def local(self, name: str) -> Path:
        """Return a path on this machine to read a file whose name carries its checksum; of a file
        in a storage, a copy. The last few copies are kept."""
        path = inside(self.root, name)
        return self._copies.of(path) if isinstance(path, Address) else path

    def files(self, folder: str = "", *, deep: bool = False) -> dict[str, File]:
        """Return the files in a folder by name, with ``deep`` also those below it. Links to
        folders are not followed, and a missing folder has no files."""
        path = inside(self.root, folder) if folder else self.root
        if isinstance(path, Address):
            return {name: File(*held) for name, held in path.listing(deep=deep).items()}
        found: dict[str, File] = {}
        with suppress(FileNotFoundError):
            for entry in os.scandir(path):
                if deep and entry.is_dir(follow_symlinks=False):
                    below = self.files(
                        f"{folder}/{entry.name}" if folder else entry.name, deep=True
                    )
                    found |= {f"{entry.name}/{name}": held for name, held in below.items()}
                else:
                    with suppress(FileNotFoundError):  # published by another command meanwhile
                        known = entry.stat(follow_symlinks=False)
                        found[entry.name] = File(known.st_size, known.st_mtime)
        return dict(sorted(found.items()))

    # Writing

    def begin(self) -> None:
        """Make the folder, and remove temporary files of processes that have ended; raise OSError
        if it cannot be written, or holds something else than a run."""
        if self.root.exists() and not self.root.is_dir():
            raise ExistsError(f"{self.root} is a file. Choose another `folder`.")
        names = sorted(name for name in self.files() if not name.startswith(_TEMPORARY))
        if names and "batch.json" not in names:
            raise ExistsError(
                f"{self.root} is not a batch run's folder: it has no batch.json, but "
                f"{', '.join(names[:3])}. Choose another `folder`."
            )
        check_writable(self.root)
        self.remove_temporary()

    def publish(self, name: str, parts: bytes | Iterable[bytes]) -> None:
        """Write a file, in parts if it is large, whole or not at all."""
        with self.temporary_file() as made:
            with made.open("wb") as file:
                file.writelines([parts] if isinstance(parts, bytes) else parts)
            self.publish_file(name, made)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it is there; return False if it is, also if another process made it
        at the same time."""
        path = inside(self.root, name)
        if isinstance(path, Address):
            return path.create(data)
        with self.temporary_file() as made:
            made.write_bytes(data)
            flush(made)
            try:
                os.link(made, path)  # whole at once
            except FileExistsError:
                return False
            except OSError:  # a disk without such links
                try:
                    with path.open("xb") as file:
                        file.write(data)
                        file.flush()
                        os.fsync(file.fileno())
                except FileExistsError:
                    return False
            flush(path.parent)
            return True

    def publish_file(self, name: str, made: Path) -> None:
        """Give a finished :meth:`temporary_file` its name."""
        path = inside(self.root, name)
        if isinstance(path, Address):
            path.upload(made)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        flush(made)
        os.replace(made, path)
        flush(path.parent)

    def publish_folder(self, name: str, files: Files, last: str) -> None:
        """Write a folder by one rename; in a storage file by file, ``last`` at the end. A folder
        that is there has the same files: its name carries their checksum."""
        folder = inside(self.root, name)
        if isinstance(folder, Address):
            for each in sorted(files, key=lambda each: (each == last, each)):
                inside(folder, each).write_bytes(files[each])
            return
        made = self._temporary_path()
        try:
            write_files(made, files)
            flush_tree(made)
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.rename(made, folder)
            except OSError:  # ENOTEMPTY, EEXIST or, on Windows, another: it is there
                if not folder.is_dir():
                    raise
            flush(folder.parent)
        except OSError as error:
            raise access_error(error, self.root) from error
        finally:
            shutil.rmtree(made, ignore_errors=True)

    @contextmanager
    def temporary_file(self) -> Iterator[Path]:
        """Yield the path of a file on this machine, to fill and to publish; it is removed then."""
        made = self._temporary_path()
        try:
            yield made
        except OSError as error:
            raise access_error(error, self.root) from error
        finally:
            made.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all below it, if it is there."""
        path = inside(self.root, name)
        if isinstance(path, Address):
            for below in path.listing(deep=True):
                (path / below).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """Remove the temporary files that killed processes left in the folder."""
        if not self.is_remote:
            remove_abandoned(self.root, _TEMPORARY)

    def _temporary_path(self) -> Path:
        folder = Path(tempfile.gettempdir()) if self.is_remote else self.root
        folder.mkdir(parents=True, exist_ok=True)
        return folder / temporary_name(_TEMPORARY)
