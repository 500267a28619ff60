"""A run's claim to a folder: refused if that has another input, model or setting."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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


def settings_of(request: Request, loaded: Loaded) -> BatchSettings:
    """Return a run's settings for ``batch.json``."""
    known = loaded._asdict()
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
    return replace(settings, fingerprint=digest([RUN_FORMAT, *decisive]))


def describe_input(request: Request, jobs: Sequence[Job], items: int, bad_lines: int) -> BatchInput:
    return BatchInput(
        source=str(request.source),
        digest=digest_inputs(jobs),
        part="{}/{}".format(*request.part),
        items=items,
        all_items=len(jobs),
        bad_lines=bad_lines,
        columns=sorted({name for job in jobs for name in job.item.columns}) or None,
    )


@dataclass(frozen=True)
class Claim:
    """A run that asks for a folder, open and locked.

    With ``force``, if the folder has another input, model or setting, the items that differ are
    removed and the others kept. Another ``batch_size`` does not make it another run.
    ``fingerprints`` are by item id.
    """

    folder: BatchFolder
    request: Request
    settings: BatchSettings
    input: BatchInput
    batch_size: int
    fingerprints: Mapping[str, str]

    def make(self, ids: Iterable[str]) -> set[str]:
        """Take the folder and bring it in order; return the run's items that are whole in it. Raise
        ValueError if it has another input, model or setting."""
        folder = self.folder
        if not folder.is_new:
            self._check_video_format(folder.manifest)
            self._check_manifest(folder.manifest)
        folder.claim(self._manifest(), ids)
        rows = settle(folder, self.fingerprints)
        stale = {
            item: row.location
            for item, row in rows.items()
            if row.fingerprint != self.fingerprints.get(item, row.fingerprint)
        }
        # Items with this run's ids that were made from something else.
        if stale and not self.request.force:
            raise InvalidValueError(
                f"{folder.root} holds {len(stale)} item(s) made with other settings, e.g. "
                f"{min(stale)}. Choose another `folder`, or pass `force=True` to draw them again."
            )
        if stale:
            folder.layout.discard(stale)
            rows = settle(folder, self.fingerprints)
        return rows.keys() & self.fingerprints.keys()

    def _manifest(self) -> Manifest:
        return Manifest(
            settings=self.settings,
            input=self.input,
            batch_size=self.batch_size,
            versions=versions(),
        )

    def _check_manifest(self, manifest: Manifest) -> None:
        """Refuse a folder that another run made, unless ``force`` can change it."""
        differences, root = self._differences(manifest), self.folder.root
        if differences and not self.request.force:
            raise InvalidValueError(
                f"{root} belongs to another run: {'; '.join(differences)}. Choose another "
                "`folder`, or pass `force=True` to draw again what differs."
            )
        if manifest.settings.format != self.settings.format:
            raise InvalidValueError(
                f"{root} has the format {manifest.settings.format!r}, which `force=True` does not "
                "change. Choose another `folder`."
            )

    def _differences(self, manifest: Manifest) -> list[str]:
        """Return the differences from the run that made a folder, a phrase each."""
        found = []
        for name in ("weights", "pipeline", "dtype", "save", "preset", "options", "format"):
            old, new = getattr(manifest.settings, name), getattr(self.settings, name)
            if old != new:
                what = "the model's weights or configuration" if name == "weights" else name
                found.append(f"{what} {_short(old)} is now {_short(new)}")
        old, new = manifest.input, self.input
        for name, what in (("part", "part"), ("digest", "input")):
            if getattr(old, name) != getattr(new, name):
                numbers = f"{old.items} items, now {new.items}"
                return [*found, f"the {what} is another one ({old.source}: {numbers})"]
        return found

    def _check_video_format(self, manifest: Manifest) -> None:
        """Refuse to go on with videos of another format, whatever the reason for this machine's."""
        old, new = manifest.settings.video_format, self.settings.video_format
        if None in (old, new) or old == new or self.request.force:
            return
        do = "Install PyAV: pip install 'sdattn[video]'."
        if new == "mp4":
            do = "Go on where PyAV (av) is not installed."
        raise InvalidValueError(
            f"{self.folder.root} has videos as {old}, and this machine writes {new}. {do} Or "
            "choose another `folder`, or pass `force=True` to draw all videos again."
        )


def _short(value: object) -> str:
    return shorter(", ".join(map(str, value)) if isinstance(value, list) else str(value), 60)
