"""Lists as streams of rows: JSON lines, CSV, TSV, text, Parquet, data sets on the disk."""

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from ..errors import InvalidValueError, MissingFileError, access_error, optional
from ..files.addresses import AnyPath, path_of
from ..files.images import SUFFIXES
from ..files.paths import files_below
from ..files.terminal import say, shown
from .parquet import image_columns, open_parquet, read_batches

KINDS = ("jsonl", "csv", "tsv", "txt", "parquet")
CELLS = {"csv": ",", "tsv": "\t"}  # what separates them
_AT_ONCE = 16  # rows of a data set in memory
_LONGEST = 2**17  # characters in a cell, as in CSV files
_KIND = {".ndjson": "jsonl", **{f".{kind}": kind for kind in KINDS}}
_UNREADABLE = re.compile("[\0\r\ud800-\udfff]")
_SPLIT = re.compile(r"(?:.*/)?([^/]+)-\d{5}-of-\d{5}\.parquet")  # as the Hub names a split's files

# Lines of AUTOMATIC1111: options before a prompt, and the settings in its PNG files
_SETTINGS = re.compile(r"\s*(--\w|Negative prompt:|Steps: \d)")
# Their signs in a prompt: files, weights, steps, wildcards, choices
_SYNTAX = re.compile(
    r"<\w+:[^<>]+>|[(\[][^()\[\]]+:\s*-?[\d.]+\s*[)\]]|\(\([^()]+\)\)|__[\w*/-]+__|{[^{}]*\|[^{}]*}|\bBREAK\b"
)
# Files that are no text in UTF-8, by how they begin
_BEGINNINGS = {
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"\0\0\xfe\xff": "UTF-32 text",
    b"\x1f\x8b": "compressed with gzip",
    b"(\xb5/\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"PK\3\4": "a zip file, or a workbook of a spreadsheet",
    b"PAR1": "a Parquet file",
    b"%PDF-": "a PDF file",
    b"\x89PNG": "an image",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
    b"version https://git-lfs": "a pointer of Git LFS, whose file was not fetched",
}


class Row(NamedTuple):
    """A line of a list, or a row of a table.

    Attributes:
        line: number, from 1.
        fields: values by column; of a CSV or TSV table, texts.
        text: its beginning.
        reason: why it cannot be read; "" if it can.
        kind: one of :data:`KINDS`; "parquet" too for a saved data set.
        image: the :class:`~.photos.Photo` to explain.
    """

    line: int
    fields: Mapping[str, Any] = {}
    text: str = ""
    reason: str = ""
    kind: str = "jsonl"
    image: Any = None


Rows = Generator[Row, None, None]
# Choose the columns to read from all names and those of columns of images, or raise ValueError
Choose = Callable[[Sequence[str], Sequence[str]], Sequence[str]]


def kind_of(name: str) -> str | None:
    """Return the format of a list by its name, one of :data:`KINDS`, or None.

    >>> kind_of("prompts.JSONL"), kind_of("cat.jpg")
    ('jsonl', None)
    """
    return _KIND.get(PurePosixPath(name).suffix.lower())


def list_rows(source: str, kind: str | None, choose: Choose) -> Rows:
    """Yield the rows of a list of prompts: a file, ``-`` for standard input, a saved data set or a
    folder of lists. Raise ValueError for anything else."""
    if source == "-":
        yield from rows_of(sys.stdin.buffer, kind or "jsonl", choose)
        return
    path = existing(source)
    if is_saved(path) or not path.is_dir():
        yield from table_rows(path, kind, choose)
    else:
        names = names_below(path)
        lists = [name for name in names if kind_of(name) not in (None, "txt")]
        if not lists or any(name.lower().endswith((".tar", *SUFFIXES)) for name in names):
            raise InvalidValueError(
                f"The folder {source} holds {'images' if names else 'nothing'}, not lists of "
                "prompts. Pass images with captions as `photos`, prompts as .jsonl, .csv, .tsv or "
                ".parquet."
            )
        check_splits(source, lists)
        rows = chain.from_iterable(table_rows(path / name, None, choose) for name in lists)
        for line, row in enumerate(rows, 1):
            yield row._replace(line=line)


def existing(source: str) -> AnyPath:
    """Return the path or address of a source; raise FileNotFoundError if there is none."""
    path = path_of(source)
    if not path.exists():
        raise MissingFileError(f"There is no file or folder {source}. Check the path.")
    return path


