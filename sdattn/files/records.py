"""Records as JSON and back: what a dataclass is written as, and is read from with checks."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import SdattnError
from .terminal import shorter


class Record:
    """A dataclass that is written as an object of JSON, its entries in the order of the fields;
    one whose default is None is left out while it is None."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it: lists, no tuples; Python's own numbers."""
        return {
            entry.name: plain(value)
            for entry in fields(self)  # type: ignore[arg-type]
            if (value := getattr(self, entry.name)) is not None or entry.default is not None
        }


def plain(value: Any) -> Any:
    """Records, tuples and numpy's numbers in a value as JSON has them."""
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if is_dataclass(value):
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(held) for held in value]
    # what is like a number, such as numpy's
    return value if value is None or isinstance(value, (str, int, float)) else float(value)


class RecordError(SdattnError):
    """An entry that is missing or of another kind."""


@cache
def _kinds(record: type) -> dict[str, Any]:
    """What the entries of a class hold, by name; one that may be left out is never null."""
    kinds = get_type_hints(record)
    for entry in fields(record):
        if issubclass(record, Record) and entry.default is None:
            some = [kind for kind in get_args(kinds[entry.name]) if kind is not NoneType]
            kinds[entry.name] = Union[tuple(some)]  # noqa: UP007
    return kinds


def read_record(kind: Any, value: Mapping[str, Any], at: str = "") -> Any:
    """A dataclass from an object of JSON.

    Entries may be missing where their field has a default, but an empty text, which is always
    written. The document itself, but none of the objects in it, may have others.

    Args:
        kind: the class.
        value: the object.
        at: its place in the document, for errors.

    Raises:
        RecordError: an entry is missing or of another kind than its annotation says, or the class
            refuses it.
    """
    begins = f"{at}." if at else ""
    held = {}
    for entry in fields(kind):
        if entry.name in value:
            read = _read(_kinds(kind)[entry.name], value[entry.name], begins + entry.name)
            held[entry.name] = read
        elif entry.default in (MISSING, ""):
            raise RecordError(f"{begins + entry.name!r} is missing")
    if at and (foreign := value.keys() - held.keys()):
        raise RecordError(f"{at!r} cannot be read: this version does not know its {min(foreign)!r}")
    try:
        return kind(**held)
    except ValueError as error:
        raise RecordError(f"{at!r} cannot be read: {str(error).rstrip('.')}") from None


def _read(kind: Any, value: Any, at: str) -> Any:
    """A value of JSON as a field's annotation says; of a choice, its class sees which."""
    origin, kinds = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        # The first kind of a choice that fits; None of them: refused with all of their names.
        fitting = (found for choice in kinds if (found := _attempt(choice, value, at)))
        [read] = next(fitting, None) or _refuse(kind, value, at)
        return read
    if is_dataclass(kind) and isinstance(value, dict):
        return read_record(kind, value, at)
    if origin is dict and isinstance(value, dict):
        begins = f"{at}." if at else ""
        return {name: _read(kinds[1], held, begins + name) for name, held in value.items()}
    if origin in (list, tuple) and isinstance(value, list):
        each = kinds[:1] * len(value) if origin is list or kinds[-1] is Ellipsis else kinds
        if len(each) == len(value):
            numbered = enumerate(zip(each, value, strict=True))
            return origin(_read(of, held, f"{at}[{i}]") for i, (of, held) in numbered)
    return value if _is(value, kind) else _refuse(kind, value, at)


def _attempt(kind: Any, value: Any, at: str) -> tuple[Any] | None:
    try:
        return (_read(kind, value, at),)
    except RecordError:
        return None


def _is(value: Any, kind: Any) -> bool:
    if kind is Any or get_origin(kind) is Literal:
        return kind is Any or isinstance(value, str)
    kinds = (int, float) if kind is float else kind
    simple = get_origin(kind) is None and isinstance(value, kinds)
    return simple and (kind is bool or not isinstance(value, bool))


def _refuse(kind: Any, value: Any, at: str) -> Any:
    raise RecordError(f"{at!r} is {shortened(value)}, where {_named(kind)} is expected")


def shortened(value: Any) -> str:
    return shorter(json.dumps(value, ensure_ascii=False), 40)


def _named(kind: Any) -> str:
    origin, kinds = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_named, kinds)))
    if origin in (list, tuple):
        size = "" if origin is list or kinds[-1] is Ellipsis else f"{len(kinds)} of "
        return f"a list of {size}{_named(kinds[0])}"
    if origin is dict or is_dataclass(kind):
        return "an object"
    names = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
    return names.get(kind, "a text")
