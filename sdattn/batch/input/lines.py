"""The lines of a batch before they are checked: JSON, tables or text, as fields."""

import io
import json
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

from ...errors import InvalidValueError, refuse
from ...files.terminal import shown
from .columns import Columns
from .tables import Numbered, open_table
from .texts import header_delimiter, of_text, text_lines
from .values import Fields, decoded, parsed

KINDS = ("jsonl", "json", "csv", "tsv", "txt", "parquet")
_SUFFIXES = {".ndjson": "jsonl", **{f".{kind}": kind for kind in KINDS}}
_LONGEST = 1_000_000  # bytes of a line; its content is written with every item
_LOOKED_AT = 1000  # lines, to tell a table from text
_OBJECT = re.compile(rb"""\{\s*(?:["'}]|\Z)""")
_ARRAY = re.compile(rb"""\s*\[\s*(?:[\[{"\]]|\Z)""")


def kind_of(name: str) -> str:
    """Return the format of a file by its name, one of :data:`KINDS`, or ``"auto"`` for ``-``,
    standard input; raise ValueError for another extension.

    >>> kind_of("prompts.JSONL"), kind_of("-")
    ('jsonl', 'auto')
    """
    if name == "-":
        return "auto"
    try:
        return _SUFFIXES[Path(name).suffix.lower()]
    except KeyError:
        raise InvalidValueError(
            f"Asked for the prompts in {name!r}. Pass a file that ends in .jsonl or .ndjson (a "
            "JSON object per line), .csv or .tsv (a header, then rows), .txt (a prompt per line), "
            ".json (an array, or COCO captions), .parquet or .tar (images with captions), a local "
            "folder of images with captions or one that datasets reads, or - for standard input."
        ) from None


def open_lines(
    data: bytes, kind: str, columns: Columns | None = None
) -> tuple[Numbered, Callable[[bytes], Fields | None]]:
    """Return the numbered lines of an input, and a function that returns the fields of one or None;
    raise ValueError for an input, or a header, that cannot be read as of its kind.

    The input is UTF-8, or UTF-16 with a byte order mark. Lines end with a line feed, or, in an
    input without any, with a carriage return. For ``kind`` see :func:`kind_of`. ``"rows"``: lines
    of JSON that were the rows of a table. ``"auto"``: JSON if it begins so, a table if the first
    line that is not blank is a header, else text.
    """
    data = _as_utf8(data)
    if kind in ("auto", "txt"):
        kind = _kind_by_looks(data, kind)
    lines = io.BytesIO(data).readlines()
    if kind in ("csv", "tsv"):
        rows, fields_of = open_table(lines, kind, columns or Columns())
        return rows, partial(_read, fields_of)
    if kind == "json":
        if (found := _rows_of_json(data)) is None:
            raise InvalidValueError(
                "The input is not a JSON list. Write an array, or, in a .jsonl file, objects."
            )
        lines = [json.dumps(row).encode() for row in found]
    if kind == "txt":
        return text_lines(lines), partial(_read, of_text)
    if kind not in ("jsonl", "json", "rows"):
        raise refuse("kind", kind, "'jsonl', 'json', 'csv', 'tsv', 'txt' or 'auto'")
    return enumerate(lines, 1), partial(_read, partial(_of_json, of_table=kind != "jsonl"))


def _as_utf8(data: bytes) -> bytes:
    """Return the input as UTF-8 without a byte order mark, its lines ended by line feeds."""
    if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        try:
            data = data.decode("utf-16").encode()
        except UnicodeDecodeError as error:
            raise InvalidValueError(
                f"The input begins as UTF-16 and cannot be read as such: {error.reason} at byte "
                f"{error.start + 1}. Save it as UTF-8."
            ) from None
    data = data.removeprefix(BOM_UTF8)
    return data if b"\n" in data else data.replace(b"\r", b"\n")


def _kind_by_looks(data: bytes, kind: str) -> str:
    """Return the format of standard input, by its beginning; refuse a text that is not text."""
    text = data.strip()
    rows, found = _rows_of_json(text), "txt"
    if rows is not None and (_ARRAY.match(text) or b"\n" in text or text[:1] == b"{"):
        found, what = "json", "a JSON document"
    elif kind == "auto" and _OBJECT.match(text):
        return "jsonl"
    elif kind == "auto" and _ARRAY.match(text):
        raise InvalidValueError(
            "The input begins like a JSON array but cannot be read as one. Correct it or, if these "
            "are prompts, pass `input_format='txt'`."
        )
    else:
        lines = (line for line in io.BytesIO(data) if line.strip())
        first = [line.decode(errors="replace") for line in islice(lines, _LOOKED_AT)]
        if delimiter := header_delimiter(first):
            found = "tsv" if delimiter == "\t" else "csv"
            what = f"a table with the header {shown(first[0].strip())}"
    if kind == "auto" or found == kind:
        return found
    advice = f"Name the file .{found} or pass `input_format={found!r}`."
    raise InvalidValueError(f"The input is {what}, not a list of prompts. {advice}")


def _rows_of_json(data: bytes) -> list[object] | None:
    """Return the rows of a JSON array or of COCO captions, else None."""
    try:
        found = json.loads(data) if data.lstrip()[:1] in (b"[", b"{") else None
    except (ValueError, RecursionError):
        return None
    rows = found.get("annotations") if isinstance(found, dict) else found
    if not isinstance(rows, list):
        return None
    return [{"prompt": row} if isinstance(row, str) else row for row in rows]


def _read(fields_of: Callable[[str], Fields], raw: bytes) -> Fields | None:
    if len(raw) > _LONGEST:
        raise InvalidValueError(f"it has {len(raw):,} bytes. Write at most {_LONGEST:,} in a line.")
    text = decoded(raw)
    return fields_of(text) if text.strip() else None


def _of_json(text: str, *, of_table: bool) -> Fields:
    try:
        found = parsed(text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise InvalidValueError(f"broken JSON at character {error.pos + 1}: {error.msg}.") from None
    if not isinstance(found, dict):
        raise InvalidValueError(
            f'found {shown(found)}. Write an object, for example {{"prompt": "a cat"}}.'
        )
    return Fields(found, of_table=of_table)
