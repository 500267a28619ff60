"""The folder of a batch run: whose it is, what is in it, what is whole and what failed.

    batch.json         what the run is: settings, input; when a run has ended the checksums of the
                       other files here; its own checksum
    ids.txt            the ids of the whole input, in its order
    metadata.jsonl     a row an item, in the layout of datasets' "imagefolder"
    README.md          tells datasets which pictures are the items'
    index.html         the items to look through, see gallery
    errors.jsonl       a row an item that failed and a line that could not be read
    items/ or shards/  the items, see layouts
    .batch/            at work: the lock, what each process has done, unfinished files

Rows are noted by each process in a file of its own and gathered into ``metadata.jsonl`` when a run
starts and ends. They repeat what the items themselves say, with the checksum of ``run.json`` and
the size of each file: after a crash what is missing is read from the items.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from ..files.writing import sha256, to_json
from ..runs.folder import check_writable, inside, write_whole
from ..runs.info import RunInfo, read_info
from .layouts import Files, Layout, layout_of
from .locks import Lock
from .rows import Known, copies_of, known_in, line_of, row_of, rows_in, sizes_in

FORMAT = "sdattn-batch-2"
# Rows of the first say nothing of run.json's checksum and of sizes: the next run adds it.
FIRST_FORMAT = "sdattn-batch-1"
_TOP = ("metadata.jsonl", "errors.jsonl", "README.md", "ids.txt", "index.html", "index-*.html")
_MADE = {"items", "shards", "batch.json", ".batch"}  # in a run's folder, beside those of _TOP
_ADOPT = (
    "If its items are there, the command that made them, with --adopt, checks them and writes "
    "batch.json anew."
)
_NO_ITEM = "it has no run.json"
_MOST_TOLD = 20  # items named one by one
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


class Held(NamedTuple):
    """An item that is whole."""

    line: int
    place: str
    fingerprint: str


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
        self._layout: Layout | None = None
        self._adopting = False
        self._trusted = True  # whether metadata.jsonl is what the last run wrote

    @property
    def is_new(self) -> bool:
        """Whether nothing says yet what run it is of."""
        return self._adopting or not (self.root / "batch.json").exists()

    @property
    def manifest(self) -> dict[str, Any]:
        path = inside(self.root, "batch.json")
        if not path.is_file():
            there = any((self.root / name).is_dir() for name in ("items", "shards"))
            raise FileNotFoundError(
                f"{self.root} has no batch.json, so it is no batch run's folder. Those are made by "
                f"`sdattn batch`.{' ' + _ADOPT if there else ''}"
            )
        found = _parsed(path)
        if found["format"] == FORMAT and not is_sealed(found, path.read_bytes()):
            raise ValueError(f"{path} is damaged: its own checksum differs. {_ADOPT}")
        return found

    def read_damaged(self) -> tuple[dict[str, Any], Layout]:
        """What can still be read of a ``batch.json`` that is not what was written, and how the
        items lie by what is there.

        Raises:
            ValueError: nothing of it can be read.
        """
        found = _parsed(inside(self.root, "batch.json"))
        settings = {"format": "shard" if (self.root / "shards").is_dir() else "folder"}
        layout = layout_of({**settings, "shard_bytes": 0}, self.root, self.temporary)
        return {"input": found.get("input")}, layout

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            self._layout = layout_of(self.manifest["settings"], self.root, self.temporary)
        return self._layout

    def open(self, owner: str, *, adopt: bool = False) -> None:
        """Make the folder where there is none and lock it for the job ``owner``.

        Args:
            adopt: take a folder with items whose ``batch.json`` is lost or damaged for a new one.

        Raises:
            FileExistsError: there is something else at this place.
            ValueError: it holds a link where a run has a folder.
            OSError: it cannot be written, or another job is writing there.
        """
        if self.root.exists() and not self.root.is_dir():
            raise FileExistsError(f"{self.root} is a file. Choose another --out.")
        self._adopting = adopt and self._is_orphan()
        names = set(os.listdir(self.root)) if self.root.is_dir() else set()
        if self.is_new and names - {".batch"}:
            self._check_names(names)
        for name in (".batch", ".batch/tmp", ".batch/done", ".batch/failed", "items", "shards"):
            inside(self.root, name)
        for group in (self.root / "items").glob("*"):
            inside(self.root, f"items/{group.name}")
        check_writable(self.root)
        self.hidden.mkdir(exist_ok=True)
        self.lock.take(owner)
        (self.hidden / "stop").unlink(missing_ok=True)
        shutil.rmtree(self.temporary, ignore_errors=True)
        for name in ("tmp", "done", "failed"):
            (self.hidden / name).mkdir(exist_ok=True)

    def _is_orphan(self) -> bool:
        if not (self.root / "batch.json").exists():
            return True
        try:
            return not self.manifest
        except ValueError:
            return True

    def _check_names(self, names: set[str]) -> None:
        """Refuse a folder without a ``batch.json`` that a run did not make, or that it did."""
        foreign = sorted(
            name
            for name in names
            if name not in _MADE and not any(map(partial(fnmatch, name), _TOP))
        )
        if foreign or not {"items", "shards"}.intersection(names):
            told = [*foreign, *sorted(names - {".batch", *foreign})]
            raise FileExistsError(
                f"{self.root} is no batch run's folder: it has no batch.json, but "
                f"{', '.join(told[:3])}. Choose another --out."
            )
        if not self._adopting:
            raise FileExistsError(
                f"{self.root} has no batch.json, but {', '.join(sorted(names - {'.batch'})[:3])}. "
                f"{_ADOPT} Otherwise choose another --out."
            )

    def claim(self, manifest: Mapping[str, Any], ids: Iterable[str] = ()) -> None:
        """Say what run the folder is of; ``ids`` are those of the whole input, in its order."""
        settings = manifest["settings"]
        self._trusted = self._adopting or self.is_new or self._rows_are_as_written()
        self._adopting = False
        (self.root / "README.md").unlink(missing_ok=True)
        if settings["format"] == "folder" and "image" in settings["save"]:
            self.write("README.md", _CARD)
        self.write_lines("ids.txt", (f"{one}\n".encode() for one in ids))
        rest = {name: one for name, one in manifest.items() if name != "ended"}
        self.write_manifest({**rest, "format": FORMAT})

    def seal(self, whole: int) -> None:
        """Note that a run has ended, with so many items whole, and what it leaves."""
        files = {name: _sha256(self.root / name) for name in self._top()}
        self.write_manifest({**self.manifest, "ended": {"whole": whole, "files": files}})

    def changed(self, ended: Mapping[str, Any]) -> list[str]:
        """Files of the folder itself that are gone, or not what the last run wrote that ended."""
        told = ended["files"]
        there = set(self._top())
        return sorted(
            name
            for name, checksum in told.items()
            if name not in there or _sha256(self.root / name) != checksum
        )

    def ids(self) -> list[str]:
        """The ids of the whole input, in its order; none where an earlier version made the run."""
        path = self.root / "ids.txt"
        return path.read_text().split("\n")[:-1] if path.is_file() else []

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write ``batch.json`` with its checksum."""
        self.write("batch.json", _sealed(manifest))
        self._layout = None

    def _top(self) -> list[str]:
        found = [path for name in _TOP for path in self.root.glob(name)]
        return sorted(path.name for path in found if path.is_file() and not path.is_symlink())

    def _rows_are_as_written(self) -> bool:
        ended = self.manifest.get("ended")
        return ended is None or "metadata.jsonl" not in self.changed(ended)

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the folder, whole or not at all."""
        self.write_lines(name, [data])

    def write_lines(self, name: str, parts: Iterable[bytes]) -> None:
        write_whole(self.root / name, parts, self.temporary / name)

    # What is whole

    def note(self, kind: str, writer: str, row: Mapping[str, Any]) -> None:
        """Append a row to this process's own list of what is ``"done"`` or has ``"failed"``."""
        data = line_of(row)
        with self._writing:
            if kind not in self._journals:
                path = self.hidden / kind / f"{writer}.jsonl"
                self._journals[kind] = path.open("ab", buffering=0)
            journal = self._journals[kind]
            written = journal.write(data)
            if written < len(data):  # the disk is full: half a row would take the next with it
                os.ftruncate(journal.fileno(), os.fstat(journal.fileno()).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def note_whole(
        self, writer: str, item: str, place: str, files: Files, info: RunInfo | None = None
    ) -> None:
        """Note an item of which ``files`` holds ``run.json`` at least, which says ``info`` and is
        read where that is not passed; the others are there.

        Raises:
            ValueError: ``run.json`` is damaged.
        """
        info = info or read_info(files, place)
        sizes = self.layout.sizes(item, place, ["run.json", *info.files])
        self.note("done", writer, row_of(info, place, sha256(files["run.json"]), sizes))

    def settle(self, wanted: Container[str] = ()) -> dict[str, Known]:
        """Bring ``metadata.jsonl`` to what is there.

        Args:
            wanted: items that can be made anew: of those that are not whole what is left is
                removed. Others are named, and stay.

        Returns:
            The rows of the items that are whole, and of those that stay as they are, by id.
        """
        layout, writer = self.layout, f"settled-{uuid4().hex[:12]}"
        places, lacks = dict(layout.find()), self._lacks(layout)
        gutted: dict[str, str] = {}
        for item, place in places.items():
            lost = lacks.get((item, place))
            if lost:
                gutted[item] = f"{', '.join(lost[:3])} is missing or cut short"
            elif lost is None and (reason := self._note_found(layout, writer, item, place)):
                gutted[item] = reason  # and there is no row, or one of the first format
        stale = {item: places[item] for item in gutted if item in wanted}
        if stale:
            _tell(
                [_of_item(item, gutted[item], place, "made anew") for item, place in stale.items()]
            )
            layout.discard(stale)  # which may move others
            return self.settle(wanted)
        self._tell_gutted(layout, places, gutted)
        kept = [item for item in gutted if (item, places[item]) in lacks]
        self.gather({item: places[item] for item in [*(places.keys() - gutted), *kept]})
        return self.rows()

    def find_whole(self) -> set[str]:
        """The items of which every file is there with its size; those without a row, which may be
        of another process, too."""
        layout = self.layout
        lacks = self._lacks(layout)
        return {item for item, place in layout.find() if not lacks.get((item, place))}

    def held(self) -> tuple[dict[str, Held], list[str]]:
        """The items that are whole, by id, whether they have a row or not, and the ids of those
        that have one and are not. It only reads."""
        layout, rows = self.layout, self.rows()
        lacks, found = self._lacks(layout), dict[str, Held]()
        for item, place in layout.find():
            one, lost = rows.get(item), lacks.get((item, place))
            with suppress(OSError, ValueError):
                if lost is None:
                    found[item] = self._held_without_row(layout, item, place)
                elif not lost and one is not None and one.place == place:
                    found[item] = Held(one.line, place, one.fingerprint)
        return found, [item for item in rows if item not in found]

    @staticmethod
    def _held_without_row(layout: Layout, item: str, place: str) -> Held:
        files = layout.read(item, place, ["run.json"])
        info, checksum = read_info(files, place), sha256(files["run.json"])
        sizes = layout.sizes(item, place, info.files)
        row = row_of(info, place, checksum, sizes)
        if row["id"] != item or len(sizes) < len(info.files):
            raise ValueError(f"{place} is not whole")
        return Held(row["line"], place, row["fingerprint"])

    def _lacks(self, layout: Layout) -> dict[tuple[str, str], list[str]]:
        """By id and place of each row: the files that are missing or of another size."""
        found: dict[tuple[str, str], list[str]] = {}
        for path in self._row_files() if self._trusted else self._row_files()[1:]:
            for row in rows_in(path):
                told = sizes_in(row)
                if told is not None and isinstance(row.get("place"), str):
                    where = row["id"], row["place"]
                    sizes = layout.sizes(*where, told)
                    found[where] = [name for name in told if sizes.get(name) != told[name]]
        return found

    def _note_found(self, layout: Layout, writer: str, item: str, place: str) -> str | None:
        """Note an item from its ``run.json``; returns what is wrong with it."""
        try:
            files = layout.read(item, place, ["run.json"])
            if "run.json" not in files:
                return _NO_ITEM
            info = read_info(files, place)
            sizes = layout.sizes(item, place, info.files)
            if lost := [name for name in info.files if name not in sizes]:
                return f"{', '.join(lost[:3])} is missing"
            self.note_whole(writer, item, place, files, info)
        except ValueError as error:
            return str(error)
        return None

    def _tell_gutted(
        self, layout: Layout, places: Mapping[str, str], gutted: Mapping[str, str]
    ) -> None:
        """Name what is broken and stays, since nobody here can make it anew."""
        for item, reason in gutted.items():
            if reason == _NO_ITEM:
                raise ValueError(f"{self.root / places[item]} is no item: {reason}. Remove it.")
        _tell(
            [f"{reason}; what it held is made anew" for _, reason in layout.broken()]
            + [_of_item(item, one, places[item], "left as it is") for item, one in gutted.items()]
        )

    def _row_files(self) -> list[Path]:
        return [inside(self.root, "metadata.jsonl"), *sorted((self.hidden / "done").glob("*"))]

    def rows(self) -> dict[str, Known]:
        """Every row that has been noted, the latest of each item, by id."""
        return {item: one for path in self._row_files() for item, one in known_in(path)}

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
        paths = inside(self.root, "errors.jsonl"), *sorted((self.hidden / "failed").glob("*"))
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


def _of_item(item: str, reason: str, place: str, end: str) -> str:
    return f"item {item} is not whole: {reason} ({place}); it is {end}"


def _tell(lines: Sequence[str]) -> None:
    """The first of them on stderr, and how many more there are."""
    for one in lines[:_MOST_TOLD]:
        print(f"sdattn: {one}", file=sys.stderr)
    if len(lines) > _MOST_TOLD:
        print(f"sdattn: and {len(lines) - _MOST_TOLD:,} more", file=sys.stderr)


def _parsed(path: Path) -> dict[str, Any]:
    """``batch.json``, of a format that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is corrupt: {error}. {_ADOPT}") from error
    if not isinstance(found, dict) or found.get("format") not in (FORMAT, FIRST_FORMAT):
        raise ValueError(f"{path} is not of this version's format {FORMAT!r}. {_ADOPT}")
    return found


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """``batch.json`` as it is written, with the checksum of the rest."""
    rest = {name: one for name, one in manifest.items() if name != "digest"}
    return to_json({**rest, "digest": sha256(to_json(rest))})


def is_sealed(manifest: Mapping[str, Any], data: bytes) -> bool:
    """Whether a ``batch.json`` is byte for byte what was written."""
    return _sealed(manifest) == data


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(partial(file.read, 2**20), b""):
            found.update(block)
    return found.hexdigest()
