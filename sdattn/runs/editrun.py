"""`EditRun`: what an edit made, its sheet, its page and its folder."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..files.images import png
from ..files.writing import to_json
from ..maps import notebook, sheets
from ..maps.heatmaps import Heatmaps
from ..prompts.matching import linked
from .folder import save_run
from .info import Edited, EditInfo
from .report.pair import Counterpart, Link, Side, pair_page
from .run import Run
from .targets import new_folder

if TYPE_CHECKING:
    from PIL import Image

_TOLD = {  # of the settings of an edit, as its page names them
    "mode": "mode",
    "cross_replace_steps": "cross-attention of the source",
    "self_replace_steps": "self-attention of the source",
    "blend": "blended words",
    "weights": "weights",
    "reconstruction_psnr": "reconstruction, dB",
    "seed": "seed",
    "model": "model",
}


@dataclass(repr=False)
class EditRun(Run):
    """The result of :func:`sdattn.edit.edit`; the first image is the source's, the others the
    targets'.

    Attributes:
        words: for each image, the words that the edit is about.
        edited: the edit that was asked for, and how well the first image matches a real image.
    """

    words: list[list[str]]
    edited: Edited

    @property
    def mode(self) -> str:
        """``"replace"``, ``"refine"`` or ``"reweight"``."""
        return self.edited.mode

    @property
    def settings(self) -> dict[str, object]:
        """The edit's settings as in ``run.json``. ``"reconstruction_psnr"`` is how well the first
        image matches a real image, in decibels."""
        document = self._document().to_json()
        return {name: value for name, value in document.items() if name not in ("format", "runs")}

    def _document(self) -> EditInfo:
        said = {**vars(self[0].settings.alone()), **vars(self.edited), "edited": None}
        return EditInfo(**said, runs=self._names())

    def side_by_side(self) -> "Image.Image":
        """Draw the images in a row, and below each the heatmaps of the words that the edit is
        about.

        Returns:
            PIL, RGB. Heatmaps are dimmed against the strongest word of all images; their captions
            show their peaks.
        """
        top = max(run.heatmaps.top for run in self)
        columns = []
        for run, words in zip(self, self.words, strict=True):
            maps = [run.heatmaps[word] for word in words if word in run.heatmaps]
            tiles = [replace(heatmap, top=top).overlay(run.image) for heatmap in maps]
            columns.append((run.image, run.heatmaps.prompt.text, tiles))
        return sheets.columns(columns)

    def page(self) -> bytes:
        """Return ``edit.html``, UTF-8: the source's and a target's image with a slider between
        them, and the maps of each word in both at once. The page loads nothing."""
        sides = []
        for name, run in zip(self._names(), self, strict=True):
            sides.append(Side(name, run.image, run.heatmaps.prompt, run.heatmaps.occurrences()))
        source, *targets = sides
        others = []
        for target, heatmaps in zip(targets, self.heatmaps[1:], strict=True):
            links = _links(self.heatmaps[0], heatmaps, self.mode == "replace")
            others.append(Counterpart(target, links, self._about(links, source, target)))
        words = [", ".join(words) or "-" for words in self.words]
        settings = self.settings
        facts = {}
        for name, told in _TOLD.items():
            if (value := settings.get(name)) not in (None, {}, []):
                facts[told] = _text(value)
        return pair_page(
            "An edit",
            source,
            others,
            preset=self.heatmaps[0].preset,
            differing={"words of the edit": words},
            facts=facts,
        )

    def _about(self, links: Sequence[Link], source: Side, target: Side) -> list[int]:
        """Return the links of the words that the edit is about."""
        words = set[str]().union(*self.words)
        about = []
        for number, link in enumerate(links):
            ends = zip((source, target), link, strict=True)
            labels = {side.maps[at].label for side, at in ends if at is not None}
            if labels & words:
                about.append(number)
        return about

    def _names(self) -> list[str]:
        """Return the names of the images, which are their folders' names."""
        many = len(self) > 2
        return ["source", *(f"target-{i}" if many else "target" for i in range(1, len(self)))]

    def save(self, folder: str | Path, *, force: bool = False) -> list[Path]:
        """Write ``edit.html``, ``edit.png``, ``run.json`` and each image's run in a folder below:
        ``source``, ``target`` (or ``target-1`` and so on). Return the folder in a list."""
        names = self._names()
        with new_folder(folder, force=force, kind="edit") as temporary:
            for name, image_run in zip(names, self, strict=True):
                save_run(temporary / name, image_run)
            (temporary / "edit.html").write_bytes(self.page())
            self.side_by_side().save(temporary / "edit.png")
            (temporary / "run.json").write_bytes(to_json(self._document().to_json()))
        return [Path(folder)]

    def beside_target(self, parts: Collection[str]) -> dict[str, bytes]:
        """Return the files next to the run of an edit's only target: ``source.png`` and
        ``edit.html``, if ``parts`` has images and pages."""
        files = {}
        if "image" in parts:
            files["source.png"] = png(self[0].image)
        if "report" in parts:
            files["edit.html"] = self.page()
        return files

    def _repr_html_(self) -> str:
        sheet = notebook.whole(self.side_by_side(), "the images and the heatmaps of their words")
        return notebook.framed(self.page(), sheet)


def _links(source: Heatmaps, target: Heatmaps, in_place: bool) -> list[Link]:
    """Return the words that have a map, as their numbers in both prompts."""
    ours = _numbers(source)
    theirs = _numbers(target)
    pairs = linked(source.prompt, target.prompt, in_place=in_place)
    links = [(ours.get(a), theirs.get(b)) for a, b in pairs]
    return [link for link in links if link != (None, None)]


def _numbers(heatmaps: Heatmaps) -> dict[int | None, int]:
    """Map each word of the prompt that has a map to its number in :meth:`Heatmaps.occurrences`."""
    words = heatmaps.prompt.words
    return {words.index(word): number for number, word in enumerate(heatmaps.held)}


def _text(value: object) -> str:
    """Format a setting: "cat 2.0", "0.2 to 0.8"."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(entry)}" for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(dict.fromkeys(_text(entry) for entry in value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
