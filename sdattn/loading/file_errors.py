"""Library errors about a file of weights, told in one sentence that names the file."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import InvalidValueError, SdattnError, is_out_of_memory
from ..files.terminal import shorter, visible

_TO_PROGRAMMERS = re.compile(r"\. (?:If you want|For more information|Please) ")  # advice to cut


@contextmanager
def loading_errors(path: str | Path, what: str, advice: str) -> Iterator[None]:
    """Turn library errors over a file's content into a ValueError that says what it was loaded as,
    ``"a StableDiffusionPipeline"``, and what to do; other errors pass through."""
    try:
        yield
    except (SdattnError, ImportError, MemoryError, Warning):
        raise
    except Exception as error:  # any error, including IndexError, TypeError and torch's
        if is_out_of_memory(error):
            raise
        said = said_by(error)
        raise InvalidValueError(f"{path} cannot be loaded as {what}: {said}. {advice}") from error


def said_by(error: BaseException) -> str:
    """Return a library error's message in one line, with its class if the message is unclear."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    text = shorter(visible(_TO_PROGRAMMERS.split(text)[0]), 240).rstrip(".")
    if not isinstance(error, (ValueError, RuntimeError, OSError)) or not text:
        text = f"{type(error).__name__} {text}".strip()
    return f"{text} ({said_by(error.__cause__)})" if error.__cause__ else text
