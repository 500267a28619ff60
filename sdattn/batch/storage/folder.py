"""The folder of a batch run: whose it is, and who may write there.

batch.json         what the run is: settings, input; when a run has ended the checksums of the
                   other files here; its own checksum
ids.txt            the ids of the whole input, in its order
metadata.jsonl     a row an item, in the layout of datasets' "imagefolder"
README.md          what datasets is to read, see card
index.html         the items to look through, see gallery
errors.jsonl       a row an item that failed and a line that could not be read
items/ or shards/  the items, see layouts
.batch/            at work: the lock, what each process has done, unfinished files
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from ...errors import ExistsError
from ...files.addresses import AnyPath
from ...files.paths import check_writable, inside
from ...files.writing import sha256
from ...runs.info import RunInfo, read_info
from .card import card_of
from .formats import FORMATS, layout_of
from .journals import Journals
from .layouts import Layout
from .manifest import Ended, Manifest, parsed, read_manifest
from .rows import row_of
from .storage import Files, storage_at

_TOP = ("metadata.jsonl", "errors.jsonl", "README.md", "ids.txt", "index.html", "index-*.html")


class BatchFolder:
    """A batch run's folder.

    Attributes:
        storage: where it is.
        root: the folder.
        hidden, temporary: folders in it, for what is at work.
        lock: claims it for a job.
        journals: the rows of its items.
        manifest: what ``batch.json`` says.
        layout: how its items lie in it.
        trusts_rows: whether ``metadata.jsonl`` is what the last run wrote.
    """

    def __init__(self, root: str | Path):
        self.storage = storage_at(root)
        self.root, self.lock = self.storage.root, self.storage.lock
        self.hidden, self.temporary = self.root / ".batch", self.root / ".batch/tmp"
        self.journals = Journals(self.storage)
        self.trusts_rows = True
        self._layout: Layout | None = None

    @property
    def is_new(self) -> bool:
        """Whether nothing says yet what run it is of."""
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
        """How the items lie by what is there, where ``batch.json`` is not what was written.

        Raises:
            ValueError: it is of another version, or of something else.
        """
        path = inside(self.root, "batch.json")
        parsed(path.read_bytes(), path)
        layouts = [layout_of(name, self.storage) for name in FORMATS]
        return next((one for one in layouts if any(True for _ in one.find())), layouts[0])

    # Who writes here

    def open(self, owner: str) -> None:
        """Make the folder where there is none and lock it for the job ``owner``.

        Raises:
            FileExistsError: there is something else at this path.
            ValueError: it holds a link where a run has a folder.
            OSError: it cannot be written, or another job is writing there.
        """
        if self.root.exists() and not self.root.is_dir():
            raise ExistsError(f"{self.root} is a file. Choose another `folder`.")
        paths = self.root.iterdir() if self.root.is_dir() else ()
        names = sorted({path.name for path in paths} - {".batch"})
        if names and self.is_new:
            raise ExistsError(
                f"{self.root} is no batch run's folder: it has no batch.json, but "
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
        """Close what was noted, and let other jobs write here."""
        self.storage.close()
        self.lock.release()

    def stop(self, reason: str) -> None:
        """Have every process of this run stop after the batch in hand."""
        (self.hidden / "stop").write_text(reason)

    @property
    def stopped(self) -> str | None:
        """Why the run is to stop, if it is."""
        if self.lock.lost:
            return self.lock.lost
        path = self.hidden / "stop"
        return path.read_text() if path.exists() else None

    # What is written here

    def claim(self, manifest: Manifest, ids: Iterable[str] = ()) -> None:
        """Say what run the folder is of; ``ids`` are those of the whole input, in its order."""
        ended = None if self.is_new else self.manifest.ended
        self.trusts_rows = ended is None or "metadata.jsonl" not in self.changed(ended)
        self.write("README.md", [card_of(manifest.settings, manifest.input.columns or ())])
        self.write("ids.txt", (f"{item}\n".encode() for item in ids))
        self.write_manifest(replace(manifest, ended=None))

    def seal(self, whole: int) -> None:
        """Note that a run has ended, with so many items whole, and what it leaves."""
        files = {name: _sha256(self.root / name) for name in self._top()}
        self.write_manifest(replace(self.manifest, ended=Ended(whole=whole, files=files)))

    def changed(self, ended: Ended) -> list[str]:
        """Files of the folder itself that are gone, or not what the last run wrote that ended."""
        there = set(self._top())
        return sorted(
            name
            for name, checksum in ended.files.items()
            if name not in there or _sha256(self.root / name) != checksum
        )

    def ids(self) -> list[str]:
        """The ids of the whole input, in its order; none where ids.txt is gone."""
        path = self.root / "ids.txt"
        return path.read_text().split("\n")[:-1] if path.is_file() else []

    def write_manifest(self, manifest: Manifest) -> None:
        """Write ``batch.json`` with its checksum."""
        self.write("batch.json", [manifest.sealed()])
        self._layout = None

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a file of the folder, whole or not at all."""
        self.storage.write(name, parts)

    def note_whole(
        self, writer: str, item: str, location: str, files: Files, info: RunInfo | None = None
    ) -> None:
        """Note an item of which ``files`` holds ``run.json`` at least, which says ``info`` and is
        read where that is not passed; the others are there.

        Raises:
            ValueError: ``run.json`` is damaged.
        """
        info = info or read_info(files, location)
        names = ["run.json", *info.files]
        sizes = {name: len(files[name]) for name in names if name in files}
        if len(sizes) < len(names):
            sizes = self.layout.sizes(item, location, names)
        self.journals.note("done", writer, row_of(info, location, sha256(files["run.json"]), sizes))

    def note_failed(self, writer: str, item: Mapping[str, object], reason: str, text: str) -> None:
        """Note an item that could not be drawn: what it asks, why in a line, and the traceback."""
        self.journals.note("failed", writer, {**item, "reason": reason, "traceback": text})

    def _top(self) -> list[str]:
        found = [
            path for path in self.root.iterdir() if any(fnmatchcase(path.name, n) for n in _TOP)
        ]
        return sorted(path.name for path in found if path.is_file() and not path.is_symlink())


def _sha256(path: AnyPath) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(partial(file.read, 2**20), b""):
            found.update(block)
    return found.hexdigest()
