"""Dataclasses as JSON documents, and documents that carry a checksum of themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..errors import InvalidValueError, SdattnError
from .terminal import shorter
from .writing import sha256, to_json

if TYPE_CHECKING:
    from pydantic import ConfigDict, TypeAdapter, ValidationError


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

    # for pydantic, and for the objects in a document too
    __pydantic_config__: ClassVar[ConfigDict] = {"strict": True, "extra": "forbid"}

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it: lists, no tuples; Python's own numbers."""
        found = {}
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            if value is not None or entry.default is not None:
                found[entry.name] = plain(value)
        return found


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


_END = b"\n}\n"  # of a document


def sealed(document: Mapping[str, object], seal: str = "checksum") -> bytes:
    """Return a document as a JSON file that ends with a checksum of the rest."""
    rest = {name: value for name, value in document.items() if name != seal}
    return to_json({**rest, seal: sha256(to_json(rest))})


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")


def read_sealed(data: bytes, path: object, format: str, do: str, seal: str = "") -> dict[str, Any]:
    """Return the document of a file that :func:`sealed` wrote (default: whatever its checksum);
    raise ValueError, which ends with what to ``do``, if it is damaged or of another format."""
    try:
        document = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{path} is corrupt: {error}. {do}") from error
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if found != format:
        raise InvalidValueError(
            f"{path} is not of this version's format {format!r}; found {found!r}. {do} Or read it "
            "with the version that wrote it."
        )
    # The seal is the last entry, so the rest is the text before it: no need to write it again.
    rest, _, last = data.rpartition(f',\n "{seal}": '.encode())
    if not seal or last == f'"{sha256(rest + _END)}"'.encode() + _END:
        return document
    raise InvalidValueError(f"{path} is not what a run wrote: its own checksum differs. {do}")


class RecordError(SdattnError):
    """A missing entry, or one of the wrong type."""


R = TypeVar("R", bound=Record)


def read_document(kind: type[R], document: Mapping[str, Any], path: object, do: str) -> R:
    """Do as :func:`read_record`, with an error that names the file and what to ``do``."""
    try:
        return read_record(kind, document)
    except RecordError as problem:
        raise InvalidValueError(f"{path}: {problem}. {do}") from None


def read_record(kind: type[R], document: Mapping[str, Any]) -> R:
    """Return a record from a JSON object; raise RecordError if an entry is missing or does not fit
    its annotation, or the class refuses it.

    The document itself may have unknown entries; the objects in it may not.
    """
    from pydantic import ValidationError

    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    entries = {name: document[name] for name in names if name in document}
    try:
        reader = _reader(kind)  # type: ignore[arg-type]  # to mypy a class has no hash
        return reader.validate_json(_reader(dict).dump_json(entries))
    except ValidationError as error:
        raise RecordError(_problem(error)) from None


def from_json(line: bytes) -> Any:
    """Do as json.loads, twice as fast; raise ValueError if it is no JSON."""
    return _reader(object).validate_json(line)


def check_object(kind: type, found: object) -> None:
    """Raise RecordError if what was read from JSON is no object with the entries of a TypedDict;
    others do not matter. It costs a tenth of :func:`read_record`."""
    from pydantic import ValidationError

    try:
        _reader(kind).validate_python(found, strict=True)
    except ValidationError as error:
        raise RecordError(_problem(error)) from None


@cache
def _reader(kind: type) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _problem(error: ValidationError) -> str:
    """Return the first problem: where it is, what was found, what is wrong with it."""
    first = error.errors(include_url=False)[0]
    place = ""
    for step in first["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{step}"
    place = place.removeprefix(".")
    if first["type"] == "missing":
        return f"{place!r} is missing"
    reason = first["msg"].removeprefix("Value error, ").rstrip(".")
    if first["type"] in ("value_error", "unexpected_keyword_argument"):
        return f"{place!r} cannot be read: {reason}"
    return f"{place!r} is {shortened(first['input'])}: {reason}"


def shortened(value: Any) -> str:
    return shorter(json.dumps(value, ensure_ascii=False), 40)
