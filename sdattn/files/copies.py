"""Objects of a storage as files of this machine, for what reads them by path."""

import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from .addresses import Address, at_once


class Copies:
    """Copies of objects, fetched when they are asked for, and again once they have changed.

    Args:
        most: so many are kept, those that were asked for last; all where it is None. They are
            removed with this object.
    """

    def __init__(self, most: int | None = None):
        self.most = most
        self._made: dict[str, Path] = {}
        self._folder: Path | None = None
        self._lock = threading.Lock()

    def of(self, address: Address, key: str | None = None) -> Path:
        """Where the object's copy is, which stays as it is when the object changes; a path at
        which there is nothing where there is no object.

        Args:
            address: of the object.
            key: another one for another content; by default the storage is asked.

        Raises:
            OSError: the storage cannot be reached.
        """
        key = f"{address} {address.key() if key is None else key}"
        with self._lock:
            path = self._made.pop(key, None)
            if path is not None:
                self._made[key] = path  # the one that was asked for last
                return path
        path = self._new()
        try:
            address.fetch(path)
        except FileNotFoundError:
            path.unlink(missing_ok=True)
            return path
        with self._lock:
            # Two threads may have fetched the same object: the first copy is kept.
            path = self._made.setdefault(key, path)
            while self.most is not None and len(self._made) > self.most:
                self._made.pop(next(iter(self._made))).unlink()
        return path

    def of_all(self, addresses: Iterable[Address]) -> list[Path]:
        """:meth:`of` each, many at once."""
        return at_once(self.of, addresses)

    def _new(self) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="sdattn-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder / uuid4().hex
