"""Parquet files, read a few rows at a time, whatever they decode to."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import InvalidValueError, optional

_AT_ONCE = 16  # rows in memory, or fewer that take
_MEMORY = 2**28  # bytes at most
_LARGE = 2**25  # bytes, for a column of a Parquet file's row group that takes
_PACKED = 100  # times fewer in the file


def open_parquet(file: object) -> Any:
    """Open a Parquet file such that a batch of rows takes no more memory than their pages."""
    parquet = optional("pyarrow.parquet", "Parquet", "sdattn[parquet]")
    try:
        return parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        raise InvalidValueError(f"The list is not a readable Parquet file: {error}") from error


def image_columns(schema: Any) -> list[str]:
    """Return the columns of bytes, or of ``{bytes, path}``, of a schema of pyarrow."""
    text = ((field.name, str(field.type)) for field in schema)
    return [name for name, kind in text if "binary" in kind and not kind.startswith("list")]


def read_batches(opened: Any, columns: Sequence[str], row: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield a few rows of an open Parquet file at a time, after the number of the first, from the
    row group of ``row`` on; raise ValueError if it is broken, or if a column takes gigabytes in
    memory and nearly nothing in the file."""
    metadata = opened.metadata
    n_rows = _rows_at_once(metadata, columns)
    groups = list(range(metadata.num_row_groups))
    first = 0
    while groups and first + (size := metadata.row_group(groups[0]).num_rows) <= row:
        first += size
        del groups[0]
    try:
        for batch in opened.iter_batches(n_rows, groups, columns, use_threads=False):
            yield first, batch
            first += len(batch)
    except Exception as error:  # of many kinds
        if isinstance(error, OSError) and error.errno:
            raise  # the disk's
        raise InvalidValueError(f"The list is not a readable Parquet file: {error}") from error


def _rows_at_once(metadata: Any, columns: Sequence[str]) -> int:
    """Return how many rows fit into :data:`_MEMORY`. A row may be as large as all pages of its
    column: equal values are there once, and of others only what differs."""
    largest = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            name = column.path_in_schema
            if not any(f"{name}.".startswith(f"{chosen}.") for chosen in columns):
                continue
            in_lists = 8 * (column.num_values - group.num_rows)
            size = max(column.total_uncompressed_size, in_lists)
            packed = column.total_compressed_size
            if size > max(_LARGE, _PACKED * packed):
                raise InvalidValueError(
                    f"The column {name} takes {packed:,} bytes in the Parquet file, and "
                    f"{size:,} in memory. Write a list without such a column."
                )
            largest = max(largest, size)
    return max(1, min(_AT_ONCE, _MEMORY // largest))
