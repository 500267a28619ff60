"""The last runs of the live page, as files that it shows again and offers for download."""

import secrets
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from ..files.paths import file_name
from ..files.temporary import remove_abandoned, temporary_name
from ..runs.folder import pack_with_page
from ..runs.run import Run
from ..runs.targets import run_folders

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
    """Files of a run: its page, a small version of its first image, and a zip of the saved run."""

    title: str
    page: Path
    small: Path
    archive: Path


@dataclass
class RecentRuns:
    """Runs by unguessable keys: whoever has a key has the run. Beyond ``most`` bytes in ``folder``
    the oldest are deleted, but never the last."""

    folder: Path
    most: int = 2**30
    _runs: dict[str, RecentRun] = field(default_factory=dict)

    def keep(self, run: Run) -> str:
        key, settings = secrets.token_urlsafe(16), run[0].settings
        run_folder, name = self.folder / key, f"{file_name(settings.prompt)}-{settings.seed}"
        kept = RecentRun(
            f"{settings.prompt} (seed {settings.seed})",
            *(run_folder / f"{name}.{kind}" for kind in ("html", "webp", "zip")),
        )
        run_folder.mkdir(parents=True)
        with zipfile.ZipFile(kept.archive, "w") as archive:
            for number, folder in enumerate(run_folders(name, len(run))):
                files = pack_with_page(run[number]).files
                for path, data in files.items():
                    archive.writestr(f"{folder.name}/{path}", data)
                if number == 0:
                    kept.page.write_bytes(files["report.html"])
        small = run[0].image.copy()
        small.thumbnail((_SIDE, _SIDE))
        small.save(kept.small, "WEBP")
        self._runs[key] = kept
        for oldest in list(self._runs)[:-1]:
            if sum(path.stat().st_size for path in self.folder.glob("*/*")) > self.most:
                del self._runs[oldest]
                shutil.rmtree(self.folder / oldest, ignore_errors=True)
        return key

    def known(self, keys: Iterable[str]) -> Iterator[tuple[str, RecentRun]]:
        found = ((key, self._runs.get(key)) for key in keys)
        return ((key, kept) for key, kept in found if kept is not None)
