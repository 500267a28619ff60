"""Values in the lines of a batch: JSON that can be written again, and numbers given as text."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ...errors import InvalidValueError
from ...files.terminal import shown

# Names of items, which name folders
ID = re.compile(r"(?!.*\.\.)[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?")
_LEVELS = 20  # nested lists and objects; far more would fail later, when a run is written
_DIGITS = 100
_NUMBER = re.compile(r"\s*(-?)\+?0*(?=[0-9])([0-9.eE+-]+)\s*")
_EXACT = 2**53  # a larger float may have been rounded


class Fields(dict[str, Any]):
    """The fields of a line; ``texts`` holds the original cells, if any. Unknown fields are refused
    unless it is a row ``of_table``."""

    def __init__(
        self,
        found: Mapping[str, object],
        texts: Mapping[str, str] | None = None,
        of_table: bool = False,
    ):
        super().__init__(found)
        self.texts, self.of_table = texts, of_table

    def text(self, name: str) -> str:
        value = self.get(name) if self.texts is None else self.texts.get(name)
        if value is None or isinstance(value, str):
            return value or ""
        return json.dumps(value, ensure_ascii=False)


def number(value: Any, *, whole: bool) -> Any:
    """Return the number that a text or a float stands for, ``7`` for ``7.0`` and ``"7"`` if
    ``whole``; any other value as it is."""
    if isinstance(value, str) and (found := _NUMBER.fullmatch(value)):
        try:
            value = parsed(found[1] + found[2])
        except json.JSONDecodeError:
            return value
    is_exact = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    return int(value) if whole and is_exact else value


def decoded(raw: bytes) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise InvalidValueError(
            f"byte {error.start + 1} of the line, 0x{byte:02x}, is not UTF-8. Save it as UTF-8."
        ) from None
    if "\0" in text:
        raise InvalidValueError("there is a zero byte in it, as in UTF-16. Save it as UTF-8 text.")
    return text


def parsed(text: str) -> Any:
    """Return a JSON value that can be written again: raise ValueError for NaN, infinity, lone
    surrogates, json.JSONDecodeError for other text."""
    try:
        value = _JSON.decode(text)
        _check(value)
    except RecursionError:
        _refuse_depth()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InvalidValueError(
            f"\\u{ord(half):04x} is half a character. Write both halves, or the character itself."
        ) from None
    return value


def _check(value: object, level: int = 0) -> None:
    if level > _LEVELS:
        _refuse_depth()
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, (list, dict)):
        for part in value if isinstance(value, list) else [*value, *value.values()]:
            _check(part, level + 1)


def _refuse_depth() -> NoReturn:
    raise InvalidValueError(
        f"lists and objects are nested too deep. Write at most {_LEVELS} levels."
    )


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise InvalidValueError(f"a number has {len(digits)} digits. Write at most {_DIGITS}.")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(float(digits)):
        raise InvalidValueError(f"{shown(digits)} is too large for a number. Write a finite one.")
    return float(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidValueError(f"{name} is not a number. Write a finite one, or null.")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidValueError(f"{shown(name)} occurs twice. Write it once.")
        found[name] = value
    return found


_JSON = json.JSONDecoder(
    object_pairs_hook=_once, parse_int=_whole, parse_float=_finite, parse_constant=_refuse_constant
)
