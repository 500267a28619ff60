"""The last runs of the live page, as files that it shows again and offers for download."""

import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from ..errors import RunError
from ..files.paths import file_name
from ..files.writing import remove_abandoned, temporary_name
from ..runs.info import RunSettings
from ..runs.run import Run

_SIDE = 160  # pixels of the longer side of a small image
_PREFIX = "sdattn-app-"


@contextmanager
def own_folder() -> Iterator[Path]:
    """Yield a temporary folder that is deleted at the end; first delete the ones that
    killed processes left."""
    remove_abandoned(Path(gettempdir()), _PREFIX)
    with TemporaryDirectory(prefix=temporary_name(_PREFIX)) as name:
        yield Path(name).resolve()


@dataclass(frozen=True)
class RecentRun:
    """Files of a run: its pages by name, a small version of its first image, and a zip of the saved
    run; with the first image's settings."""

    title: str
    settings: RunSettings
    pages: dict[str, Path]
    small: Path
    archive: Path

    @property
    def page(self) -> Path:
        """The first page: of an edit, the one with both images."""
        return next(iter(self.pages.values()))


@dataclass
class RecentRuns:
    """Runs by unguessable keys: whoever has a key has the run. Beyond ``most`` bytes in ``folder``
    the oldest are deleted, but never the last."""

    folder: Path
    most: int = 2**30
    _runs: dict[str, RecentRun] = field(default_factory=dict)

    def keep(self, run: Run) -> str:
        key = secrets.token_urlsafe(16)
        self._runs[key] = self.write(run, key)
        for oldest in list(self._runs)[:-1]:
            if sum(path.stat().st_size for path in self.folder.glob("*/*")) > self.most:
                del self._runs[oldest]
                shutil.rmtree(self.folder / oldest, ignore_errors=True)
        return key

    def write(self, run: Run, key: str) -> RecentRun:
        """Write a run's files below ``key``; it is not among the runs, and stays."""
        settings = run[0].settings
        folder = self.folder / key
        name = f"{file_name(settings.prompt)}-{settings.seed}"
        folder.mkdir(parents=True)
        pages = {}
        with TemporaryDirectory(dir=folder) as saved:
            run.save(Path(saved) / name)
            archive = shutil.make_archive(str(folder / name), "zip", saved)
            for page in sorted(Path(saved).rglob("*.html")):
                part = page.parent.name.removeprefix(name).strip("-")
                kept = folder / f"{'-'.join(filter(None, (name, part)))}.html"
                pages[part.capitalize() or "Both"] = page.rename(kept)
        small = run[0].image.copy()
        small.thumbnail((_SIDE, _SIDE))
        small.save(folder / f"{name}.webp", "WEBP")
        prompts = dict.fromkeys(one.settings.prompt for one in run)
        photo = settings.explained and settings.explained.file
        title = f"{' → '.join(prompts)} ({photo or f'seed {settings.seed}'})"
        return RecentRun(title, settings, pages, folder / f"{name}.webp", Path(archive))

    def settings(self, key: str) -> RunSettings:
        """Return how a run was made; raise RunError if there is none."""
        for _, run in self.known([key]):
            return run.settings
        raise RunError("The run that is shown is not kept. Draw an image first.")

    def known(self, keys: Iterable[str]) -> Iterator[tuple[str, RecentRun]]:
        found = ((key, self._runs.get(key)) for key in keys)
        return ((key, kept) for key, kept in found if kept is not None)
