"""Sources of a batch's prompts: files, standard input, data sets; as lines of text."""

import io
import sys
from functools import partial
from pathlib import Path

from ...errors import InvalidValueError, optional
from ...files.addresses import path_of
from .lines import KINDS, kind_of
from .photos import Found, find_photos, json_lines, list_rows, photo_in, rows_of

# Endings of files that datasets reads
_READ = {*KINDS, "ndjson", "arrow", "zip"}


def read_source(source: str, kind: str | None = None) -> Found:
    """Return a whole input; rows of Parquet and of data sets become lines of JSON.

    Args:
        source: a file, ``"-"`` for standard input, a folder that datasets reads, saved by
            ``save_to_disk()`` or not, or a file in a storage: ``s3://BUCKET/FILE``,
            ``hf://datasets/OWNER/NAME/FILE``. For images to explain also a tar file, a folder of
            them, or of images with captions: NAME.jpg with NAME.txt, or metadata.jsonl.
        kind: one of :data:`sdattn.batch.input.lines.KINDS` (default: from the name).

    Raises:
        ValueError: another extension, unreadable Parquet, a data set of several splits.
        ImportError: pyarrow, datasets or a storage's package is needed and not installed.
    """
    path = path_of(source)
    if kind is None and source != "-" and (found := find_photos(path)):
        return found
    if isinstance(path, Path) and path.is_dir():
        return _rows_of_folder(source)
    kind = kind or kind_of(source)
    data = sys.stdin.buffer.read() if source == "-" else path.read_bytes()
    folder = path.parent if isinstance(path, Path) else next(iter(path.parents), path)
    find = partial(photo_in, folder)
    if kind == "parquet":
        parquet = optional("pyarrow.parquet", "Parquet", "sdattn[parquet]")
        from pyarrow import ArrowException

        try:
            rows = parquet.read_table(io.BytesIO(data)).to_pylist()
        except (ArrowException, OSError) as error:
            raise InvalidValueError(f"The input is not a readable Parquet file: {error}") from error
        if isinstance(path, Path) and any(isinstance(row.get("image"), dict) for row in rows):
            return list_rows(rows, source, saved=True)
        return Found(json_lines(rows), "rows", find)
    return Found(data, kind, find)


def _rows_of_folder(folder: str) -> Found:
    endings = (path.name.lower().split(".")[1:] for path in Path(folder).rglob("*"))
    if not any(map(_READ.intersection, endings)):
        raise InvalidValueError(
            f"{folder} holds no images with captions. Put NAME.txt next to each NAME.jpg, or pass "
            "a file of prompts."
        )
    what = f"The folder {folder}, which holds no images with captions,"
    datasets = optional("datasets", what, "sdattn[datasets]")
    saved = any(Path(folder, name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            found = datasets.load_from_disk(folder)
        else:  # streaming leaves no copy in datasets' cache
            found = datasets.load_dataset(folder, streaming=True)
        splits = found if isinstance(found, dict) else {"": found}
        if len(splits) == 1:
            return rows_of(next(iter(splits.values())), folder, saved=saved)
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())
        raise InvalidValueError(f"datasets cannot read the folder {folder}: {reason}") from error
    raise InvalidValueError(
        f"{folder} has the splits {', '.join(splits)}. Write one of them to a file, for example "
        f"dataset[{next(iter(splits))!r}].to_parquet('prompts.parquet'), and pass that."
    )
