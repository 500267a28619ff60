"""Documents and their checksums."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def to_json(document: Any) -> bytes:
    """JSON for people to read too, with a newline at the end.

    Raises:
        ValueError: a number in it is not finite.
    """
    return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
