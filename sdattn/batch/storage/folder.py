"""The folder of a batch run: its ownership, and its files.

batch.json         the run: settings, input; after the end the checksums of the other files
                   here; its own checksum
ids.txt            the ids of the whole input, in its order
metadata.jsonl     one row per item, in the layout of datasets' "imagefolder"
README.md          instructions for datasets, see card
index.html         the items to browse, see gallery
errors.jsonl       one row per failed item and per line that could not be read
items/ or shards/  the items, see layouts
.batch/            work in progress: the lock, what each process has done, unfinished files
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import ExistsError
from ...files.addresses import AnyPath, path_of
from ...files.paths import check_writable, inside
from ...files.records import read_sealed
from ...files.writing import sha256
from ...runs.info import RunInfo, read_info
from .bucket import Bucket
from .card import card_of
from .disk import Disk
from .formats import FORMATS, layout_of
from .journals import Journals
from .layouts import Layout
from .manifest import FORMAT, LOST, Ended, Manifest, read_manifest
from .rows import row_of
from .storage import Files, Storage

_TOP = ("metadata.jsonl", "errors.jsonl", "README.md", "ids.txt", "index.html", "index-*.html")


class BatchFolder:
    """A batch run's folder, with ``hidden`` and ``temporary`` folders for work in progress;
    ``trusts_rows`` says that ``metadata.jsonl`` is what the last run wrote."""

    def __init__(self, root: str | Path):
        path: Any = path_of(root)
        self.storage: Storage = Disk(path) if isinstance(path, Path) else Bucket(path)
        self.root, self.lock = path, self.storage.lock
        self.hidden, self.temporary = self.root / ".batch", self.root / ".batch/tmp"
        self.journals = Journals(self.storage)
        self.trusts_rows = True
        self._layout: Layout | None = None

    @property
    def is_new(self) -> bool:
        return not (self.root / "batch.json").exists()

    @property
    def manifest(self) -> Manifest:
        return read_manifest(self.root)

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            settings = self.manifest.settings
            self._layout = layout_of(settings.format, self.storage, settings.shard_bytes)
        return self._layout

    def layout_found(self) -> Layout:
        """Return the layout that the items show, if ``batch.json`` is not what was written; raise
        ValueError if it is of another version, or of something else."""
        path = inside(self.root, "batch.json")
        read_sealed(path.read_bytes(), path, FORMAT, LOST)
        layouts = [layout_of(name, self.storage) for name in FORMATS]
        return next((one for one in layouts if any(True for _ in one.find())), layouts[0])

    # Ownership

    def open(self, owner: str) -> None:
        """Create the folder if needed and lock it for the job ``owner``; raise OSError if it cannot
        be written or is something else's or another job's, ValueError for a link in it."""
        if self.root.exists() and not self.root.is_dir():
            raise ExistsError(f"{self.root} is a file. Choose another `folder`.")
        paths = self.root.iterdir() if self.root.is_dir() else ()
        names = sorted({path.name for path in paths} - {".batch"})
        if names and self.is_new:
            raise ExistsError(
                f"{self.root} is not a batch run's folder: it has no batch.json, but "
                f"{', '.join(names[:3])}. Choose another `folder`."
            )
        for name in (".batch", ".batch/tmp", ".batch/done", ".batch/failed", "items", "shards"):
            inside(self.root, name)
        for group in (self.root / "items").glob("*"):
            inside(self.root, f"items/{group.name}")
        check_writable(self.root)
        self.hidden.mkdir(exist_ok=True)
        self.lock.take(owner)
        (self.hidden / "stop").unlink(missing_ok=True)
        self.storage.tidy()
        for name in ("done", "failed"):
            (self.hidden / name).mkdir(exist_ok=True)

    def close(self) -> None:
        self.storage.close()
        self.lock.release()

    def stop(self, reason: str) -> None:
        """Make every process of this run stop after its current batch."""
        (self.hidden / "stop").write_text(reason)

    @property
    def stopped(self) -> str | None:
        if self.lock.lost:
            return self.lock.lost
        path = self.hidden / "stop"
        return path.read_text() if path.exists() else None

    # Writing

    def claim(self, manifest: Manifest, ids: Iterable[str] = ()) -> None:
        """Record the folder's run; ``ids`` are the whole input's, in its order."""
        ended = None if self.is_new else self.manifest.ended
        self.trusts_rows = ended is None or "metadata.jsonl" not in self.changed(ended)
        self.storage.write("README.md", [card_of(manifest.settings, manifest.input.columns or ())])
        self.storage.write("ids.txt", (f"{item}\n".encode() for item in ids))
        self.write_manifest(replace(manifest, ended=None))

    def seal(self, whole: int) -> None:
        """Record that a run has ended, with its whole items and the files' checksums."""
        files = {name: _sha256(self.root / name) for name in self._top()}
        self.write_manifest(replace(self.manifest, ended=Ended(whole=whole, files=files)))

    def changed(self, ended: Ended) -> list[str]:
        """Return the folder's own files that are missing, or not what the last run wrote."""
        there = set(self._top())
        return sorted(
            name
            for name, checksum in ended.files.items()
            if name not in there or _sha256(self.root / name) != checksum
        )

    def ids(self) -> list[str]:
        """Return the ids of the whole input, in its order; empty if ids.txt is gone."""
        path = self.root / "ids.txt"
        return path.read_text().split("\n")[:-1] if path.is_file() else []

    def write_manifest(self, manifest: Manifest) -> None:
        self.storage.write("batch.json", [manifest.sealed()])
        self._layout = None

    def note_whole(
        self, writer: str, item: str, location: str, files: Files, info: RunInfo | None = None
    ) -> None:
        """Note a whole item; ``files`` holds at least ``run.json`` (ValueError if damaged)."""
        self.journals.note("done", writer, self.row(item, location, files, info))

    def row(
        self, item: str, location: str, files: Files, info: RunInfo | None = None
    ) -> dict[str, Any]:
        """Return an item's row from its ``run.json`` and the sizes of its files."""
        info = info or read_info(files, location)
        names = ["run.json", *info.files]
        sizes = {name: len(files[name]) for name in names if name in files}
        if len(sizes) < len(names):
            sizes = self.layout.sizes(item, location, names)
        return row_of(info, location, sha256(files["run.json"]), sizes)

    def note_failed(self, writer: str, item: Mapping[str, object], reason: str, text: str) -> None:
        """Note an item that could not be drawn: its fields, the reason in a line, the traceback."""
        self.journals.note("failed", writer, {**item, "reason": reason, "traceback": text})

    def _top(self) -> list[str]:
        found = self.root.iterdir()
        named = (path for path in found if any(fnmatchcase(path.name, n) for n in _TOP))
        return sorted(path.name for path in named if path.is_file() and not path.is_symlink())


def _sha256(path: AnyPath) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(partial(file.read, 2**20), b""):
            found.update(block)
    return found.hexdigest()
