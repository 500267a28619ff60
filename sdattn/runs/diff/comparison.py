"""How two runs differ: their words' maps on one grid, as numbers and as a sheet."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from ...files.records import plain
from ...files.terminal import shorter, two_digits
from ...files.writing import to_json
from ...maps import notebook, render, sheets
from ...maps.glow import own_scale
from ...maps.heatmap import Heatmap
from ...maps.heatmaps import Heatmaps
from ..report.pair import Counterpart, Side, pair_page
from ..targets import new_folder
from .matching import WordDifference

FORMAT = "sdattn-diff-1"
_FEW = 12  # words; more are drawn smaller
NUMBERS = ("mean A", "mean B", "correlation", "largest B - A")  # of a word


@dataclass
class Comparison:
    """The result of :func:`diff`.

    Attributes:
        names: names of A and B.
        prompts: prompts of A and B.
        image_a, image_b: the images.
        words: the words of A in the order of its prompt, then words that only B has.
        settings: settings that differ in the two ``run.json``, name to (A's, B's); None for one
            that a run lacks.
        heatmaps: all heatmaps of A and B.
    """

    names: tuple[str, str]
    prompts: tuple[str, str]
    image_a: Image.Image
    image_b: Image.Image
    words: list[WordDifference]
    settings: dict[str, tuple[object, object]]
    heatmaps: tuple[Heatmaps, Heatmaps]

    def __repr__(self) -> str:
        a, b = (shorter(name, 40) for name in self.names)
        both = sum(word.difference is not None for word in self.words)
        differ = shorter(", ".join(self.settings), 60) or "no setting"
        words = f"{len(self.words)} words, {both} in both"
        return f"Comparison({a!r} and {b!r}, {words}, differ in {differ})"

    def _repr_html_(self) -> str:
        runs = [("prompt", *self.prompts), *((n, *p) for n, p in self.told_settings().items())]
        a, b = self.names
        sheet = notebook.whole(self.sheet(), f"{a} and {b}, word by word")
        settings = notebook.table(("", f"A: {a}", f"B: {b}"), runs)
        numbers = settings + notebook.table(("word", *NUMBERS), self.told_words())
        more = f"<details><summary>numbers</summary>{numbers}</details>"
        return notebook.framed(self.page(), sheet) + more

    def page(self) -> bytes:
        """Return ``diff.html``, UTF-8: both images with a slider between them, and the maps of each
        word in both at once. The page loads nothing."""
        maps: tuple[list[Heatmap], list[Heatmap]] = [], []
        links = [(_add(maps[0], word.a), _add(maps[1], word.b)) for word in self.words]
        a = Side("A", self.image_a, self.heatmaps[0].prompt, maps[0])
        b = Side("B", self.image_b, self.heatmaps[1].prompt, maps[1])
        alone = [number for number, link in enumerate(links) if None in link]
        return pair_page(
            "Two runs",
            a,
            [Counterpart(b, links, alone)],
            preset=self.heatmaps[0].preset,
            differing={"run": self.names, **self.told_settings()},
        )

    def sheet(self) -> Image.Image:
        """Draw both images and where they differ, and below a row for each word: its map in A, its
        map in B, and B - A.

        Returns:
            PIL, RGB. A word has the same scale in A and B, and all differences share one. Many
            words are set in several columns.
        """
        side = 384 if len(self.words) <= _FEW else render.SHORTEST_SIDE
        size = [round(pixels * side / min(self.image_a.size)) for pixels in self.image_a.size]
        a = self.image_a.convert("RGB").resize(size, Image.Resampling.BICUBIC)
        b = self.image_b.convert("RGB").resize(a.size, Image.Resampling.BICUBIC)
        head = [render.caption(a, "A"), render.caption(b, "B"), self._pixels(a.size)]
        differ = [f"{name} {x} | {y}" for name, (x, y) in self.told_settings().items()]
        lines = {
            "A": f"{self.names[0]}: {self.prompts[0]}",
            "B": f"{self.names[1]}: {self.prompts[1]}",
            **({"A | B": ", ".join(differ)} if differ else {}),
            "B - A": "red where B has more, blue where A has more",
        }
        return sheets.bands(head, self._rows(a, b), lines)

    def _rows(self, a: Image.Image, b: Image.Image) -> list[list[Image.Image]]:
        """Draw each word's tiles: A, B, and B - A."""
        maps = list[Heatmap]()
        for word in self.words:
            maps += filter(None, (word.a, word.b))
        differences = [word.difference for word in self.words if word.difference is not None]
        most = max((float(values.abs().max()) for values in differences), default=0.0)
        top = max((heatmap.full for heatmap in maps), default=0.0)
        rows = []
        for word in self.words:
            label = f"{word.label}: B - A"
            tiles = []
            peaks = [heatmap.peak for heatmap in (word.a, word.b) if heatmap]
            scale = own_scale(max(peaks), top)  # one for both runs
            for letter, image, heatmap in (("A", a, word.a), ("B", b, word.b)):
                if heatmap:
                    tiles.append(replace(heatmap, label=word.label).overlay(image, scale=scale))
                else:
                    tiles.append(_blank(image.size, word.label, f"not in {letter}"))
            if word.difference is None:
                tiles.append(_blank(a.size, label))
            else:
                tiles.append(render.signed(word.difference.numpy(), a.size, label, most))
            rows.append(tiles)
        return rows

    def told_settings(self) -> dict[str, tuple[str, str]]:
        """Return the settings that differ, except the prompt, each in at most 60 characters."""
        differ = {name: pair for name, pair in self.settings.items() if name != "prompt"}
        return {name: (_short(a), _short(b)) for name, (a, b) in differ.items()}

    def told_words(self) -> list[list[str]]:
        """Return each word, and its :data:`NUMBERS` to two digits."""
        told = []
        for word in self.words:
            largest = None if word.largest is None else word.largest[0]
            numbers = (word.mean_a, ""), (word.mean_b, ""), (word.correlation, ""), (largest, "+")
            texts = [word.label]
            for number, sign in numbers:
                texts.append("-" if number is None else two_digits(number, sign))
            told.append(texts)
        return told

    def _pixels(self, size: tuple[int, int]) -> Image.Image:
        """Draw how far the images are apart, pixel by pixel."""
        label = "|B - A|"
        if self.image_a.size != self.image_b.size:
            return _blank(size, label, "images of two sizes")
        images = self.image_a, self.image_b
        a, b = (np.asarray(image.convert("RGB"), dtype=float) for image in images)
        apart = np.abs(b - a)
        image = Image.fromarray(apart.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
        return render.caption(image, label, f"mean {apart.mean():.3g} of 255")

    def to_dict(self) -> dict[str, object]:
        """Return the numbers, as :meth:`save` writes them to ``run.json``. ``size`` is an image's
        (width, height)."""
        runs = zip(self.names, self.prompts, (self.image_a, self.image_b), strict=True)
        compared = []
        for name, prompt, image in runs:
            compared.append({"name": name, "prompt": prompt, "size": image.size})
        told = {"runs": compared, "settings": self.settings, "words": self.words}
        return {"format": FORMAT, **plain(told)}

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write ``diff.html`` (the page), ``diff.png`` (the sheet) and ``run.json`` (the numbers).
        Return the folder.

        Raises:
            FileExistsError: ``folder`` exists and ``force`` is not set, or it holds something other
                than a comparison.
        """
        with new_folder(folder, force=force, kind="diff") as temporary:
            (temporary / "diff.html").write_bytes(self.page())
            self.sheet().save(temporary / "diff.png")
            (temporary / "run.json").write_bytes(to_json(self.to_dict()))
        return Path(folder)


def _add(maps: list[Heatmap], heatmap: Heatmap | None) -> int | None:
    """Append a map and return its number."""
    if heatmap is None:
        return None
    maps.append(heatmap)
    return len(maps) - 1


def _short(value: object) -> str:
    """Format a setting: a long list as its ends, None as a dash, a mapping as "steps all"."""
    if isinstance(value, Mapping):
        value = [f"{name} {_short(entry)}" for name, entry in value.items() if entry is not None]
    elif isinstance(value, list) and len(value) > 4:
        return f"{value[0]} … {value[-1]} ({len(value)})"
    if isinstance(value, list):
        value = ", ".join(map(_short, value))
    return "-" if value is None else shorter(str(value), 60)


def _blank(size: tuple[int, int], label: str, note: str = "") -> Image.Image:
    return render.caption(Image.new("RGB", size, (38, 38, 38)), label, note)
