"""A model's repository on the hub, or what this machine's cache has of one, and fetching its files.

repository = Repository.find(HubName("owner/name"))   # asks the hub, or looks into the cache
folder = repository.fetch(["model_index.json"])        # on this machine, with these files
"""

import glob
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from ..errors import (
    AccessError,
    InvalidValueError,
    MissingFileError,
    OptionError,
    SdattnError,
    SdattnWarning,
    size_text,
    warn,
)
from .hub_errors import asking_hub, folder_of, full_disk
from .progress import Download, own_progress

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:/([^/\\].*\.safetensors))?")
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
LORA = "pytorch_lora_weights.safetensors"  # as diffusers saves one
_LITTLE = 1_000_000  # bytes that come without a word
_PLACES = ("tree", "blob", "resolve", "commit")  # of a page's address, before the revision
_NO_OWNERS = ("datasets", "spaces", "models", "collections", "docs")  # of other pages


@dataclass(frozen=True)
class HubName:
    """A repository of the hub, ``"owner/name"``, and a revision or a file in it if they are named
    too."""

    repo: str
    file: str | None = None
    revision: str | None = None

    @classmethod
    def read(cls, text: str, revision: str | None = None) -> "HubName | None":
        """Return what ``owner/name``, ``owner/name/file.safetensors`` or a page's address names, or
        None for text that cannot be a name of the hub.

        Raises:
            ValueError: an address of another host, or one that names another ``revision``.
        """
        if not text.startswith(("https://", "http://")):
            found = _NAME.fullmatch(text)
            is_name = found is not None and not found[1].endswith(".safetensors")
            return cls(found[1], found[2], revision) if found and is_name else None
        from huggingface_hub import constants

        address = urlparse(text)
        if address.netloc not in (*_HOSTS, urlparse(constants.ENDPOINT).netloc):
            raise InvalidValueError(
                f"{text} is not an address of the hub, {constants.ENDPOINT}. Download the file and "
                "pass its path; for a mirror of the hub, set HF_ENDPOINT to its address."
            )
        steps = list(map(unquote, address.path.strip("/").split("/")))  # refs%2Fpr%2F1 is one
        owner, name, place, named, *file = [*steps, "", "", "", ""][: max(len(steps), 4)]
        named = named if place in _PLACES and named != "main" else ""
        if named and revision not in (None, named):
            advice = f"the address {text} names another revision. Leave one of them out."
            raise OptionError("revision", revision, advice)
        if owner in _NO_OWNERS or _NAME.fullmatch(f"{owner}/{name}") is None:
            raise InvalidValueError(f"{text} names no model. Pass its name, owner/name.")
        weights = "/".join(file) if file and file[-1].endswith(".safetensors") else None
        return cls(f"{owner}/{name}", weights, revision or named or None)

    def __str__(self) -> str:
        return f"{self.repo}/{self.file}" if self.file else self.repo


@dataclass(frozen=True)
class HubFile:
    """Size of a file in bytes, and its name among the cache's blobs, which is its hash."""

    size: int
    blob: str | None


