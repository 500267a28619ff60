"""Objects of a storage as files of this machine, for what reads them by path."""

import shutil
import tempfile
import threading
import weakref
from pathlib import Path

from .addresses import Address
from .writing import sha256


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
        self._fetching = threading.RLock()

    def of(self, place: Address) -> Path:
        """Where the object's copy is, which stays as it is when the object changes; a path at
        which there is nothing where there is no object.

        Raises:
            OSError: the storage cannot be reached.
        """
        key = sha256(f"{place} {place.key()}".encode())
        with self._fetching:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="sdattn-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            path = self._made.pop(key, None)
            if path is None:
                path = self._folder / key
                try:
                    place.fetch(path)
                except FileNotFoundError:
                    path.unlink(missing_ok=True)
                    return path
            self._made[key] = path
            while self.most is not None and len(self._made) > self.most:
                self._made.pop(next(iter(self._made))).unlink()
            return path
