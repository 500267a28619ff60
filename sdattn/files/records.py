import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import InvalidValueError, SdattnError
from .terminal import shorter
from .writing import sha256, to_json


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file holds none, or there is no file."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class Record:
    """A dataclass written as a JSON object in the order of its fields; an entry whose default is
    None is left out while it is None."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it: lists, no tuples; Python's own numbers."""
        return {
            entry.name: plain(value)
            for entry in fields(self)  # type: ignore[arg-type]
            if (value := getattr(self, entry.name)) is not None or entry.default is not None
        }


def plain(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if is_dataclass(value):
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(held) for held in value]
    # other number types, such as numpy's
    return value if value is None or isinstance(value, (str, int, float)) else float(value)


def sealed(document: Mapping[str, object], seal: str = "checksum") -> bytes:
    """Return a document as a JSON file that ends with a checksum of the rest."""
    rest = {name: value for name, value in document.items() if name != seal}
    return to_json({**rest, seal: sha256(to_json(rest))})


def read_sealed(data: bytes, path: object, format: str, do: str, seal: str = "") -> dict[str, Any]:
    """Return the document of a file that :func:`sealed` wrote (default: whatever its checksum);
    raise ValueError, which ends with what to ``do``, if it is damaged or of another format."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{path} is corrupt: {error}. {do}") from error
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if found != format:
        raise InvalidValueError(
            f"{path} is not of this version's format {format!r}; found {found!r}. {do} Or read it "
            "with the version that wrote it."
        )
    with suppress(ValueError):  # a number in it is not finite
        if not seal or sealed(document, seal) == data:
            return document
    raise InvalidValueError(f"{path} is not what a run wrote: its own checksum differs. {do}")


def read_document(kind: Any, document: Mapping[str, Any], path: object, do: str) -> Any:
    """Do as :func:`read_record`, with an error that names the file and what to ``do``."""
    try:
        return read_record(kind, document)
    except RecordError as problem:
        raise InvalidValueError(f"{path}: {problem}. {do}") from None


class RecordError(SdattnError):
    """A missing entry, or one of the wrong type."""


@cache
def _kinds(record: type) -> dict[str, Any]:
    """Return the types of a class's entries, by name; an optional entry is never null."""
    kinds = get_type_hints(record)
    for entry in fields(record):
        if issubclass(record, Record) and entry.default is None:
            some = [kind for kind in get_args(kinds[entry.name]) if kind is not NoneType]
            kinds[entry.name] = Union[tuple(some)]  # noqa: UP007
    return kinds


def read_record(kind: Any, value: Mapping[str, Any], at: str = "") -> Any:
    """Return a dataclass from a JSON object, at the place ``at`` in its document; raise RecordError
    if an entry is missing or does not fit its annotation, or the class refuses it.

    A field with a default may be missing, except an empty text. The document itself may have
    unknown entries; the objects in it may not.
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
    """Return a JSON value as a field's annotation says; a Literal is checked by its class."""
    origin = get_origin(kind)
    kinds = get_args(kind)
    if origin in (Union, UnionType):
        # The first type of a union that fits; if none does, the error names them all.
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
    origin = get_origin(kind)
    kinds = get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_named, kinds)))
    if origin in (list, tuple):
        size = "" if origin is list or kinds[-1] is Ellipsis else f"{len(kinds)} of "
        return f"a list of {size}{_named(kinds[0])}"
    if origin is dict or is_dataclass(kind):
        return "an object"
    names = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
    return names.get(kind, "a text")
