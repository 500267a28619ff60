"""The lines of a batch before they are checked: JSON, CSV or text, as fields."""

import csv
import io
import json
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import InvalidValueError, Message, OptionError
from ...files.terminal import shown
from .values import Fields, parsed

KINDS = ("jsonl", "csv", "txt", "parquet")
_SUFFIXES = {".ndjson": "jsonl", **{f".{kind}": kind for kind in KINDS}}
_LONGEST = 1_000_000  # bytes of a line; what is in it is written with every item
_QUOTED = re.compile(r'(?:^|(?<=,))"[^"]*(?:""[^"]*)*"(?=,|\r?\n?\Z)')
_ARRAY = re.compile(rb"""\s*\[\s*(?:[\[{"\]]|\Z)""")
_NUMBERS = ("seed", "width", "height", "num_frames", "num_inference_steps", "guidance_scale")

Numbered = Iterator[tuple[int, bytes]]


def kind_of(name: str) -> str:
    """What a file holds, by its name.

    Args:
        name: a path, or ``-`` for standard input.

    Returns:
        ``"jsonl"``, ``"csv"``, ``"txt"``, ``"parquet"``, or ``"auto"`` for standard input.

    Raises:
        ValueError: another ending.

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
            "JSON object a line), .csv (a header, then rows), .txt (a prompt a line) or .parquet, "
            "a folder of this machine that datasets reads, or - for standard input."
        ) from None


def open_lines(data: bytes, kind: str) -> tuple[Numbered, Callable[[bytes], Fields | None]]:
    """The numbered lines of an input, or its rows, and what reads one.

    Args:
        data: the whole input, UTF-8, perhaps with a byte order mark; only a line feed ends a line.
        kind: see :func:`kind_of`; ``"auto"`` is JSON where the first line that is not blank begins
            with ``{``, CSV where it is a header that names ``prompt``, else text.

    Returns:
        The lines; and a function that gives the fields of a line, or None where it is blank, and
        raises a ValueError with the reason where it cannot be read.

    Raises:
        ValueError: another kind, a CSV header that cannot be read, UTF-16, a JSON array, or a text
            whose first line is the header of a CSV.
    """
    if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise InvalidValueError("The input is UTF-16. Save it as UTF-8.")
    data = data.removeprefix(BOM_UTF8)
    if kind == "auto":
        kind = _kind_by_looks(data)
    elif kind == "txt" and len(_prompt_header(data)) > 1:
        text = (
            "The first line, {0}, is the header of a CSV, not a prompt. Name the file .csv or "
            "pass {input_format='csv'}."
        )
        raise InvalidValueError(Message(text, shown(_first_line(data))))
    if kind == "csv":
        rows = _rows(io.BytesIO(data).readlines())
        return rows, partial(_read, partial(_of_row, _header(rows)))
    if kind not in ("jsonl", "txt"):
        raise OptionError("kind", kind, "pass 'jsonl', 'csv', 'txt' or 'auto'.")
    return enumerate(io.BytesIO(data), 1), partial(_read, _of_json if kind == "jsonl" else _of_text)


def _kind_by_looks(data: bytes) -> str:
    """What standard input holds, by its beginning."""
    if data.lstrip().startswith(b"{"):
        return "jsonl"
    if _ARRAY.match(data):
        text = (
            "The input begins as a JSON array. Write an object a line (jq -c '.[]' does), or, if "
            "these are prompts, pass {input_format='txt'}."
        )
        raise InvalidValueError(Message(text))
    return "csv" if _prompt_header(data) else "txt"


def _prompt_header(data: bytes) -> list[str]:
    """The columns, if the first line that is not blank is the header of a CSV with prompts."""
    text = _first_line(data)
    names = [name.strip() for name in next(csv.reader([text]), [])] if text.isprintable() else []
    return names if "prompt" in names and all(map(str.isidentifier, names)) else []


def _first_line(data: bytes) -> str:
    """The first line that is not blank."""
    return data.lstrip().partition(b"\n")[0][:1000].decode(errors="replace").strip()


def _read(fields_of: Callable[[str], Fields], raw: bytes) -> Fields | None:
    if len(raw) > _LONGEST:
        raise InvalidValueError(f"it has {len(raw):,} bytes. Write at most {_LONGEST:,} in a line.")
    text = _decoded(raw)
    return fields_of(text) if text.strip() else None


def _decoded(raw: bytes) -> str:
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


def _is_row(text: str) -> bool:
    """Whether it is a JSON object that names ``prompt``; one without may be meant as a prompt."""
    try:
        return text.lstrip().startswith("{") and "prompt" in json.loads(text)
    except (ValueError, RecursionError):
        return False


def _of_text(text: str) -> Fields:
    if _is_row(text):
        raise InvalidValueError(
            "it is a JSON object that names prompt. If the other lines are such, too, name the "
            "file .jsonl or say that the input format is jsonl; or write the prompt alone."
        )
    return {"prompt": text.removesuffix("\n").removesuffix("\r")}


def _of_json(text: str) -> Fields:
    try:
        found = parsed(text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise InvalidValueError(f"broken JSON at character {error.pos + 1}: {error.msg}.") from None
    if not isinstance(found, dict):
        raise InvalidValueError(
            f'found {shown(found)}. Write an object, {{"prompt": "a cat"}} say.'
        )
    return found


def _rows(lines: Sequence[bytes]) -> Numbered:
    """The rows of a CSV, each with the number of its first line.

    Where a quote does not end as it should, its first line alone is the row, and what the quote
    ran over is read line by line: each line is read three times at most.
    """
    start = alone = 0
    while start < len(lines):
        end = start + 1
        if start >= alone:
            ahead = map(lines.__getitem__, range(start, len(lines)))
            reader = csv.reader(map(_any_text, ahead), strict=True)
            try:
                next(reader)
                end = start + reader.line_num
            except csv.Error:
                alone = start + reader.line_num - 1
        yield start + 1, b"".join(lines[start:end])
        start = end


def _any_text(raw: bytes) -> str:
    """Text with the same quotes, commas and ends, also where the bytes will be refused."""
    return raw.decode(errors="replace").replace("\0", " ")  # Python 3.10's csv has no zeros


def _cells(text: str) -> list[str]:
    if '"' in _QUOTED.sub("", text):  # csv takes it, and with it the rest of a row that broke
        raise InvalidValueError(
            "no row of CSV: a quote in a cell that does not begin and end with one. Put quotes "
            "around the cell, and double those inside."
        )
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise InvalidValueError(
            f"no row of CSV: {error}. Close every quote that is opened, and double those inside."
        ) from None


def _header(rows: Numbered) -> list[str]:
    for line, raw in rows:
        if not raw.strip():
            continue
        try:
            names = [name.strip() for name in _cells(_decoded(raw))]
        except ValueError as error:
            raise InvalidValueError(f"The header of the CSV, line {line}: {error}") from None
        if "prompt" not in names or "" in names or len(set(names)) < len(names):
            raise InvalidValueError(
                f"The header of the CSV, line {line}, has the columns {shown(names)}. Name every "
                "column, each once, separated by commas, and one of them prompt."
            )
        return names
    return []


def _of_row(names: Sequence[str], text: str) -> Fields:
    cells = _cells(text)
    if len(cells) != len(names):
        raise InvalidValueError(
            f"found {len(cells)} cells below a header of {len(names)}. Write one for each, empty "
            "where there is nothing to say, and put quotes around a comma."
        )
    pairs = zip(names, cells, strict=True)
    return {name: _value(name, cell) for name, cell in pairs if cell.strip()}


def _value(name: str, cell: str) -> Any:
    """What a cell means; numbers may have a plus and leading zeros, which JSON's may not."""
    if name in ("id", "prompt", "negative_prompt", "edit_to"):
        return cell
    if name in _NUMBERS:
        cell = re.sub(r"^\+?0*(?=[0-9])", "", cell.strip())
    elif name == "words" and not cell.lstrip().startswith("["):
        return [phrase.strip() for phrase in cell.split(";") if phrase.strip()]
    try:
        return parsed(cell)
    except json.JSONDecodeError:
        return cell
