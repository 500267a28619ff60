"""`Run`: what came out of a pipeline under capture, ready to be saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..hooks.map_store import MapStore
from ..maps.details import details_of
from ..maps.heatmap import Heatmap
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMaps
from .folder import check_target, save_run
from .imagerun import ImageRun

if TYPE_CHECKING:
    from PIL import Image

_MOST_PAGES = 4  # in a notebook, which keeps them


@dataclass
class Run:
    """What :func:`generate` made.

    Attributes:
        images: PIL, one or more a prompt.
        heatmaps: those of each image.
        store: the captured maps.
        layers: the maps of the layers that see the text, as the preset reads them.
        info: the settings of each image's run, as ``run.json`` holds them.
        negative_heatmaps: those of each image's negative prompt, where both branches were asked
            for; else empty.
        asked_heatmaps: those of the other text that was asked about; else empty.
        causal_heatmaps: for each image where it changes without each of the prompt's words, see
            :func:`sdattn.knockout`, where that was asked for; else empty.
    """

    images: list[Image.Image]
    heatmaps: list[Heatmaps]
    store: MapStore
    layers: LayerMaps = field(repr=False)
    info: list[dict[str, Any]]
    negative_heatmaps: list[Heatmaps] = field(default_factory=list, kw_only=True)
    asked_heatmaps: list[Heatmaps] = field(default_factory=list, kw_only=True)
    causal_heatmaps: list[list[Heatmap]] = field(default_factory=list, kw_only=True)

    def save(self, folder: str | Path, *, force: bool = False) -> list[Path]:
        """Write a run's folder, see :func:`sdattn.runs.folder.save_run`; with several images one
        each, ``folder-0``, ``folder-1`` and so on. Returns the folders."""
        folders = run_folders(folder, len(self.images))
        for path in folders:  # before any is written
            check_target(path, force=force)
        for i, path in enumerate(folders):
            self.save_image(i, path, force=force)
        return folders

    def save_image(self, number: int, folder: Path, *, force: bool = False) -> None:
        """Write the folder of one of the images."""
        save_run(folder, self.image_run(number), force=force)

    def image_run(self, number: int) -> ImageRun:
        """One of the images with all that there is of it."""
        heatmaps = self.heatmaps[number]
        more: dict[str, tuple[str, Sequence[Heatmap]]] = {}
        for name, maps in (("negative", self.negative_heatmaps), ("asked", self.asked_heatmaps)):
            if maps:
                more[name] = maps[number].prompt.text, maps[number].occurrences()
        if self.causal_heatmaps and self.causal_heatmaps[number]:
            more["causal"] = heatmaps.prompt.text, self.causal_heatmaps[number]
        details = details_of(self.store, number, heatmaps)
        layers, info = self.layers.image(number), self.info[number]
        return ImageRun(self.images[number], heatmaps, layers, info, details, more)

    def _repr_html_(self) -> str:
        from ..maps.notebook import framed, stills
        from .report import report

        shown = [self.image_run(i) for i in range(min(len(self.images), _MOST_PAGES))]
        parts = []
        for one in shown:
            maps = [(m.label, m.values.numpy()) for m in one.heatmaps.occurrences()]
            still = f"<details><summary>stills</summary>{stills(maps, one.image)}</details>"
            parts.append(framed(report(one)) + still)
        if more := len(self.images) - len(shown):
            parts.append(f"<p>{more} more images: save() writes a page of each.</p>")
        return "".join(parts)


def run_folders(folder: str | Path, number: int) -> list[Path]:
    """The folders of a run's images: ``folder``, or ``folder-0``, ``folder-1`` and so on."""
    return [Path(folder)] if number == 1 else [Path(f"{folder}-{i}") for i in range(number)]
