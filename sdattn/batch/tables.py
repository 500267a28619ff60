"""Lists as streams of rows: JSON lines, CSV, TSV, text, Parquet, data sets on the disk."""

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from ..errors import InvalidValueError, access_error, optional
from ..files.addresses import AnyPath, path_of
from ..files.images import SUFFIXES
from ..files.paths import files_below
from ..files.terminal import shown

KINDS = ("jsonl", "csv", "tsv", "txt", "parquet")
TEXTS = (
    "id",
    "prompt",
    "Prompt",
    "Prompts",
    "caption",
    "text",
    "txt",
    "negative_prompt",
    "edit_to",
)
_KIND = {".ndjson": "jsonl", **{f".{kind}": kind for kind in KINDS}}
_HEADER = re.compile(r"\W?prompts?\W?([,;\t|].*)?", re.IGNORECASE)  # of a table, above a text
_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}\.parquet")  # a file of a split, as the Hub names it


class Row(NamedTuple):
    """A line of a list, or a row of a table.

    Attributes:
        line: number, from 1.
        fields: values by column.
        text: its beginning, as written.
        reason: why it cannot be read; "" if it can.
        cells: the texts of a CSV row's cells.
        of_table: all rows have the same columns, some of which may not be for us.
        image: the :class:`~.photos.Photo` to explain.
    """

    line: int
    fields: Mapping[str, Any] = {}
    text: str = ""
    reason: str = ""
    cells: Mapping[str, str] | None = None
    of_table: bool = False
    image: Any = None


# Choose the columns to read from all names and those of columns of images, or raise ValueError
Choose = Callable[[Sequence[str], Sequence[str]], Sequence[str]]


def kind_of(name: str) -> str | None:
    """Return the format of a list by its name, one of :data:`KINDS`, or None.

    >>> kind_of("prompts.JSONL"), kind_of("cat.jpg")
    ('jsonl', None)
    """
    return _KIND.get(PurePosixPath(name).suffix.lower())


def list_rows(source: str, kind: str | None, choose: Choose) -> Iterator[Row]:
    """Yield the rows of a list of prompts: a file, ``-`` for standard input, a saved data set or a
    folder of lists. Raise ValueError for anything else."""
    path = path_of(source)
    if source == "-":
        yield from rows_of(sys.stdin.buffer, kind or "jsonl", choose)
    elif path.name.lower().endswith((".tar", *SUFFIXES)):
        raise InvalidValueError(f"{source} holds images, not prompts. Pass it as `photos`.")
    elif path.is_dir() and not is_saved(path):
        names = names_below(path)
        if any(name.lower().endswith((".tar", *SUFFIXES)) for name in names):
            raise InvalidValueError(
                f"The folder {source} holds images. Pass it as `photos` to explain them, or a file "
                "of prompts to draw."
            )
        lists = [name for name in names if kind_of(name) not in (None, "txt")]
        check_splits(path, lists)
        if not lists:
            raise InvalidValueError(
                f"The folder {source} holds no list of prompts. Put .jsonl, .csv, .tsv or .parquet "
                "files there; for images with captions pass `photos`."
            )
        rows = (row for name in lists for row in table_rows(path / name, None, choose))
        yield from (row._replace(line=line) for line, row in enumerate(rows, 1))
    else:
        yield from table_rows(path, kind, choose)


def table_rows(path: AnyPath, kind: str | None, choose: Choose) -> Iterator[Row]:
    """Yield the rows of a file of one of :data:`KINDS`, or of a saved data set."""
    if is_saved(path):
        yield from _saved_rows(str(path), choose)
        return
    kind = kind or kind_of(path.name)
    if kind is None:
        raise InvalidValueError(
            f"Asked for the list {str(path)!r}. Pass a file that ends in .jsonl or .ndjson (a JSON "
            "object per line), .csv or .tsv (a header, then rows), .txt (a prompt per line) or "
            ".parquet, or a folder of them, or - for standard input."
        )
    try:
        with path.open("rb") as file:
            yield from rows_of(file, kind, choose)
    except OSError as error:
        raise access_error(error) from error


