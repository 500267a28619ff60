"""Files in a storage that fsspec reaches, ``s3://bucket/run``, read and written as paths are.

There a file is an object: it is there whole or not at all, and replaced whole; a folder is nothing
but how names begin.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from uuid import uuid4

from ..errors import (
    AccessError,
    DeniedError,
    InvalidValueError,
    MissingFileError,
    MissingPackageError,
)

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+):/+(.*)", re.DOTALL)  # Path takes one / away
_LOCAL = ("file", "local")
_WAITS = (0.5, 2.0)  # seconds before what has failed is tried again
_HOPELESS = re.compile("Credentials|Offline")  # in the name of an error: it stays as it is
_IN_MEMORY = 2**25  # bytes of a file that is sent from memory
_TOGETHER = 16  # requests of objects

T = TypeVar("T")


def is_address(where: str | Path) -> bool:
    """Whether it is an address, the Path of one, or the beginning of such a path, ``s3:``."""
    return _ADDRESS.fullmatch(f"{where}/") is not None


def path_of(where: str | Path | Address) -> Path | Address:
    """A path of this machine, or an address in a storage; nothing is asked of the storage yet.

    Args:
        where: ``s3://bucket/run``, also as the Path of it, or a path.

    Raises:
        ValueError: fsspec knows no such storage.
        ImportError: a package that reaches it is not installed.
        OSError: it cannot be reached as it is set up here.
    """
    found = None if isinstance(where, Address) else _ADDRESS.fullmatch(str(where))
    if found is None:
        return where if isinstance(where, Address) else Path(where)
    scheme, rest = found[1], found[2].rstrip("/")
    if scheme.lower() in _LOCAL:
        return Path("/", rest)
    url = f"{scheme}://{rest}"
    try:
        import fsspec

        # fsspec chains storages, zip::s3://; a run in one behind another could not be written.
        if "::" in scheme:
            raise InvalidValueError("one behind another")
        files, path = fsspec.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        extra = " (pip install 'sdattn[s3]')" if scheme.lower() in ("s3", "s3a") else ""
        raise MissingPackageError(
            f"{url} needs a package that is not installed: {error}{extra}."
        ) from error
    except ValueError as error:
        raise InvalidValueError(
            f"{url} is of no storage that fsspec knows ({error}). Write s3://, gs://, hf:// or "
            "another of its schemes, or a path."
        ) from error
    except Exception as error:  # of many libraries
        raise AccessError(f"{url} cannot be reached: {_line(error)}") from error
    return Address(files, path.rstrip("/"), scheme)


class Address:
    """An object in a storage, or what is below it, with as much of pathlib's Path as runs need.

    What fails is tried again, as a put that came through although its answer did not does no harm.

    Args:
        files: of fsspec, without a cache of listings.
        path: as ``files`` writes it.
        scheme: as the user wrote it.

    Raises:
        OSError: by all methods, when the storage cannot be reached or refuses.
    """

    def __init__(self, files: Any, path: str, scheme: str):
        self.files, self.path, self.scheme = files, path, scheme

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path.lstrip('/')}"

    def __repr__(self) -> str:
        return f"Address({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: Address) -> bool:
        return self.path < other.path

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

    # What is there

    def size(self) -> int | None:
        """Bytes of the object; None where there is none."""
        known = self._info()
        return None if known is None or known["type"] == "directory" else known["size"]

    def key(self) -> str | None:
        """Another one whenever the object is another one; None where there is none."""
        known = self._info()
        return None if known is None or known["type"] == "directory" else str(known)

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
        """What is directly below, by name."""
        try:
            found = self._ask(self.files.ls, self.path, detail=False)
        except FileNotFoundError:
            return
        names = {PurePosixPath(path).name for path in found if path.rstrip("/") != self.path}
        yield from (self / name for name in sorted(names))

    def glob(self, pattern: str) -> Iterator[Address]:
        """What is directly below and has such a name."""
        return (found for found in self.iterdir() if fnmatchcase(found.name, pattern))

    def sizes(self) -> dict[str, int]:
        """Bytes of every object below, however deep, by its path from here; in one listing."""
        try:
            found = self._ask(self.files.find, self.path, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self.path) + 1
        return {path[start:]: known["size"] for path, known in found.items() if path[start:]}

    # Reading and writing

    def read_bytes(self) -> bytes:
        return self._ask(self.files.cat_file, self.path)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def open(self, mode: str = "rb") -> Any:
        """A file to read, that can seek."""
        return self._ask(self.files.open, self.path, mode)

    def fetch(self, path: Path) -> None:
        """Copy the object to a path of this machine."""
        self._ask(self.files.get_file, self.path, str(path))

    def write_bytes(self, data: bytes) -> None:
        self._ask(self.files.pipe_file, self.path, data)

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode())

    def write_parts(self, parts: Iterable[bytes]) -> None:
        """Write an object that may be larger than the memory."""
        with tempfile.NamedTemporaryFile() as file:
            file.writelines(parts)
            file.flush()
            if file.tell() > _IN_MEMORY:
                self._ask(self.files.put_file, file.name, self.path)
            else:
                self.write_bytes(Path(file.name).read_bytes())

    def create(self, data: bytes) -> None:
        """Write an object where there is none; raises FileExistsError where there is, if the
        storage can tell."""
        try:
            self._ask(self.files.pipe_file, self.path, data, mode="create")
        except FileExistsError:
            raise
        except (NotImplementedError, OSError):  # some servers of S3 know no such condition
            self.write_bytes(data)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._ask(self.files.rm_file, self.path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: folders are not made."""

    def check_writable(self) -> None:
        """Raise OSError, with the reason, if nothing can be written below."""
        probe = self / f".batch/probe-{uuid4().hex}"
        try:
            probe.write_bytes(b"")
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise AccessError(
                f"Cannot write to {self}: {_line(error.__cause__ or error)} Check the address and "
                "what your credentials allow."
            ) from error

    def _info(self) -> dict[str, Any] | None:
        try:
            return self._ask(self.files.info, self.path)
        except FileNotFoundError:
            return None

    def _ask(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        for wait in (*_WAITS, None):
            try:
                return call(*args, **options)
            except FileNotFoundError as error:
                raise MissingFileError(f"{self} is not there: {_line(error)}") from error
            except PermissionError as error:
                raise DeniedError(f"{self} is not allowed: {_line(error)}") from error
            except (FileExistsError, NotImplementedError):
                raise
            except Exception as error:  # of many libraries, and not all an OSError
                if wait is None or _HOPELESS.search(type(error).__name__):
                    raise AccessError(f"{self} cannot be reached: {_line(error)}") from error
            time.sleep(wait)


AnyPath = Path | Address


def at_once(call: Callable[[Address], T], addresses: Iterable[Address]) -> list[T]:
    """What a call gives for each, many at a time, as a storage takes long to answer."""
    with ThreadPoolExecutor(_TOGETHER) as pool:
        return list(pool.map(call, addresses))


def _line(error: BaseException) -> str:
    """What an error says, as a sentence in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith(".") else f"{text}."