@dataclass(frozen=True)
class Repository:
    """The files of a repository.

    Attributes:
        name: what was asked for.
        files: by their paths in the repository.
        commit: hash of the revision.
        card: entries of README.md's header, such as ``license`` and ``base_model``.
        gated: how access is granted, ``"auto"`` or ``"manual"``, or False.
        refused: why the hub could not be asked, if these are the files in the cache.
    """

    name: HubName
    files: Mapping[str, HubFile]
    commit: str
    card: Mapping[str, Any] = field(default_factory=dict)
    gated: str | bool = False
    refused: SdattnError | None = None

    @classmethod
    def find(cls, name: HubName) -> "Repository":
        """Ask the hub for a repository's files; if it gives none, take those in the cache.

        Raises:
            SdattnError: see :func:`asking_hub`; the cache has nothing of it either.
        """
        try:
            with asking(name):
                return cls._listed(name)
        except SdattnError as error:
            cached = cls._cached(name, error)
            if cached is None:
                raise
            return cached

    @classmethod
    def _listed(cls, name: HubName) -> "Repository":
        from huggingface_hub import HfApi, constants

        api = HfApi()
        info = api.model_info(
            name.repo,
            revision=name.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        listed: Iterable[Any] = info.siblings or []
        if any(file.size is None for file in listed):  # some mirrors do not tell it there
            tree = api.list_repo_tree(name.repo, recursive=True, revision=info.sha)
            listed = [entry for entry in tree if hasattr(entry, "size")]
        files = {}
        for file in listed:
            files[file.rfilename] = HubFile(
                file.size, file.lfs.sha256 if file.lfs else file.blob_id
            )
        card = info.card_data.to_dict() if info.card_data else {}
        card.setdefault("tags", info.tags or [])
        return cls(name, files, str(info.sha), card, info.gated or False)

    @classmethod
    def _cached(cls, name: HubName, refused: SdattnError) -> "Repository | None":
        """Return what the cache has of the revision, or None if it has nothing."""
        commit = name.revision or "main"
        with suppress(OSError):  # refs/pr is a folder there
            commit = (cache_of(name) / "refs" / commit).read_text().strip()
        folder = cache_of(name) / "snapshots" / commit
        files = {}
        for path in folder.rglob("*"):
            if path.is_file():
                files[path.relative_to(folder).as_posix()] = HubFile(path.stat().st_size, None)
        return cls(name, files, commit, refused=refused) if files else None

    def check(self, file: str) -> None:
        """Raise FileNotFoundError, with those that are there, if there is no such file; OSError if
        only the cache is known, which may lack it."""
        if file in self.files:
            return
        if self.refused is not None:
            raise self.only_a_part() from self.refused
        there = [name for name in self.files if name.endswith((".safetensors", ".json"))]
        has = f"It has {some_of(there)}." if there else "It has no file that is read."
        raise MissingFileError(f"There is no {self.name.repo}/{file} on the hub. {has}")

    def only_a_part(self) -> AccessError:
        """Return the error for a model whose copy in the cache is not whole."""
        kind = type(self.refused)
        kind = kind if issubclass(kind, AccessError) else AccessError
        return kind(f"{self.refused} The cache has only a part of it.")

    def warn_if_not_asked(self) -> None:
        """Warn of a model that comes from the cache since the hub refused; silent if the hub may
        not be asked."""
        from huggingface_hub import constants

        if self.refused is not None and not constants.HF_HUB_OFFLINE:
            text = f"{self.refused} Until then its copy in this machine's cache is used."
            warn(text, SdattnWarning)

    @property
    def folder(self) -> Path:
        """The folder in the cache, which may lack files until they are fetched."""
        return cache_of(self.name) / "snapshots" / self.commit

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the files among these that are not on this machine."""
        missing = []
        for name in names:
            blob = self.files[name].blob
            is_here = blob is not None and (cache_of(self.name) / "blobs" / blob).is_file()
            if not is_here and not (self.folder / name).is_file():
                missing.append(name)
        return missing

    def size(self, names: Iterable[str]) -> int:
        """Return the bytes of these files."""
        return sum(self.files[name].size for name in names)

    def fetch(self, names: Iterable[str]) -> Path:
        """Fetch files that are not on this machine, and say how much comes.

        Returns:
            the folder in the cache that has them all.

        Raises:
            FileNotFoundError: the repository has no such file.
            SdattnError: see :func:`asking_hub`.
        """
        names = sorted(names)
        for name in names:
            self.check(name)
        if all((self.folder / name).is_file() for name in names):
            return self.folder
        from huggingface_hub import hf_hub_download, snapshot_download

        missing = self.missing(names)
        home = cache_of(self.name)
        needed = self.size(missing)
        nearest = next(folder for folder in home.parents if folder.is_dir())
        if needed > shutil.disk_usage(nearest).free:
            raise full_disk(f"{self.name} needs another {size_text(needed)}, and ")
        remains = {}
        for part in home.glob("blobs/*.incomplete"):
            with suppress(FileNotFoundError):  # it has just become whole
                remains[part] = part.stat()
        with ExitStack() as during:
            during.enter_context(asking(self.name))
            during.enter_context(_small_pieces())
            if during.enter_context(own_progress()) and needed > _LITTLE:
                what = f"{len(missing)} of {len(self.files)} files of {self.name.repo}"
                during.enter_context(Download(home, needed, what))
            revision = self.name.revision
            for name in missing:  # in this thread, where Ctrl-C ends it; other threads go on
                if self.files[name].size > _LITTLE:
                    hf_hub_download(self.name.repo, name, revision=revision)
            patterns = list(map(glob.escape, names))
            there = snapshot_download(self.name.repo, revision=revision, allow_patterns=patterns)
        _remove_remains(home, remains)
        return Path(there)


def cache_of(name: HubName) -> Path:
    """Return the cache's folder of a repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / folder_of(name.repo)


@contextmanager
def asking(name: HubName) -> Iterator[None]:
    """Ask the hub for a model, with its library's own warnings and advice switched off."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    what = f"{str(name)!r}, which is not a local file or folder,"
    try:
        with asking_hub(what, name.repo, name.revision):
            yield
    finally:
        log.setLevel(level)


@contextmanager
def _small_pieces() -> Iterator[None]:
    """Let the hub's library write what comes every megabyte, so that progress is seen; its own
    pieces are of 10 MB."""
    from huggingface_hub import constants

    pieces = constants.DOWNLOAD_CHUNK_SIZE
    constants.DOWNLOAD_CHUNK_SIZE = 1 << 20
    try:
        yield
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = pieces


def _remove_remains(home: Path, remains: Mapping[Path, os.stat_result]) -> None:
    """Remove parts of files that an earlier process left behind when it was killed.

    The hub's library names a part by chance since 1.18, and never uses it again. A part that
    another process still writes is known by its lock, and where a file system has no locks by its
    growth while this process fetched.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    for part, before in remains.items():
        lock = home.parent / ".locks" / home.name / f"{part.name.partition('.')[0]}.lock"
        with suppress(OSError), WeakFileLock(lock, timeout=0.1):  # its Timeout is an OSError
            after = part.stat()
            if (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
                part.unlink()


def some_of(names: Collection[str]) -> str:
    """Return the first few names in one line, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(sorted(names)[:5]) + more
