"""`Run`: the result of a pipeline's run under capture, ready to be saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from ..errors import InvalidTypeError, InvalidValueError
from ..files.videos import Video
from ..maps.capture import MapStore
from ..maps.heatmap import Heatmap, latent_frames
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMaps
from .folder import save_run
from .imagerun import ImageRun, described
from .info import Candidate
from .targets import check_target, run_folders

if TYPE_CHECKING:
    from PIL import Image

_MOST_PAGES = 4  # in a notebook, which keeps them


class EachHeatmaps(list[Heatmaps]):
    """The heatmaps of a run's images, as a list; with one image, its words are found by name too.

    run.heatmaps[0]["cat"]       with any number of images
    run.heatmaps["cat"]          the same, with one image
    """

    @overload
    def __getitem__(self, key: SupportsIndex) -> Heatmaps: ...
    @overload
    def __getitem__(self, key: slice) -> list[Heatmaps]: ...
    @overload
    def __getitem__(self, key: str) -> Heatmap: ...
    def __getitem__(self, key: Any) -> Any:
        return self._only(key)[key] if isinstance(key, str) else super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return key in self._only(key) if isinstance(key, str) else super().__contains__(key)

    def _only(self, word: str) -> Heatmaps:
        if len(self) != 1:
            raise InvalidValueError(
                f"A word alone, [{word!r}], is for a run of one image, and these are the heatmaps "
                f"of {len(self)}. Name the image first, run.heatmaps[0][{word!r}]."
            )
        return self[0]


@dataclass
class Run:
    """The runs of :func:`generate`'s images.

        len(run), run[0], for image_run in run

    Attributes:
        image_runs: one :class:`sdattn.ImageRun` per image, one or more per prompt.
        store: the captured maps.
        layers: maps of the layers that see the text, as the preset reads them.
    """

    image_runs: list[ImageRun]
    store: MapStore
    layers: LayerMaps

    def __repr__(self) -> str:
        return f"{type(self).__name__}({described(self.image_runs) if len(self) else 'no images'})"

    def __len__(self) -> int:
        return len(self.image_runs)

    def __getitem__(self, number: int) -> ImageRun:
        if isinstance(number, str):
            raise InvalidTypeError(
                f"run[{number!r}]: a run has images by number, run[0]. For a word's map take "
                f"run.heatmaps[0][{number!r}]."
            )
        return self.image_runs[number]

    def __iter__(self) -> Iterator[ImageRun]:
        return iter(self.image_runs)

    @property
    def image(self) -> Image.Image:
        """The image of a run of one; raises ValueError with several."""
        if len(self) != 1:
            raise InvalidValueError(
                f"run.image is for a run of one image, and this one has {len(self)}. Take one of "
                "run.images, or of the images' runs, run[0].image."
            )
        return self[0].image

    @property
    def images(self) -> list[Image.Image]:
        """PIL images, one or more per prompt; the middle frames of videos."""
        return [image_run.image for image_run in self]

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each image's noise; None if the noise is an image's own."""
        return [image_run.settings.seed for image_run in self]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The seeds that the image's seed was chosen from, with their scores, the best first; empty
        if none was chosen."""
        return self[0].settings.candidates or ()

    @property
    def videos(self) -> list[Video]:
        """Videos, one or more per prompt; empty for images."""
        return [image_run.video for image_run in self if image_run.video is not None]

    @property
    def heatmaps(self) -> EachHeatmaps:
        """The heatmaps of each image. With one image ``heatmaps["cat"]`` is
        ``heatmaps[0]["cat"]``; with several a word alone raises ValueError."""
        return EachHeatmaps(image_run.heatmaps for image_run in self)

    @property
    def info(self) -> list[dict[str, Any]]:
        """Settings of each image's run, as in ``run.json``."""
        return [image_run.info for image_run in self]

    @property
    def negative_heatmaps(self) -> EachHeatmaps:
        """Heatmaps of each image's negative prompt, if both branches were asked for, or empty."""
        return self._further("negative")

    @property
    def asked_heatmaps(self) -> EachHeatmaps:
        """Heatmaps of the text that was asked about, or empty."""
        return self._further("asked")

    @property
    def causal_heatmaps(self) -> list[list[Heatmap]]:
        """For each image, where it changes without each word of the prompt, see
        :func:`sdattn.knockout`, or empty if that was not asked for."""
        maps = [list(run.more["causal"].maps) if "causal" in run.more else [] for run in self]
        return maps if any(maps) else []

    def _further(self, name: str) -> EachHeatmaps:
        return EachHeatmaps(run.texts[name] for run in self if name in run.texts)

    def save(self, folder: str | Path, *, force: bool = False) -> list[Path]:
        """Write a run's folder, see :func:`sdattn.runs.folder.save_run`; with several images one
        each, ``folder-0``, ``folder-1`` and so on. Return the folders."""
        folders = run_folders(folder, len(self))
        for path in folders[1:]:  # before any is written; each is checked again as it is
            check_target(path, force=force)
        return [save_run(path, run, force=force) for path, run in zip(folders, self, strict=True)]

    def image_run(self, number: int) -> ImageRun:
        """Return one image's run with all its further maps."""
        return self[number]

    def _repr_html_(self) -> str:
        from ..maps.notebook import framed
        from .report import report

        shown = self.image_runs[:_MOST_PAGES]
        parts = [framed(report(run), _still(run)) for run in shown]
        if len(self) > _MOST_PAGES:
            more = len(self) - _MOST_PAGES
            parts.append(f"<p>{more} more images: save() writes a page of each.</p>")
        return "".join(parts)


def _still(run: ImageRun) -> str:
    """Return an image's card, or key frames of a video with each word's maps over them."""
    from ..maps.notebook import video_stills, whole
    from .card import draw_card, strongest

    maps = run.heatmaps.occurrences()
    video = run.video
    if video is None:
        return whole(draw_card(run, strongest(maps)), run.settings.prompt)
    latent = latent_frames(len(run.heatmaps.maps), len(video))
    return video_stills(maps, [(f"frame {i + 1}", latent[i], video[i]) for i in video.key_frames()])
