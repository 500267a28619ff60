"""A run's claim to a folder: refused if that has another input, model or setting."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..errors import InvalidValueError
from ..files.records import plain
from ..files.terminal import shorter
from ..files.version import versions
from ..maps.presets import preset_of
from ..runs.info import FORMAT as RUN_FORMAT
from .engines.worker import Loaded
from .input.plan import Job, digest, digest_inputs
from .input.request import Request
from .storage.folder import BatchFolder
from .storage.manifest import BatchInput, BatchSettings, Manifest
from .storage.whole import settle

_DECISIVE = ("weights", "dtype", "save", "preset")  # settings that determine the items' files


def manifest_of(
    request: Request, loaded: Loaded, jobs: Sequence[Job], bad_lines: int, batch_size: int
) -> Manifest:
    """Return the ``batch.json`` of a run that begins."""
    known, (which, of) = loaded._asdict(), request.part
    preset = preset_of(request.preset, default=known.pop("preset"))
    settings = BatchSettings(
        model=str(request.model),
        loading=request.loading or None,
        **known,
        save=sorted(request.parts(videos=loaded.video_format is not None)),
        preset=plain(preset.to_json()),  # comparable with a batch.json's
        options=plain(request.options),
        format=request.format,
        shard_bytes=request.shard_bytes,
    )
    decisive = [getattr(settings, name) for name in _DECISIVE]
    decisive += [settings.video_format] if settings.video_format else []
    made_of = BatchInput(
        source=str(request.source),
        digest=digest_inputs(jobs),
        part=f"{which}/{of}",
        items=len(jobs[which - 1 :: of]),
        all_items=len(jobs),
        bad_lines=bad_lines,
        columns=sorted({name for job in jobs for name in job.item.columns}) or None,
    )
    settings = replace(settings, fingerprint=digest([RUN_FORMAT, *decisive]))
    return Manifest(settings=settings, input=made_of, batch_size=batch_size, versions=versions())


def claim(
    folder: BatchFolder,
    manifest: Manifest,
    ids: Iterable[str],
    fingerprints: Mapping[str, str],
    *,
    force: bool,
) -> set[str]:
    """Take an open and locked folder for a run and bring it in order; return the run's items that
    are whole in it.

    If it has another input, model or setting, raise ValueError; with ``force`` the items that
    differ are removed and the others kept. Another batch size does not make it another run.
    ``ids`` are the whole input's, ``fingerprints`` the run's own, by id.
    """
    if not folder.is_new:
        _check(folder, manifest, force)
    folder.claim(manifest, ids)
    rows = settle(folder, fingerprints)
    stale = {
        item: row.location
        for item, row in rows.items()
        if row.fingerprint != fingerprints.get(item, row.fingerprint)
    }
    # Items with this run's ids that were made from something else.
    if stale and not force:
        raise InvalidValueError(
            f"{folder.root} holds {len(stale)} item(s) made with other settings, e.g. "
            f"{min(stale)}. Choose another `folder`, or pass `force=True` to draw them again."
        )
    if stale:
        folder.layout.discard(stale)
        rows = settle(folder, fingerprints)
    return rows.keys() & fingerprints.keys()


def _check(folder: BatchFolder, new: Manifest, force: bool) -> None:
    """Refuse a folder that another run made, unless ``force`` can change it."""
    old, root = folder.manifest, folder.root
    # Videos of another format, whatever the reason for this machine's.
    kinds = old.settings.video_format, new.settings.video_format
    if None not in kinds and kinds[0] != kinds[1] and not force:
        do = "Install PyAV: pip install 'sdattn[video]'."
        if kinds[1] == "mp4":
            do = "Go on where PyAV (av) is not installed."
        raise InvalidValueError(
            f"{root} has videos as {kinds[0]}, and this machine writes {kinds[1]}. {do} Or choose "
            "another `folder`, or pass `force=True` to draw all videos again."
        )
    if (differences := _differences(old, new)) and not force:
        raise InvalidValueError(
            f"{root} belongs to another run: {'; '.join(differences)}. Choose another `folder`, or "
            "pass `force=True` to draw again what differs."
        )
    if old.settings.format != new.settings.format:
        raise InvalidValueError(
            f"{root} keeps its format, {old.settings.format!r}. Choose another `folder`."
        )


def _differences(before: Manifest, now: Manifest) -> list[str]:
    """Return the differences from the run that made a folder, a phrase each."""
    found = []
    for name in ("weights", "pipeline", "dtype", "save", "preset", "options", "format"):
        old, new = getattr(before.settings, name), getattr(now.settings, name)
        if old != new:
            what = "the model's weights or configuration" if name == "weights" else name
            found.append(f"{what} {_short(old)} is now {_short(new)}")
    for name, what in (("part", "part"), ("digest", "input")):
        if getattr(before.input, name) != getattr(now.input, name):
            numbers = f"{before.input.items} items, now {now.input.items}"
            return [*found, f"the {what} is another one ({before.input.source}: {numbers})"]
    return found


def _short(value: object) -> str:
    return shorter(", ".join(map(str, value)) if isinstance(value, list) else str(value), 60)
