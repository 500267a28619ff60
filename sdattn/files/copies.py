import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from .addresses import Address, at_once


class Copies:
    """Local copies of the ``most`` latest used objects (default: all), renewed after a change."""

    def __init__(self, most: int | None = None):
        self.most = most
        self._made: dict[str, Path] = {}
        self._folder: Path | None = None
        self._lock = threading.Lock()

    def of(self, address: Address, key: str | None = None) -> Path:
        """Return the path of the object's copy, or one without a file if there is no object;
        ``key`` is a text that changes with the content (default: ask the storage)."""
        key = f"{address} {address.key() if key is None else key}"
        with self._lock:
            path = self._made.pop(key, None)
            if path is not None:
                self._made[key] = path  # now the latest used
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
        return at_once(self.of, addresses)

    def _new(self) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="sdattn-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder / uuid4().hex
