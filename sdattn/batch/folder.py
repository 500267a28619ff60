"""The folder of a batch run: whose it is, what is in it, what is whole and what failed.

    batch.json         what the run is: settings, input
    metadata.jsonl     a row an item, in the layout of datasets' "imagefolder"
    README.md          tells datasets which pictures are the items'
    index.html         the items to look through, see gallery
    errors.jsonl       a row an item that failed and a line that could not be read
    items/ or shards/  the items, see layouts
    .batch/            at work: the lock, what each process has done, unfinished files

Rows are noted by each process in a file of its own and gathered into ``metadata.jsonl`` when a run
starts and ends. They only repeat what the items themselves say: after a crash what is missing is
read from the items.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..files import check_writable, write_whole
from ..packing import to_json
from .layouts import Files, Layout, layout_of
from .locks import Lock
from .rows import Known, copies_of, known_in, row_of, rows_in

FORMAT = "sdattn-batch-1"
# Without it datasets takes "train" or "test" in a drawing's name for the name of a split.
_CARD = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path:
    - metadata.jsonl
    - items/*/*/image.png
---
"""


class BatchFolder:
    """A batch run's folder.

    Attributes:
        root: the folder.
        manifest: what ``batch.json`` says.
        layout: how its items lie in it.
    """

    def __init__(self, root: str | Path):
        self.root = Path(root)
        self.hidden = self.root / ".batch"
        self.temporary = self.hidden / "tmp"
        self.lock = Lock(self.hidden / "lock", self.root)
        self._journals: dict[str, Any] = {}
        self._writing = threading.Lock()

    @property
    def is_new(self) -> bool:
        """Whether nothing says yet what run it is of."""
        return not (self.root / "batch.json").exists()

    @property
    def manifest(self) -> dict[str, Any]:
        path = self.root / "batch.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{self.root} has no batch.json, so it is no batch run's folder. Those are made by "
                "`sdattn batch`."
            )
        try:
            found = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is corrupt: {error}.") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"{path} is not of this version's format {FORMAT!r}.")
        return found

    @property
    def layout(self) -> Layout:
        return layout_of(self.manifest["settings"], self.root, self.temporary)

    def open(self, owner: str) -> None:
        """Make the folder where there is none and lock it for the job ``owner``.

        Raises:
            FileExistsError: there is something else at this place.
            OSError: it cannot be written, or another job is writing there.
        """
        if self.root.exists() and not self.root.is_dir():
            raise FileExistsError(f"{self.root} is a file. Choose another --out.")
        names = set(os.listdir(self.root)) if self.root.is_dir() else set()
        if self.is_new and (foreign := sorted(names - {".batch"})):
            raise FileExistsError(
                f"{self.root} is no batch run's folder: it has no batch.json, but "
                f"{', '.join(foreign[:3])}. Choose another --out."
            )
        check_writable(self.root)
        self.hidden.mkdir(exist_ok=True)
        self.lock.take(owner)
        (self.hidden / "stop").unlink(missing_ok=True)
        shutil.rmtree(self.temporary, ignore_errors=True)
        for name in ("tmp", "done", "failed"):
            (self.hidden / name).mkdir(exist_ok=True)

    def claim(self, manifest: Mapping[str, Any]) -> None:
        """Say what run the folder is of."""
        settings = manifest["settings"]
        (self.root / "README.md").unlink(missing_ok=True)
        if settings["format"] == "folder" and "image" in settings["save"]:
            self.write("README.md", _CARD)
        self.write("batch.json", to_json(manifest))

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the folder, whole or not at all."""
        self.write_lines(name, [data])

    def write_lines(self, name: str, parts: Iterable[bytes]) -> None:
        write_whole(self.root / name, parts, self.temporary / name)

    # What is whole

    def note(self, kind: str, writer: str, row: Mapping[str, Any]) -> None:
        """Append a row to this process's own list of what is ``"done"`` or has ``"failed"``."""
        data = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._writing:
            if kind not in self._journals:
                path = self.hidden / kind / f"{writer}.jsonl"
                self._journals[kind] = path.open("ab", buffering=0)
            journal = self._journals[kind]
            written = journal.write(data)
            if written < len(data):  # the disk is full: half a row would take the next with it
                os.ftruncate(journal.fileno(), os.fstat(journal.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def note_whole(self, writer: str, item: str, place: str, files: Files) -> None:
        self.note("done", writer, row_of(json.loads(files["run.json"]), place))

    def settle(self) -> dict[str, Known]:
        """Bring ``metadata.jsonl`` to what is there; returns the items that are whole, by id."""
        layout, rows, name = self.layout, self.rows(), f"settled-{uuid4().hex[:12]}"
        there: dict[str, str] = {}
        for item, place in layout.find():
            there[item] = place
            if item not in rows or rows[item].place != place:
                files = layout.read(item, place, ["run.json"])
                if "run.json" not in files:
                    raise ValueError(
                        f"{self.root / place} is no item: it has no run.json. Remove it."
                    )
                self.note_whole(name, item, place, files)
        self.gather(there)
        return self.rows()

    def rows(self) -> dict[str, Known]:
        """Every row that has been noted, the latest of each item, by id."""
        paths = self.root / "metadata.jsonl", *sorted((self.hidden / "done").glob("*"))
        return {item: one for path in paths for item, one in known_in(path)}

    def gather(self, there: Mapping[str, str] | None = None) -> int:
        """Write ``metadata.jsonl`` from the rows of all processes, in the order of the input.

        Args:
            there: the items that are whole, id to place; by default all that were noted.

        Returns:
            The number of rows.
        """
        rows = self.rows()
        if there is not None:
            rows = {item: one for item, one in rows.items() if there.get(item) == one.place}
        ordered = sorted(rows.values(), key=lambda one: (one.line, one.place))
        self.write_lines("metadata.jsonl", copies_of(ordered))
        self._forget("done")
        return len(rows)

    def failures(self) -> dict[str, dict[str, Any]]:
        """The rows of items that failed, the latest of each, by id."""
        paths = self.root / "errors.jsonl", *sorted((self.hidden / "failed").glob("*"))
        return {row["id"]: row for path in paths for row in rows_in(path)}

    def gather_errors(
        self,
        bad_lines: Iterable[Mapping[str, Any]],
        whole: Container[str],
        items: Container[str] | None = None,
    ) -> int:
        """Write ``errors.jsonl``: the lines that cannot be read and the items (of ``items``, by
        default all) that failed and are not whole by now. Returns how many items."""
        failed = [
            row
            for item, row in self.failures().items()
            if item not in whole and (items is None or item in items)
        ]
        rows = [*bad_lines, *failed]
        lines = (json.dumps(one, ensure_ascii=False).encode() + b"\n" for one in rows)
        self.write_lines("errors.jsonl", lines)
        self._forget("failed")
        return len(failed)

    def close(self) -> None:
        """Close what was noted, and let other jobs write here."""
        with self._writing:
            for file in self._journals.values():
                file.close()
            self._journals.clear()
        self.lock.release()

    def _forget(self, kind: str) -> None:
        with self._writing:
            if kind in self._journals:
                self._journals.pop(kind).close()
            for path in (self.hidden / kind).glob("*"):
                path.unlink()

    # What goes on

    def stop(self, reason: str) -> None:
        """Have every process of this run stop after the batch in hand."""
        (self.hidden / "stop").write_text(reason)

    @property
    def stopped(self) -> str | None:
        """Why the run is to stop, if it is."""
        path = self.hidden / "stop"
        return path.read_text() if path.exists() else None
