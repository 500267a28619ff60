"""Two runs side by side: the heatmaps of each word and their difference.

diff("outputs/a", "outputs/b")     two folders, or what load_run() or generate() returned
diff((run, 0), (run, 1))           two images of one run
comparison.sheet()                 PIL: A, B and B - A, a row a word
comparison.save("outputs/a-vs-b")  diff.png and run.json
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..files.writing import to_json
from ..maps import render
from .differences import WordDifference, choose_words, match_words
from .folder import new_folder
from .sides import RunLike, check_sides, differing_settings, names_of, read_side

FORMAT = "sdattn-diff-1"
_FEW = 12  # words; more are drawn smaller


@dataclass
class Comparison:
    """What :func:`diff` found.

    Attributes:
        names: of A and B.
        prompts: of A and B.
        image_a, image_b: the pictures.
        words: those of A in the order of its prompt, then those that only B has.
        settings: what differs between the two ``run.json``, name to (A's, B's); None where a run
            does not tell.
    """

    names: tuple[str, str]
    prompts: tuple[str, str]
    image_a: Image.Image
    image_b: Image.Image
    words: list[WordDifference]
    settings: dict[str, tuple[Any, Any]]

    def sheet(self) -> Image.Image:
        """A picture of all of it: above both pictures and where they differ, below a row a word
        with its map in A, in B, and B - A.

        Returns:
            PIL, RGB. The two maps of a word share one scale, their difference has its own around
            zero; the captions tell them. Many words stand in several columns.
        """
        a = _scaled(self.image_a, 384 if len(self.words) <= _FEW else render.SHORTEST_SIDE)
        b = self.image_b.convert("RGB").resize(a.size, Image.Resampling.BICUBIC)
        head = [render.caption(a, "A"), render.caption(b, "B"), self._pixels(a.size)]
        differ = [f"{name} {x} | {y}" for name, (x, y) in self.told_settings().items()]
        lines = {
            "A": f"{self.names[0]}: {self.prompts[0]}",
            "B": f"{self.names[1]}: {self.prompts[1]}",
            **({"A | B": ", ".join(differ)} if differ else {}),
            "B - A": "red where B has more, blue where A has more",
        }
        return render.bands(head, [_row(word, a, b) for word in self.words], lines)

    def told_settings(self) -> dict[str, tuple[str, str]]:
        """The settings that differ, but for the prompt, each in at most 60 letters."""
        differ = {name: pair for name, pair in self.settings.items() if name != "prompt"}
        return {name: (_short(a), _short(b)) for name, (a, b) in differ.items()}

    def _pixels(self, size: tuple[int, int]) -> Image.Image:
        """How far the pictures are apart, pixel by pixel."""
        label = "|B - A|"
        if self.image_a.size != self.image_b.size:
            return _blank(size, label, "pictures of two sizes")
        a, b = (np.asarray(one.convert("RGB"), dtype=float) for one in (self.image_a, self.image_b))
        apart = np.abs(b - a)
        picture = Image.fromarray(apart.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
        return render.caption(picture, label, f"mean {apart.mean():.3g} of 255")

    def to_dict(self) -> dict[str, Any]:
        """The numbers, as ``run.json`` of :meth:`save` holds them."""
        runs = zip(self.names, self.prompts, (self.image_a, self.image_b), strict=True)
        return {
            "format": FORMAT,
            "runs": [
                {"name": name, "prompt": prompt, "size": [*image.size]}
                for name, prompt, image in runs
            ],
            "settings": {name: list(pair) for name, pair in self.settings.items()},
            "words": [_numbers(word) for word in self.words],
        }

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write ``diff.png``, the sheet, and ``run.json``, the numbers. Returns the folder.

        Raises:
            FileExistsError: there is something at ``folder`` already, and no ``force``, or
                something that is no comparison's.
            OSError: the folder cannot be written.
        """
        with new_folder(folder, force=force, kind="diff") as temporary:
            self.sheet().save(temporary / "diff.png")
            (temporary / "run.json").write_bytes(to_json(self.to_dict()))
        return Path(folder)


def diff(
    a: RunLike,
    b: RunLike,
    *,
    words: Sequence[str] | None = None,
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Compare two runs word by word: of two prompts, two seeds, with a LoRA and without.

    Words are matched by their text, letter case ignored, the second "a" of one prompt with the
    second "a" of the other.

    Args:
        a, b: each a run's folder, what ``load_run`` or an item of ``open_batch`` gave, a ``Run``
            of one image, or a ``Run`` and the number of the image, ``(run, 1)``.
        words: compare these words and phrases only, in this order.
        names: what A and B are called; by default after their folders.

    Returns:
        Comparison: images, maps, differences, and the settings that differ.

    Raises:
        ValueError: pictures of different proportions, maps of different presets, maps that are not
            finite, a ``Run`` of several images without a number.
        KeyError: a word that is in neither run.
        FileNotFoundError: as by ``load_run``.

    Warns:
        UserWarning: the maps come from different layers.
    """
    if isinstance(words, str):
        raise ValueError(f"words={words!r}: pass a list of words and phrases, or None for all.")
    first, second = read_side(a), read_side(b)
    check_sides(first, second)
    maps = first.heatmaps, second.heatmaps
    found = (
        match_words(*maps)
        if words is None
        else [w for one in words for w in choose_words(*maps, one)]
    )
    return Comparison(
        names or names_of(first, second),
        (first.heatmaps.prompt.text, second.heatmaps.prompt.text),
        first.image,
        second.image,
        found,
        differing_settings(first, second),
    )


def _short(value: Any) -> str:
    """A setting in few letters: a long list is told by its ends, no setting by a dash."""
    if isinstance(value, list) and len(value) > 4:
        return f"{value[0]} … {value[-1]} ({len(value)})"
    text = "-" if value is None else " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"


def _row(word: WordDifference, image_a: Image.Image, image_b: Image.Image) -> list[Image.Image]:
    """The tiles of a word: in A, in B, and B - A."""
    ranges = [one.range for one in (word.a, word.b) if one]
    scale = min(low for low, _ in ranges), max(high for _, high in ranges)
    tiles = []
    for letter, image, one in (("A", image_a, word.a), ("B", image_b, word.b)):
        if one:
            tiles.append(render.overlay(image, one.values.numpy(), word.label, scale=scale))
        else:
            tiles.append(_blank(image.size, word.label, f"not in {letter}"))
    label = f"{word.label}: B - A"
    if word.difference is None:
        return [*tiles, _blank(image_a.size, label)]
    return [*tiles, render.signed(word.difference.numpy(), image_a.size, label)]


def _scaled(image: Image.Image, side: int) -> Image.Image:
    """RGB, in proportion, the shorter side ``side`` pixels."""
    factor = side / min(image.size)
    size = round(image.width * factor), round(image.height * factor)
    return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)


def _blank(size: tuple[int, int], label: str, note: str = "") -> Image.Image:
    return render.caption(Image.new("RGB", size, (38, 38, 38)), label, note)


def _numbers(word: WordDifference) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "word": word.label,
        "mean": [word.mean_a, word.mean_b],
        "correlation": word.correlation,
        "largest": None,
    }
    if word.difference is not None and word.largest is not None:
        value, (row, col) = word.largest
        numbers["largest"] = {"value": value, "cell": [row, col]}
        numbers["grid"] = [*word.difference.shape]
    return numbers
