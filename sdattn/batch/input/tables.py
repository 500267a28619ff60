"""Tables of prompts: a header, then rows, with commas, tabs, semicolons or bars between cells."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from ...errors import InvalidValueError
from ...files.terminal import shown
from .columns import Columns
from .texts import DELIMITERS
from .values import Fields, decoded, parsed

_OF_TEXT = ("id", "prompt", "negative_prompt", "edit_to")
Numbered = Iterator[tuple[int, bytes]]


def open_table(
    lines: Sequence[bytes], kind: str, columns: Columns
) -> tuple[Numbered, Callable[[str], Fields]]:
    """Return the numbered rows of a table, and a function that returns the fields of one; raise
    ValueError for a bad header. ``kind`` is the delimiter if the header does not show it."""
    at = next((i for i, line in enumerate(lines) if line.strip()), None)
    if at is None:
        return iter(()), lambda _: Fields({})
    header = lines[at].decode(errors="replace")
    delimiter = max(("\t" if kind == "tsv" else ",", *DELIMITERS), key=header.count)
    rows, cells_of = _rows(lines, at, delimiter), _cells
    line, raw = next(rows)
    try:
        names = [name.strip() for name in _cells(decoded(raw), delimiter)]
        # pandas writes its index as a first column without a name
        if "" in names[1:] or len(set(names)) < len(names):
            raise InvalidValueError(
                f"it has the columns {shown(names, 200)}. Name every column, each once, with "
                "commas, tabs or semicolons between."
            )
        prompt = columns.prompt_in(names)
    except ValueError as error:
        raise InvalidValueError(f"The header of the table, line {line}: {error}") from None
    tabs = delimiter == "\t" and len(names) - 1
    if tabs and all(row.count(b"\t") == tabs for row in lines[at:] if row.strip()):
        # Each line is a row, and a quote may be part of the text.
        rows, cells_of = enumerate(lines[at + 1 :], at + 2), _cells_of_line
    return rows, partial(_of_row, names, prompt, partial(cells_of, delimiter=delimiter))


def _rows(lines: Sequence[bytes], start: int, delimiter: str) -> Numbered:
    """Yield the rows, each with the number of its first line; a broken one ends where csv stops."""
    # Python 3.10's csv has no zeros
    texts = (line.decode(errors="replace").replace("\0", " ") for line in lines[start:])
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    first = start
    while first < len(lines):
        with suppress(csv.Error):
            next(reader)
        end = start + reader.line_num
        yield first + 1, b"".join(lines[first:end])
        first = end


def _cells(text: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([text], delimiter=delimiter, strict=True))
    except csv.Error as error:
        more = text.rstrip().count("\n")
        raise InvalidValueError(
            f"no row of a table: {error}"
            + (f", {more:,} lines below the quote that opened" if more else "")
            + ". Close every quote that is opened, and double those inside."
        ) from None


def _cells_of_line(text: str, delimiter: str) -> list[str]:
    try:
        return _cells(text, delimiter)
    except InvalidValueError:
        return text.rstrip("\r\n").split(delimiter)


def _of_row(
    names: Sequence[str], prompt: str, cells_of: Callable[[str], list[str]], text: str
) -> Fields:
    cells = cells_of(text)
    if len(cells) != len(names):
        raise InvalidValueError(
            f"found {len(cells)} cells below a header of {len(names)}. Write one per column, "
            "empty if there is no value, and put quotes around a cell with a separator in it."
        )
    texts = {name: cell for name, cell in zip(names, cells, strict=True) if name}
    found = {
        name: (cell if name in (*_OF_TEXT, prompt) else _value(name, cell))
        if cell.strip()
        else None
        for name, cell in texts.items()
    }
    return Fields(found, texts, of_table=True)


def _value(name: str, cell: str) -> object:
    """Return a cell's value: a list of words, JSON, or the text."""
    if name == "words" and not cell.lstrip().startswith("["):
        return [phrase.strip() for phrase in cell.split(";") if phrase.strip()]
    try:
        return parsed(cell)
    except json.JSONDecodeError:
        return cell
