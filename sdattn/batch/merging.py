from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..errors import AccessError, InvalidValueError
from ..files.addresses import path_of
from ..files.paths import check_apart
from .input.plan import digest
from .storage.folder import BatchFolder
from .storage.manifest import BatchInput, Manifest
from .storage.rows import bad_lines_in
from .storage.whole import settle, whole_items


@dataclass(frozen=True)
class Merged:
    """The number of ``items`` in ``out`` now and ``wanted`` by the runs' input, and the ids
    ``missing`` in all runs; if ids.txt is gone only those that have a row."""

    items: int
    wanted: int
    missing: list[str]

    @property
    def lacks(self) -> int:
        return len(self.missing) or max(0, self.wanted - self.items)


def merge(roots: Sequence[str | Path], out: str | Path) -> tuple[int, int]:
    """Bring the items of several batch runs into one folder.

    If the runs drew parts of one input, the command without ``part`` goes on in ``out``. Items are
    linked if the disk allows it, else copied. The same call again adds what is missing.

    Args:
        roots: folders of batch runs, of one model, with the same settings.
        out: a new folder, or one that an earlier call made of these runs.

    Returns:
        The number of items in ``out``, and in their input.

    Raises:
        ValueError: the runs differ in model or settings, two different items have one id, or
            ``out`` belongs to other runs.
        FileExistsError: ``out`` is one of the runs, contains one or is inside one. OSError: one of
            the runs is being written, or ``out`` cannot be.
    """
    made = merge_runs(roots, out)
    return made.items, made.wanted


def merge_runs(roots: Sequence[str | Path], out: str | Path) -> Merged:
    """Do as :func:`merge`; return what is missing, too."""
    sources = [_Source(root) for root in roots]
    manifest = _merged(sources)
    check_apart(path_of(out), *(source.root for source in sources))
    _check_twins(sources)
    # The folder is claimed as a run of the whole input, so that the command without part goes on in
    # it.
    target, name = BatchFolder(out), uuid4().hex[:12]
    target.open(name)
    try:
        if not target.is_new and _identity(target.manifest) != _identity(manifest):
            raise InvalidValueError(f"{out} is the folder of other runs. Choose another `folder`.")
        ids = _ids(sources)
        target.claim(manifest, ids)
        _take_missing(target, name, sources)
        number = target.journals.gather()
        _merge_errors(sources, target)
        target.seal(number)
        # Missing: ids that an input has, or a row names, and that are not whole anywhere.
        known = [*ids, *(item for source in sources for item in source.lost)]
        whole = target.journals.rows()
        missing = dict.fromkeys(
            item for item in [*known, *target.journals.failures()] if item not in whole
        )
        return Merged(number, manifest.input.items, [*missing])
    finally:
        target.close()


class _Source:
    """A run to merge, with its whole ``items`` by id, and the ids ``lost``: rows without one."""

    def __init__(self, root: str | Path):
        self.root, self.folder = path_of(root), BatchFolder(root)
        if not self.folder.lock.free():
            raise AccessError(
                f"{self.root} is being written: {self.folder.lock.describe_holder()}. Wait for it, "
                "or stop it."
            )
        self.manifest = self.folder.manifest
        self.items, self.lost = whole_items(self.folder)


def _ids(sources: Sequence[_Source]) -> list[str]:
    """Return the ids of the input that runs drew, or of their parts of several inputs."""
    if len({source.manifest.input.digest for source in sources}) == 1:
        return next(filter(None, (source.folder.ids() for source in sources)), [])
    found: dict[str, None] = {}
    for source in sources:
        found |= dict.fromkeys(source.manifest.input.share_of(source.folder.ids()))
    return [*found]


def _take_missing(target: BatchFolder, name: str, sources: Sequence[_Source]) -> None:
    """Add the items that ``target`` does not hold yet, noted by ``name``."""
    whole = set(settle(target, {item for source in sources for item in source.items}))
    note = partial(target.note_whole, name)
    for source in sources:
        for item, held in source.items.items():
            if item not in whole:
                target.layout.take(source.folder.layout, (item, held.location), held.line, note)
                whole.add(item)
    target.layout.flush()


def _identity(manifest: Manifest) -> tuple[str, str, str]:
    return manifest.settings.fingerprint, manifest.settings.format, manifest.input.digest


def _merged(sources: Sequence[_Source]) -> Manifest:
    first = sources[0]
    for source in sources:
        if _identity(source.manifest)[:2] != _identity(first.manifest)[:2]:
            raise InvalidValueError(
                f"{source.root} and {first.root} were made with different models or settings: "
                f"{_settings(source)} and {_settings(first)}. Only runs that agree can be merged."
            )
    inputs = [source.manifest.input for source in sources]
    whole = replace(inputs[0], part="1/1", items=inputs[0].all_items)
    if len({each.digest for each in inputs}) > 1:
        items = sum(each.items for each in inputs)
        whole = BatchInput(
            source=", ".join(dict.fromkeys(each.source for each in inputs)),
            digest=digest(sorted(each.digest for each in inputs)),
            part="1/1",
            items=items,
            all_items=items,
            bad_lines=sum(each.bad_lines for each in inputs),
            columns=sorted({name for each in inputs for name in each.columns or ()}) or None,
        )
    return replace(first.manifest, input=whole)


def _settings(source: _Source) -> str:
    settings = source.manifest.settings
    names = ("model", "weights", "dtype", "save", "format")
    texts = [f"{name} {getattr(settings, name)}" for name in names]
    return ", ".join([*texts, f"preset {settings.preset['name']}"])


def _check_twins(sources: Sequence[_Source]) -> None:
    """Refuse one id for two different items; the same item in two runs is fine."""
    seen: dict[str, tuple[str, _Source]] = {}
    for source in sources:
        for item, held in source.items.items():
            fingerprint, owner = seen.setdefault(item.lower(), (held.fingerprint, source))
            if fingerprint != held.fingerprint:
                raise InvalidValueError(
                    f"Item {item!r} of {source.root} differs from {owner.root}'s. Draw one of them "
                    "again with other ids."
                )


def _merge_errors(sources: Sequence[_Source], target: BatchFolder) -> None:
    bad: dict[tuple[str, int], Any] = {}
    for source in sources:
        for row in source.folder.journals.failures().values():
            target.journals.note("failed", "merged", row)
        digest = source.manifest.input.digest
        for row in bad_lines_in(source.root / "errors.jsonl"):
            bad[digest, row["line"]] = row
    target.journals.gather_errors(bad.values(), target.journals.rows())
