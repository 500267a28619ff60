"""Values in the lines of a batch: JSON that can be written again, and what one looks like."""

import json
import math
from typing import Any, NoReturn

from ...errors import InvalidValueError
from ...files.terminal import shown

_LEVELS = 20  # nested lists and objects; far more would fail later, where a run is written
_DIGITS = 100

Fields = dict[str, Any]


def parsed(text: str) -> Any:
    """A JSON value that can be written again: no number that is none, no half a character.

    Raises:
        json.JSONDecodeError: it is no JSON.
        ValueError: it cannot be written again.
    """
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


def _check(value: Any, level: int = 0) -> None:
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
        raise InvalidValueError(
            f"{shown(digits)} is beyond any number there is. Write a finite one."
        )
    return float(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidValueError(f"{name} is no number. Write a finite one, or null.")


def _once(pairs: list[tuple[str, Any]]) -> Fields:
    found: Fields = {}
    for name, value in pairs:
        if name in found:
            raise InvalidValueError(f"{shown(name)} is there twice. Write it once.")
        found[name] = value
    return found


_JSON = json.JSONDecoder(
    object_pairs_hook=_once, parse_int=_whole, parse_float=_finite, parse_constant=_refuse_constant
)
