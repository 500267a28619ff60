"""A lock on a run's folder, shared by its job's processes, that dies with the last of them."""

import errno
import getpass
import json
import os
import socket
import time
from abc import ABC, abstractmethod
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from ...errors import AccessError, SdattnWarning, warn
from ...files.addresses import AnyPath

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_TRIES = 5


class Ownership(ABC):
    """A job's claim to a run: its first process takes it, the others join. The file ``note`` names
    the holder, and ``what`` the thing owned."""

    _unknown: type[OSError] = FileNotFoundError  # when reading the note; other errors are raised

    def __init__(self, note: AnyPath, what: AnyPath):
        self.note, self.what = note, what

    @property
    def holder(self) -> dict[str, Any]:
        """Who took it last: job, user, host, process and time; empty if free or not yet noted."""
        try:
            found = json.loads(self.note.read_bytes())
        except (self._unknown, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def lost(self) -> str | None:
        """Why this job may no longer write, or None."""
        return None

    @abstractmethod
    def take(self, job: str) -> None:
        """Take it for a job; raise an OSError that names the job that has it, if one does."""

    @abstractmethod
    def join(self, job: str) -> bool:
        """Share what this job's first process took; return False if that is not visible here."""

    @abstractmethod
    def free(self, *, unknown: bool = True) -> bool:
        """Check that no job has it; ``unknown`` is the answer if that cannot be known."""

    @abstractmethod
    def release(self) -> None: ...

    def describe_holder(self) -> str:
        """Return ``ada on node7 (process 4711, since 2030-01-01T12:00:00+00:00)``."""
        holder = self.holder
        names = ("user", "host", "process", "since")
        return "{} on {} (process {}, since {})".format(*(holder.get(n, "?") for n in names))

    def _refuse(self) -> NoReturn:
        raise AccessError(
            f"{self.what} is being written by another job: {self.describe_holder()}. Wait for it, "
            "stop it, or choose another `folder`."
        )


def owner(job: str) -> dict[str, Any]:
    """Return the description of this process as a job's first."""
    return {
        "job": job,
        "user": _user(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


class FolderLock(Ownership):
    """One job at a time, on a disk; ``NAME.json`` next to the lock names the holder. The kernel
    holds the lock, so a killed process leaves none, not even on a machine that shares the disk."""

    _unknown = OSError  # including another user's note

    def __init__(self, path: Path, what: Path):
        super().__init__(path.with_suffix(".json"), what)
        self.path = path
        self._file: Any = None

    def take(self, job: str) -> None:
        if fcntl is None:
            raise AccessError(f"{self.what} cannot be locked: this system has no flock.")
        # Exclusive for an instant, to write the holder; from then on shared with the job's other
        # processes.
        self._hold(fcntl.LOCK_EX)
        self.note.write_text(json.dumps(owner(job)))
        self._hold(fcntl.LOCK_SH)

    def join(self, job: str) -> bool:
        if self.holder.get("job") != job:
            return False
        self._hold(fcntl.LOCK_SH)
        return True

    def free(self, *, unknown: bool = True) -> bool:
        if not self.path.exists():
            return True
        with self.path.open("r+b" if os.access(self.path, os.W_OK) else "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:
                return unknown
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _hold(self, kind: int) -> None:
        if self._file is None:
            self._file = self.path.open("a+b")  # on NFS either lock needs its mode of opening
        try:
            for attempt in range(_TRIES):
                try:
                    fcntl.flock(self._file, kind | fcntl.LOCK_NB)
                    return
                except BlockingIOError:  # perhaps for an instant: a process asks for the holder
                    if attempt + 1 < _TRIES:
                        time.sleep(0.1)
            self.release()
            self._refuse()
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            warn(
                f"{self.what} lies on a disk without locks ({error.strerror}). Make sure that no "
                "other job writes there.",
                SdattnWarning,
            )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # in a container a user may only have a number
        return str(os.getuid())