def rows_of(file: BinaryIO, kind: str, choose: Choose) -> Iterator[Row]:
    """Yield the rows of an open file of one of :data:`KINDS`."""
    if kind == "parquet":
        yield from _parquet_rows(file, choose)
        return
    # What is not UTF-8 becomes half characters, and its line is refused.
    lines = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="\n")
    if kind in ("csv", "tsv"):
        yield from _cell_rows(lines, kind, choose)
        return
    fields_of = _of_json if kind == "jsonl" else _of_text
    for line, text in enumerate(lines, 1):
        text = text.rstrip("\r\n")
        if text and not text.isspace():
            try:
                yield Row(line, fields_of(readable(text), line), text[:200])
            except ValueError as error:
                yield Row(line, text=text[:200], reason=str(error))


def names_below(folder: AnyPath) -> list[str]:
    """Return the paths of a folder's files, sorted, without hidden ones."""
    names = files_below(folder) if isinstance(folder, Path) else sorted(folder.sizes())
    return [name for name in names if not f"/{name}".count("/.")]


def check_splits(folder: AnyPath, names: Sequence[str]) -> None:
    """Raise ValueError for Parquet files of several splits."""
    found = {split[1] for name in names if (split := _SPLIT.fullmatch(PurePosixPath(name).name))}
    if len(found) > 1:
        raise _splits(folder, found)


def _splits(folder: object, found: Sequence[str] | set[str]) -> InvalidValueError:
    return InvalidValueError(
        f"{folder} has the splits {', '.join(sorted(found))}. Pass the files of one: put them into "
        "a folder of their own, or write it with dataset[split].to_parquet('one.parquet')."
    )


def readable(text: str) -> str:
    """Return a text as it is; raise ValueError for bytes that are not UTF-8, and signs that no text
    has."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise InvalidValueError(
            f"its character {at + 1}, {text[at]!r}, is not UTF-8. Save the list as UTF-8."
        ) from None
    if "\0" in text:
        raise InvalidValueError("there is a zero byte in it, as in UTF-16. Save it as UTF-8.")
    if "\r" in text:
        raise InvalidValueError("there is a carriage return in it. End lines with a line feed.")
    return text


def _of_text(text: str, line: int) -> dict[str, Any]:
    if text.lstrip().startswith('{"'):
        raise InvalidValueError("it is JSON. Name the file .jsonl or pass `input_format='jsonl'`.")
    if line == 1 and _HEADER.fullmatch(text):
        raise InvalidValueError(
            "it is the header of a table. Name the file .csv or .tsv, or leave the line out."
        )
    return {"prompt": text}


def _of_json(text: str, _: int) -> dict[str, Any]:
    try:
        found = parsed(text)
    except json.JSONDecodeError as error:
        raise InvalidValueError(f"broken JSON at character {error.pos + 1}: {error.msg}.") from None
    if not isinstance(found, dict):
        raise InvalidValueError(
            f'found {shown(found)}. Write an object, for example {{"prompt": "a cat"}}.'
        )
    return found


def parsed(text: str) -> Any:
    """Return a JSON value; raise ValueError for NaN, infinity, a name that occurs twice."""
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise InvalidValueError("lists and objects are nested too deep.") from None


def _finite(digits: str) -> float:
    if not math.isfinite(float(digits)):
        raise InvalidValueError(f"{shown(digits)} is not a number. Write a finite one, or null.")
    return float(digits)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidValueError(f"{shown(twice)} occurs twice. Write it once.")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)


# Tables: their columns are known before their rows


def _cell_rows(lines: Iterator[str], kind: str, choose: Choose) -> Iterator[Row]:
    names: list[str] = []
    chosen: Sequence[str] = ()
    for line, text, cells, reason in (_tabbed if kind == "tsv" else _quoted)(lines):
        if not names and not reason and text.strip():
            names = [name.strip() for name in cells]
            chosen = _header(names, line, choose)
        elif names and (reason or text.strip()):
            try:
                if reason:
                    raise InvalidValueError(reason)
                readable(text.replace("\r", ""))
                texts = _texts(names, cells)
                fields = {name: _value(name, texts[name]) for name in chosen}
                yield Row(line, fields, text[:200], cells=texts, of_table=True)
            except ValueError as error:
                yield Row(line, text=text[:200], reason=str(error))
        elif reason:
            raise InvalidValueError(f"The header of the table, line {line}: {reason}")


Cells = Iterator[tuple[int, str, list[str], str]]  # line, its text, its cells, what is wrong


def _quoted(lines: Iterator[str]) -> Cells:
    texts: list[str] = []
    reader = csv.reader((texts.append(line) or line for line in lines), strict=True)  # type: ignore[func-returns-value]
    while True:
        line, cells, reason = reader.line_num + 1, [], ""
        texts.clear()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = (
                f"no row of a table: {error}, {len(texts) - 1:,} lines below. Close every quote "
                "that is opened, and double those inside."
            )
        yield line, "".join(texts[:100]).rstrip("\r\n"), cells, reason


def _tabbed(lines: Iterator[str]) -> Cells:
    """Each line is a row, and a quote may be part of the text."""
    for line, text in enumerate(lines, 1):
        text = text.rstrip("\r\n")
        try:
            cells = next(csv.reader([text], delimiter="\t", strict=True), [])
        except csv.Error:
            cells = text.split("\t")
        yield line, text, cells, ""


def _header(names: Sequence[str], line: int, choose: Choose) -> Sequence[str]:
    try:
        # pandas writes its index as a first column without a name
        if "" in names[1:] or len(set(names)) < len(names):
            raise InvalidValueError(
                f"it has the columns {shown(names, 200)}. Name every column, each once, with "
                "commas between in .csv, tabs in .tsv."
            )
        return choose([name for name in names if name], ())
    except ValueError as error:
        raise InvalidValueError(f"The header of the table, line {line}: {error}") from None


def _texts(names: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    if len(cells) != len(names):
        raise InvalidValueError(
            f"found {len(cells)} cells below a header of {len(names)}. Write one per column, "
            "empty if there is no value, and put quotes around a cell with a separator in it."
        )
    return dict(zip(names, cells, strict=True))


def _value(name: str, cell: str) -> object:
    """Return a cell's value: None, a list of words, JSON, or the text."""
    if not cell.strip():
        return None
    if name in TEXTS:
        return cell
    if name == "words" and not cell.lstrip().startswith("["):
        return [phrase.strip() for phrase in cell.split(";") if phrase.strip()]
    try:
        return parsed(cell)
    except json.JSONDecodeError:
        return cell


