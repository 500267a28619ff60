"""The rows that a run's processes note of items, and the two files that they are gathered in.

.batch/done/NAME.jsonl    ->  metadata.jsonl   a row an item that is whole
.batch/failed/NAME.jsonl  ->  errors.jsonl     a row an item that failed, or a line that is bad
"""

import errno
import json
import os
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...files.addresses import AnyPath
from ...files.paths import inside
from .rows import NotedRow, copies_of, line_of, noted_in, rows_in


class FolderJournals:
    """The rows of a run's folder. Each process appends to files of its own.

    Args:
        root: the run's folder.
        hidden: where the processes' own files are, in folders named as the kinds of rows.
        write: writes a file of the run's folder, whole or not at all.
    """

    def __init__(
        self, root: AnyPath, hidden: AnyPath, write: Callable[[str, Iterable[bytes]], None]
    ):
        self.root, self.write = root, write
        self.hidden: Any = hidden
        self._open: dict[str, Any] = {}
        self._writing = threading.Lock()

    def note(self, kind: str, writer: str, row: Mapping[str, Any]) -> None:
        """Append a row to this process's own list of what is ``"done"`` or has ``"failed"``."""
        self._append(kind, writer, line_of(row))

    def _append(self, kind: str, writer: str, data: bytes) -> None:
        with self._writing:
            if kind not in self._open:
                path = self.hidden / kind / f"{writer}.jsonl"
                self._open[kind] = path.open("ab", buffering=0)
            journal = self._open[kind]
            written = journal.write(data)
            if written < len(data):  # the disk is full: half a row would take the next with it
                os.ftruncate(journal.fileno(), os.fstat(journal.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def files(self) -> list[Path]:
        """Where rows of items that are whole can be: ``metadata.jsonl``, then what was noted since
        it was gathered."""
        return self._read([inside(self.root, "metadata.jsonl"), *self._noted("done")])

    def _noted(self, kind: str) -> list[Any]:
        """The processes' own files of a kind."""
        return sorted((self.hidden / kind).glob("*"))

    def _read(self, locations: Iterable[Any]) -> list[Path]:
        """Where files can be read."""
        return [*locations]

    def rows(self) -> dict[str, NotedRow]:
        """Every row that has been noted, the latest of each item, by id."""
        return {item: row for path in self.files() for item, row in noted_in(path)}

    def failures(self, *, new: bool = False) -> dict[str, dict[str, Any]]:
        """The rows of items that failed, the latest of each, by id; ``new``: in this run only."""
        before = [] if new else [inside(self.root, "errors.jsonl")]
        paths = self._read([*before, *self._noted("failed")])
        return {row["id"]: row for path in paths for row in rows_in(path)}

    def gather(self, there: Mapping[str, str] | None = None) -> int:
        """Write ``metadata.jsonl`` from the rows of all processes, in the order of the input.

        Args:
            there: the items that are whole, id to location; by default all that were noted.

        Returns:
            The number of rows.
        """
        noted = self._noted("done")
        rows = self.rows()
        if there is not None:
            rows = {item: row for item, row in rows.items() if there.get(item) == row.location}
        ordered = sorted(rows.values(), key=lambda row: (row.line, row.location))
        self.write("metadata.jsonl", copies_of(ordered))
        self._forget("done", noted)
        return len(rows)

    def gather_errors(
        self,
        bad_lines: Iterable[Mapping[str, Any]],
        whole: Container[str],
        items: Container[str] | None = None,
    ) -> int:
        """Write ``errors.jsonl``: the lines that cannot be read and the items (of ``items``, by
        default all) that failed and are not whole by now. Returns how many items."""
        noted = self._noted("failed")
        failed = [
            row
            for item, row in self.failures().items()
            if item not in whole and (items is None or item in items)
        ]
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in [*bad_lines, *failed])
        self.write("errors.jsonl", map(str.encode, lines))
        self._forget("failed", noted)
        return len(failed)

    def close(self) -> None:
        """Close this process's own files."""
        with self._writing:
            for file in self._open.values():
                file.close()
            self._open.clear()

    def _forget(self, kind: str, noted: Iterable[AnyPath]) -> None:
        """Remove those of the processes' files that have been gathered."""
        with self._writing:
            if kind in self._open:
                self._open.pop(kind).close()
            for path in noted:
                path.unlink()