def table_rows(path: AnyPath, kind: str | None, choose: Choose) -> Iterator[Row]:
    """Yield the rows of a file of one of :data:`KINDS`, or of a saved data set."""
    if is_saved(path):
        rows = open_saved(str(path))
        chosen = choose(rows.column_names, image_columns(rows.features.arrow_schema))
        yield from _arrow_rows(rows.select_columns(list(chosen)).iter(_AT_ONCE))
        return
    kind = kind or kind_of(path.name)
    if kind is None:
        raise InvalidValueError(
            f"Asked for the prompts in {str(path)!r}. Pass a file that ends in .jsonl (a JSON "
            "object per line), .csv or .tsv (a header, then rows), .txt (a prompt per line) or "
            ".parquet, a folder of them, or - for standard input; images as `photos`."
        )
    try:
        with path.open("rb") as file:
            yield from rows_of(file, kind, choose)
    except OSError as error:
        raise access_error(error) from error


def rows_of(file: BinaryIO, kind: str, choose: Choose) -> Iterator[Row]:
    """Yield the rows of an open file of one of :data:`KINDS`."""
    if kind == "parquet":
        opened = open_parquet(file if file.seekable() else io.BytesIO(file.read()))
        schema = opened.schema_arrow
        chosen = list(choose(schema.names, image_columns(schema)))
        yield from _arrow_rows(batch for _, batch in read_batches(opened, chosen))
        return
    # What is not UTF-8 becomes half characters, and its line is refused.
    text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="\n")
    try:
        first = text.readline()
        _check_beginning(first, kind)
        lines = chain([first] if first else [], text)
        found = _cells(lines, kind, choose) if kind in CELLS else _lines(lines, kind)
        for line, said, read in found:
            try:
                if bad := _UNREADABLE.search(said.replace("\r\n", "")):
                    raise InvalidValueError(
                        f"there is {bad[0]!r} in it. Save the list as UTF-8 text, lines ended by "
                        "line feeds."
                    )
                yield Row(line, read(), said[:200], kind=kind)
            except ValueError as error:
                yield Row(line, text=said[:200], reason=str(error))
    finally:
        text.detach()  # it would close the file


def _check_beginning(line: str, kind: str) -> None:
    """Raise ValueError if the first line shows that the whole list is something else."""
    begins = line[:32].encode("utf-8", "surrogateescape")
    found = [what for sign, what in _BEGINNINGS.items() if begins.startswith(sign)]
    if b"\0" in begins[:4]:
        found.append("UTF-16 text, or none at all")
    if found:
        raise InvalidValueError(f"The list is {found[0]}. Save it as UTF-8 text.")
    plain = re.sub('"[^"]*"', "", line)
    own = CELLS.get(kind)
    sign = max(own or "", *",;|\t", key=plain.count)
    if own and plain.count(sign) > plain.count(own):
        raise InvalidValueError(
            f"The header of the table, line 1: found {shown(line.strip())}, cells separated by "
            f"{shown(sign)}. Separate them by commas in .csv, by tabs in .tsv."
        )


# A line's number, its text, and what reads its fields or raises ValueError
_Read = tuple[int, str, Callable[[], Mapping[str, Any]]]


def _lines(lines: Iterable[str], kind: str) -> Iterator[_Read]:
    is_told = kind == "jsonl"
    for line, text in enumerate(lines, 1):
        text = text.rstrip("\r\n")
        if not text or text.isspace():
            continue
        yield (
            line,
            text,
            partial(_fields_in, text) if kind == "jsonl" else partial(_prompt_in, text, line),
        )
        if not is_told and (found := _SYNTAX.search(text)):
            is_told = True
            say(
                f"line {line}: {shown(found[0])} is for another program. Here it is drawn as text, "
                "in all lines: load LoRAs with --lora, and write the words alone."
            )


def _prompt_in(text: str, line: int) -> dict[str, str]:
    is_header = line == 1 and text.lower().startswith("prompt,")
    if text.lstrip().startswith('{"') or is_header or "\t" in text:
        raise InvalidValueError(
            "it is JSON, or of a table. Name the file .jsonl, .csv or .tsv, or pass `input_format`."
        )
    if _SETTINGS.match(text):
        raise InvalidValueError(
            "it holds options of another program, not a prompt. Write them as fields of a .jsonl "
            "file."
        )
    return {"prompt": text}


def _fields_in(text: str) -> dict[str, Any]:
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
    """Return a JSON value; raise ValueError for NaN, infinity and what is nested too deep."""
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise InvalidValueError("lists and objects are nested too deep.") from None