def open_parquet(file: Any) -> Any:
    """Open a Parquet file such that reading a batch of rows holds no more than their pages."""
    parquet = optional("pyarrow.parquet", "Parquet", "sdattn[parquet]")
    from pyarrow import ArrowException

    try:
        return parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
    except (ArrowException, OSError) as error:
        raise InvalidValueError(f"The list is not a readable Parquet file: {error}") from error


def image_columns(schema: Any) -> list[str]:
    """Return the columns of bytes, or of ``{bytes, path}``, of a schema of pyarrow."""
    from pyarrow import types

    def holds_bytes(kind: Any) -> bool:
        if types.is_struct(kind):
            return bool(kind.get_all_field_indices("bytes"))
        return types.is_binary(kind) or types.is_large_binary(kind)

    return [field.name for field in schema if holds_bytes(field.type)]


def _parquet_rows(file: BinaryIO, choose: Choose) -> Iterator[Row]:
    opened = open_parquet(file if file.seekable() else io.BytesIO(file.read()))
    images = image_columns(opened.schema_arrow)
    chosen = list(choose(opened.schema_arrow.names, images))
    size = 1000 if set(chosen).isdisjoint(images) else 16
    batches = opened.iter_batches(size, columns=chosen, use_threads=False)
    rows = (row for batch in batches for row in batch.to_pylist())
    for line, row in enumerate(rows, 1):
        yield Row(line, row, of_table=True)


# Data sets that datasets' save_to_disk() wrote


def is_saved(path: AnyPath) -> bool:
    names = ("state.json", "dataset_dict.json")
    return isinstance(path, Path) and any((path / name).is_file() for name in names)


def open_saved(folder: str) -> Any:
    """Return the one split of a saved data set, its images as ``{bytes, path}``."""
    datasets = optional("datasets", f"The data set {folder}", "sdattn[datasets]")
    try:
        found = datasets.load_from_disk(folder)
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())
        raise InvalidValueError(f"datasets cannot read the folder {folder}: {reason}") from error
    splits = found if isinstance(found, dict) else {"": found}
    if len(splits) != 1:
        raise _splits(folder, set(splits))
    [rows] = splits.values()
    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
    return rows


def _saved_rows(folder: str, choose: Choose) -> Iterator[Row]:
    rows = open_saved(folder)
    chosen = choose(rows.column_names, image_columns(rows.features.arrow_schema))
    for line, row in enumerate(rows.select_columns(list(chosen)), 1):
        yield Row(line, row, of_table=True)
