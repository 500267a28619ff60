"""Names of temporary files that tell which process may still be at work on them."""

import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil

_FORGOTTEN = 24 * 3600.0  # seconds after which another machine's temporary files are nobody's


def temporary_name(prefix: str) -> str:
    """Return a new name, ``PREFIX HOST-PID-RANDOM`` without the space."""
    return f"{prefix}{_host()}-{os.getpid()}-{uuid4().hex[:8]}"


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove the files and folders so named whose processes have ended; another machine's, which
    nobody here can ask, when they are a day old."""
    for path in folder.glob(f"{prefix}*"):
        host, _, rest = path.name.removeprefix(prefix).partition("-")
        pid = rest.partition("-")[0]
        with suppress(OSError):  # another user's, or removed meanwhile
            if host == _host() and pid.isdecimal():
                is_in_use = psutil.pid_exists(int(pid))
            else:
                is_in_use = time.time() - path.stat().st_mtime < _FORGOTTEN
            if not is_in_use:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _host() -> str:
    return socket.gethostname().replace("-", "_")
