"""Files in a storage that fsspec reaches, ``s3://bucket/run``, read and written like paths.

There a file is an object: it is complete or absent, and replaced as a whole; a folder is only a
common prefix of names.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

from ..errors import (
    AccessError,
    DeniedError,
    InvalidValueError,
    MissingFileError,
    MissingPackageError,
)

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+):/+(.*)", re.DOTALL)  # Path drops one slash
_LOCAL = ("file", "local")
_WAITS = (0.5, 2.0, 5.0)  # seconds before a failed call is retried
_HOPELESS = re.compile("Credentials|Offline")  # in the name of an error: a retry will not help
_SILENCE = 10.0  # seconds; a call that timed out after more is not retried
_S3 = ("s3", "s3a")
_S3_TRIES = 2  # by s3fs, of a server that is silent for 15 s; botocore's own would multiply them


def is_address(where: str | Path) -> bool:
    """Check whether it is an address, the Path of one, or the start of such a path, ``s3:``."""
    return _ADDRESS.fullmatch(f"{where}/") is not None


def path_of(where: str | Path | Address) -> Path | Address:
    """Return a local path, or an address in a storage, without contacting the storage; raise
    ValueError if fsspec knows no such storage, ImportError if a package is missing."""
    found = None if isinstance(where, Address) else _ADDRESS.fullmatch(str(where))
    if found is None:
        return where if isinstance(where, Address) else Path(where)
    scheme = found[1]
    rest = found[2].rstrip("/")
    if scheme.lower() in _LOCAL:
        return Path("/", rest)
    url = f"{scheme}://{rest}"
    try:
        import fsspec

        # fsspec chains storages, zip::s3://; a run in such a chain could not be written.
        if "::" in scheme:
            raise InvalidValueError("chained storages")
        options: dict[str, Any] = {"use_listings_cache": False}
        if scheme.lower() in _S3:
            own = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
            options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **own}
        files, path = fsspec.url_to_fs(url, **options)
        if scheme.lower() in _S3:
            files.retries = _S3_TRIES  # of this instance: another without the options above
    except ImportError as error:
        extra = " (pip install 'sdattn[s3]')" if scheme.lower() in _S3 else ""
        raise MissingPackageError(
            f"{url} needs a package that is not installed: {error}{extra}."
        ) from error
    except ValueError as error:
        raise InvalidValueError(
            f"fsspec knows no storage for {url} ({error}). Write s3://, gs://, hf:// or "
            "another of its schemes, or a path."
        ) from error
    except Exception as error:  # from many libraries
        raise AccessError(f"{url} cannot be reached: {_line(error)}") from error
    return Address(files, path.rstrip("/"), scheme)


@dataclass(frozen=True, order=True)
class Address:
    """An object in a storage, or its prefix, with as much of pathlib's Path as runs need.

    Failed calls are retried: repeating a put that in fact succeeded does no harm. All methods raise
    OSError when the storage cannot be reached or refuses. ``files`` is a filesystem of fsspec
    without a cache of listings, ``path`` as it writes it, ``scheme`` as the user wrote it.
    """

    files: Any = field(compare=False, repr=False)
    path: str
    scheme: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path.lstrip('/')}"

    def __truediv__(self, name: str) -> Address:
        return Address(self.files, f"{self.path}/{name}", self.scheme)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def parts(self) -> tuple[str, ...]:
        return PurePosixPath(self.path).parts

    @property
    def parents(self) -> list[Address]:
        above = [str(up) for up in PurePosixPath(self.path).parents]
        return [Address(self.files, up, self.scheme) for up in above if up not in ("/", ".")]

    # Queries

    def size(self) -> int | None:
        """Return the object's bytes, or None if it is missing."""
        known = self._info()
        return None if known is None or known["type"] == "directory" else known["size"]

    def exists(self) -> bool:
        return self._info() is not None

    def is_file(self) -> bool:
        return self.size() is not None

    def is_dir(self) -> bool:
        known = self._info()
        return known is not None and known["type"] == "directory"

    def is_symlink(self) -> bool:
        return False

    def resolve(self) -> Address:
        return self

    def iterdir(self) -> Iterator[Address]:
        try:
            found = self._ask(self.files.ls, self.path, detail=False)
        except FileNotFoundError:
            return
        names = {PurePosixPath(path).name for path in found if path.rstrip("/") != self.path}
        yield from (self / name for name in sorted(names))

    def listing(self, *, deep: bool) -> dict[str, tuple[int, float]]:
        """Return (bytes, time in seconds since 1970) of the objects below, by relative path; if
        ``deep``, at any depth."""
        try:
            most = None if deep else 1
            found = self._ask(self.files.find, self.path, maxdepth=most, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self.path) + 1
        return {p[start:]: (k["size"], _time_of(k)) for p, k in found.items() if p[start:]}

    # Reading and writing

    def read_bytes(self) -> bytes:
        return self._ask(self.files.cat_file, self.path)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def open(self, mode: str = "rb") -> Any:
        return self._ask(self.files.open, self.path, mode)

    def fetch(self, path: Path) -> None:
        self._ask(self.files.get_file, self.path, str(path))

    def write_bytes(self, data: bytes) -> None:
        self._ask(self.files.pipe_file, self.path, data)

    def create(self, data: bytes) -> bool:
        """Write an object unless it is there (``If-None-Match: *``); return False if it is. In a
        storage that has no such call it is looked for first."""
        if self.exists():
            return False
        try:
            self._ask(self.files.pipe_file, self.path, data, mode="create")
        except (OSError, NotImplementedError):
            if self.exists():
                return False
            self.write_bytes(data)
        return True

    def upload(self, made: Path) -> None:
        """Write an object from a file."""
        self._ask(self.files.put_file, str(made), self.path)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._ask(self.files.rm_file, self.path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def check_writable(self) -> None:
        """Raise OSError, with the reason, if nothing can be written below."""
        probe = self / f".sdattn-probe-{uuid4().hex}"
        try:
            probe.write_bytes(b"")
            probe.unlink(missing_ok=True)
        except OSError as error:
            is_wrong = isinstance(error, (PermissionError, FileNotFoundError))
            raise (DeniedError if is_wrong else AccessError)(
                f"Cannot write to {self}: {_line(error.__cause__ or error)} Check the address and "
                "your credentials."
            ) from error

    def _info(self) -> dict[str, Any] | None:
        try:
            return self._ask(self.files.info, self.path)
        except FileNotFoundError:
            return None

    def _ask(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        for wait in (*_WAITS, None):
            began = time.monotonic()
            try:
                return call(*args, **options)
            except FileNotFoundError as error:
                raise MissingFileError(f"{self} does not exist: {_line(error)}") from error
            except PermissionError as error:
                raise DeniedError(f"{self} denied access: {_line(error)}") from error
            except (FileExistsError, NotImplementedError):
                raise
            except Exception as error:  # from many libraries, not always an OSError
                kind = type(error).__name__
                is_silent = "Timeout" in kind and time.monotonic() - began >= _SILENCE
                if wait is None or is_silent or _HOPELESS.search(kind):
                    raise AccessError(f"{self} cannot be reached: {_line(error)}") from error
            time.sleep(wait)


AnyPath = Path | Address


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith(".") else f"{text}."


def _time_of(known: dict[str, Any]) -> float:
    """Return when an object was written, in seconds since 1970, as its storage names that."""
    names = ("LastModified", "last_modified", "mtime", "updated", "created")
    found = next((known[name] for name in names if known.get(name) is not None), 0.0)
    if isinstance(found, str):
        found = datetime.fromisoformat(found.replace("Z", "+00:00"))
    return found.timestamp() if isinstance(found, datetime) else float(found)


class Copies:
    """Local copies of the ``most`` latest used objects, whose content never changes."""

    def __init__(self, most: int):
        self.most = most
        self._made: dict[Address, Path] = {}
        self._folder: Path | None = None
        self._lock = threading.Lock()

    def of(self, address: Address) -> Path:
        """Return the path of the object's copy."""
        with self._lock:
            path = self._made.pop(address, None)
            if path is None:
                if self._folder is None:
                    self._folder = Path(tempfile.mkdtemp(prefix="sdattn-"))
                    weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
                path = self._folder / uuid4().hex
                address.fetch(path)
            self._made[address] = path  # now the latest used
            while len(self._made) > self.most:
                self._made.pop(next(iter(self._made))).unlink()
            return path
