"""The rows that a run's processes note for items, and the two files that they are gathered in.

.batch/done/NAME.jsonl    ->  metadata.jsonl   one row per whole item
.batch/failed/NAME.jsonl  ->  errors.jsonl     one row per failed item or bad line
"""

import json
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from .rows import NotedRow, copies_of, line_of, noted_in, rows_in
from .storage import Storage


class Journals:
    """The rows of a run's folder. Each process appends to its own files."""

    def __init__(self, storage: Storage):
        self.storage = storage

    def note(self, kind: str, writer: str, row: Mapping[str, object]) -> None:
        """Append a row to this process's own list, ``"done"`` or ``"failed"``."""
        self.storage.append(kind, writer, line_of(row))

    def files(self) -> list[Path]:
        """Return the files with rows of whole items: ``metadata.jsonl``, then later notes."""
        return self.storage.copies(["metadata.jsonl", *self.storage.appended("done")])

    def rows(self) -> dict[str, NotedRow]:
        """Return every row that has been noted, the latest of each item, by id."""
        return {item: row for path in self.files() for item, row in noted_in(path)}

    def failures(self, *, new: bool = False) -> dict[str, dict[str, Any]]:
        """Return the latest row of each item that failed, by id; ``new``: only in this run."""
        before = [] if new else ["errors.jsonl"]
        paths = self.storage.copies([*before, *self.storage.appended("failed")])
        return {row["id"]: row for path in paths for row in rows_in(path)}

    def gather(self, there: Mapping[str, str] | None = None) -> int:
        """Write ``metadata.jsonl`` from the rows of all processes, in the order of the input, for
        the items ``there`` (default: all that were noted); return the number of rows."""
        noted = self.storage.appended("done")
        rows = self.rows()
        if there is not None:
            rows = {item: row for item, row in rows.items() if there.get(item) == row.location}
        ordered = sorted(rows.values(), key=lambda row: (row.line, row.location))
        self.storage.write("metadata.jsonl", copies_of(ordered))
        self.storage.forget("done", noted)
        return len(rows)

    def gather_errors(
        self,
        bad_lines: Iterable[Mapping[str, object]],
        whole: Container[str],
        items: Container[str] | None = None,
    ) -> int:
        """Write ``errors.jsonl``: unreadable lines, and ``items`` (default: all) that failed and
        are still not whole; return their number."""
        noted = self.storage.appended("failed")
        failed = [
            row
            for item, row in self.failures().items()
            if item not in whole and (items is None or item in items)
        ]
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in [*bad_lines, *failed])
        self.storage.write("errors.jsonl", map(str.encode, lines))
        self.storage.forget("failed", noted)
        return len(failed)