def _finite(digits: str) -> float:
    if not math.isfinite(float(digits)):
        raise InvalidValueError(f"{shown(digits)} is not a number. Write a finite one, or null.")
    return float(digits)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidValueError(f"{shown(twice)} is there twice. Write it once.")
    return found


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite, object_pairs_hook=_once)


def _cells(lines: Iterable[str], kind: str, choose: Choose) -> Iterator[_Read]:
    """Read a table, whose first row has the names of the columns."""
    names: list[str] = []
    chosen: Sequence[str] = ()

    def read(cells: list[str], reason: str) -> dict[str, str]:
        if not reason and len(cells) != len(names):
            reason = f"found {len(cells)} cells below a header of {len(names)}. Quote commas."
        if reason:
            raise InvalidValueError(reason)
        texts = dict(zip(names, cells, strict=True))
        return {name: texts[name] for name in chosen}

    for line, cells, reason in _split(iter(lines), kind):
        if names:
            yield line, "\t".join(cells), partial(read, cells, reason)
            continue
        names = [name.strip() for name in cells]
        try:
            # pandas writes its index as a first column without a name
            if reason or "" in names[1:] or len(set(names)) < len(names):
                raise InvalidValueError(reason or f"found {shown(names)}. Name each column, once.")
            chosen = choose([name for name in names if name], ())
        except ValueError as error:
            raise InvalidValueError(f"The header of the table, line {line}: {error}") from None


def _split(lines: Iterator[str], kind: str) -> Iterator[tuple[int, list[str], str]]:
    """Yield the line, the cells, and what is wrong, of each row that is not blank."""
    line = 1
    for first in lines:
        reason = ""
        # A row of a TSV table is a line, in which a quote may be part of the text.
        rest = chain([first], lines) if kind == "csv" else [first]
        reader = csv.reader(rest, delimiter=CELLS[kind], strict=True)
        try:
            cells = next(reader)
        except csv.Error as error:
            cells = [] if kind == "csv" else first.rstrip("\r\n").split("\t")
            if kind == "csv":
                more = reader.line_num - 1
                reason = (
                    f"no row of a table: {error}, {more:,} lines below. Close and double quotes."
                )
        if "".join(cells).strip() or len(cells) > 1 or reason:
            yield line, cells, reason
        line += reader.line_num


def _arrow_rows(batches: Iterable[Any]) -> Iterator[Row]:
    line = 0
    for batch in batches:
        for row in batch.to_pylist():
            line += 1
            reason = ""
            for name, value in row.items():
                if isinstance(value, str) and len(value) > _LONGEST:
                    reason = f"{name} has {len(value):,} characters. Write at most {_LONGEST:,}."
            yield Row(line, {} if reason else row, reason=reason, kind="parquet")


def is_saved(path: AnyPath) -> bool:
    """Check for a data set that datasets' ``save_to_disk()`` wrote."""
    names = ("state.json", "dataset_dict.json")
    return isinstance(path, Path) and any((path / name).is_file() for name in names)


def open_saved(folder: str) -> Any:
    """Return the one split of a saved data set, whose rows are tables of pyarrow."""
    datasets = optional("datasets", f"The data set {folder}", "sdattn[datasets]")
    try:
        found = datasets.load_from_disk(folder)
    except Exception as error:  # of many kinds
        raise InvalidValueError(f"datasets cannot read the folder {folder}: {error}") from error
    splits = found if isinstance(found, dict) else {"": found}
    _check_one_split(folder, splits)
    return next(iter(splits.values())).with_format("arrow")


def names_below(folder: AnyPath) -> list[str]:
    """Return the paths of a folder's files, sorted, without hidden ones."""
    names = files_below(folder) if isinstance(folder, Path) else sorted(folder.listing(deep=True))
    return [name for name in names if "/." not in f"/{name}"]


def check_splits(source: object, files: Iterable[str]) -> None:
    """Raise ValueError for files of several splits of a data set."""
    _check_one_split(source, (split[1] for split in map(_SPLIT.fullmatch, files) if split))


def _check_one_split(source: object, names: Iterable[str]) -> None:
    if len(splits := sorted(set(names))) > 1:
        raise InvalidValueError(
            f"{source} has the splits {', '.join(splits)}. Pass one: put its files into a folder "
            "of their own, or write it with dataset[split].to_parquet('one.parquet')."
        )
