import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import InvalidValueError
from ...files.addresses import AnyPath
from ...maps.statistics import NUMBERS
from ...runs.info import RunInfo

# The columns before the numbers in a table of the words of all items
WORD_LABELS = ("id", "prompt", "seed", "word", "occurrence")
# Column names that rows, their tables and files use themselves
OWN_NAMES = frozenset(
    {"id", "line", "prompt", "source_prompt", "source_file", "negative_prompt", "seed", "width"}
    | {"height", "frames", "num_inference_steps", "guidance_scale", "words", "statistics"}
    | {"masks", "truncated", "blanked", "place", "fingerprint", "run_sha256", "files"}
    | {"file_name", "image", "video"}
    | {"maps", "run", *WORD_LABELS, *NUMBERS}
)


class NotedRow(NamedTuple):
    """The row of a whole item, and its position if it has one: file, first byte and length."""

    line: int
    location: str
    fingerprint: str
    file: Path = Path()
    start: int = 0
    length: int = 0


def row_of(
    info: RunInfo, location: str, checksum: str, sizes: Mapping[str, int]
) -> dict[str, object]:
    """Return the row of ``metadata.jsonl`` for an item, with :meth:`WordStatistics.flat` of the
    ``words`` and ``run.json``'s ``checksum``; raise ValueError if ``run.json`` lacks something."""
    needed = ("id", "line", "options", "size", "truncated", "fingerprint")
    if lacking := [name for name in needed if getattr(info, name) is None]:
        raise InvalidValueError(f"{location}/run.json is damaged: it lacks {', '.join(lacking)}")
    options, columns, size = info.options or {}, set(info.columns), info.size or (0, 0)
    image, folder = {}, "" if location.startswith("shards/") else f"{location}/"
    if "image.png" in info.files and folder:
        image = {"file_name": f"{folder}image.png"}  # the key that imagefolder looks for
    guidance = options.get("guidance_scale")
    edited = {} if info.edited is None else {"source_prompt": info.edited.prompt}
    explained = {} if info.explained is None else {"source_file": info.explained.file}
    # In the order of the words: their names begin with its number
    masks = [f"{folder}{name}" for name in sorted(info.files) if name.startswith("masks/")]
    return {
        **image,
        "id": info.id,
        "line": info.line,
        "prompt": info.prompt,
        **edited,
        **explained,
        "negative_prompt": options.get("negative_prompt"),
        "seed": info.seed,
        "width": size[0],
        "height": size[1],
        **({} if info.frames is None else {"frames": info.frames}),
        "num_inference_steps": options.get("num_inference_steps"),
        "guidance_scale": float(guidance) if isinstance(guidance, (int, float)) else None,
        "words": [
            word.text for word in info.words if word.columns and columns.issuperset(word.columns)
        ],
        **({"masks": masks} if masks else {}),
        "statistics": [word.flat() for word in info.statistics],
        "truncated": info.truncated,
        "blanked": bool(info.blanked),  # by the pipeline's safety checker
        "place": location,
        "fingerprint": info.fingerprint,
        **(info.list_columns or {}),
        "run_sha256": checksum,
        "files": [{"name": name, "bytes": sizes[name]} for name in sorted(sizes)],
    }


def line_of(row: Mapping[str, object]) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def sizes_in(row: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the bytes of an item's files from its row, or None if it lacks them."""
    try:
        return {file["name"]: file["bytes"] for file in row["files"]}
    except (KeyError, TypeError):
        return None


def rows_in(path: AnyPath) -> Iterator[dict[str, Any]]:
    """Yield the rows of items in a file."""
    return (row for row, _, _ in _located_rows(path) if isinstance(row.get("id"), str))


def word_rows(rows: Iterable[NotedRow], columns: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the words of items as rows of a table: :data:`WORD_LABELS`, ``columns`` and the numbers
    of :class:`sdattn.maps.statistics.WordStatistics`."""
    for line in copies_of(rows):
        row, seen = json.loads(line), Counter[str]()
        item = {name: row[name] for name in ("id", "prompt", "seed")}
        item |= {name: row.get(name) for name in columns}
        for found in row["statistics"]:
            word = sys.intern(found["word"])  # millions of rows share few words
            yield {**item, **found, "word": word, "occurrence": seen[word.casefold()]}
            seen[word.casefold()] += 1


def bad_lines_in(path: AnyPath) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``errors.jsonl`` about lines that could not be read."""
    rows = (row for row, _, _ in _located_rows(path))
    return (row for row in rows if "id" not in row and type(row.get("line")) is int)


def noted_in(path: Path) -> Iterator[tuple[str, NotedRow]]:
    """Yield the id and the rest of each row in a file of rows of whole items."""
    for row, start, length in _located_rows(path):
        texts = [row.get(name) for name in ("id", "place", "fingerprint")]
        if type(row.get("line")) is int and all(isinstance(text, str) for text in texts):
            noted = NotedRow(row["line"], row["place"], row["fingerprint"], path, start, length)
            yield row["id"], noted


def _located_rows(path: AnyPath) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield each row with its first byte and length; lines cut off by a crash are skipped."""
    start = 0
    with path.open("rb") if path.is_file() else nullcontext(()) as lines:
        for line in lines:
            with suppress(ValueError):
                if line.endswith(b"\n") and isinstance(row := json.loads(line), dict):
                    yield row, start, len(line)
            start += len(line)


def copies_of(rows: Iterable[NotedRow]) -> Iterator[bytes]:
    """Yield the rows as they are in their files."""
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for row in rows:
            if row.file not in files:
                files[row.file] = stack.enter_context(row.file.open("rb"))
            files[row.file].seek(row.start)
            yield files[row.file].read(row.length)


def row_at(rows: Mapping[str, NotedRow], item: str, location: str) -> bytes | None:
    """Return an item's row as it is in its file, if it names this location, else None."""
    row = rows.get(item)
    return None if row is None or row.location != location else b"".join(copies_of([row]))
