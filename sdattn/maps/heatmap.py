"""Where words went in one picture: as values, masks, or in colour over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..prompts.tokens import Prompt, Word
from ..prompts.words import is_content_word
from .layermaps import resize_maps
from .masks import label_map, mask_of, smooth
from .presets import PRESETS, Preset

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap:
    """Where one word, phrase or token went in one image.

    Attributes:
        label: what it shows, as written in the prompt.
        values: float32 ``[rows, cols]`` in cells of the finest attention that was read, row 0 at
            the top, >= 0. In the default preset the share of a cell's attention that goes to the
            columns, in [0, 1]: the columns of a prompt sum to 1 in cross-attention, and to less in
            joint attention, where the rest goes to the picture; those of an image prompt sum to 1
            by themselves. In presets that sum over steps, heads or layers the sum of shares; of a
            knockout how much the picture changed.
        columns: the token columns that it comes from.
        top: the value that is drawn at full strength: the highest that a content word of the same
            prompt reaches, see :attr:`Heatmaps.top`. None for the map's own highest.
    """

    label: str
    values: Tensor
    columns: tuple[int, ...]
    top: float | None = None

    def __repr__(self) -> str:
        rows, cols = self.values.shape
        low, high = self.range
        return f"Heatmap({self.label!r}, {rows}x{cols}, {low:.2g} to {high:.2g})"

    @property
    def range(self) -> tuple[float, float]:
        """(smallest, largest) value, in the unit of the values: a share of the attention, a sum of
        shares, or a change of colour."""
        return float(self.values.min()), float(self.values.max())

    def resize(self, size: tuple[int, int]) -> Tensor:
        """The values at ``size`` = (height, width) in pixels: float32, bilinear between cells."""
        if min(size) < 1:
            raise ValueError(f"Asked for a size of {size}; pass (height, width) in pixels.")
        return resize_maps(self.values[None], size)[0]

    def mask(
        self,
        size: tuple[int, int] | None = None,
        threshold: float | Literal["otsu"] | None = None,
        *,
        quantile: float | None = None,
        largest: bool = False,
        sigma: float = 0.0,
    ) -> Tensor:
        """Where the map is high.

        Args:
            size: (height, width) in pixels; the map's own cells by default.
            threshold: share of the range from the lowest value to the highest, in [0, 1], 0.5 by
                default; or ``"otsu"``, which parts the values into the two classes that differ
                most.
            quantile: in place of a threshold: the part of the cells that is left out.
            largest: only the largest connected part.
            sigma: blur the map first, by a Gaussian of so many of its cells.

        Returns:
            bool ``[height, width]``; all False for a map of one value.

        Raises:
            ValueError: a threshold, quantile or sigma that cannot be, or more than one of the
                first two.
        """
        values = smooth(self.values, sigma)
        if size is not None:
            values = replace(self, values=values).resize(size)
        return mask_of(values, threshold, quantile=quantile, largest=largest)

    def overlay(self, image: Image.Image, **options: Any) -> Image.Image:
        """The map in colour over the image, see :func:`sdattn.maps.render.overlay`.

        All words of a prompt have one scale, from 0 to ``top``: where a word has little of the
        attention the picture stays bare. ``stretch=True`` shows the shape of a weak map.
        """
        from .render import overlay  # pillow is loaded only when something is drawn

        if self.top is not None and not options.get("stretch") and options.get("scale") is None:
            options["scale"] = 0.0, self.top
        return overlay(image, self.values.numpy(), self.label, **options)


class Heatmaps(Mapping[str, Heatmap]):
    """The heatmaps of one image, a mapping from the prompt's words to :class:`Heatmap`.

        hm["circle"]           a word; where it occurs more than once, all of it together
        hm["red circle"]       a phrase: words that follow each other
        hm.find("a")           each occurrence on its own, a tuple
        hm["<sos>"], hm["<eos>"], hm["<pad>"], hm["<template>"]
        hm["<image 1>"]        the first column of the image prompts (IP-Adapter), one by one:
                               those of one adapter sum to 1, whatever its masks
        hm[3]                  token column 3

    Attributes:
        prompt: the :class:`sdattn.prompts.tokens.Prompt`: words, tokens and what was cut off.
        maps: float32 ``[rows, cols, columns kept]``.
        preset: what they were made by.
    """

    def __init__(
        self,
        prompt: Prompt,
        maps: Tensor,
        columns: Sequence[int] | None = None,
        *,
        preset: Preset = PRESETS["default"],
    ):
        kept = tuple(range(len(prompt.tokens))) if columns is None else tuple(columns)
        if len(kept) != maps.shape[-1]:
            raise ValueError(
                f"The maps have {maps.shape[-1]} token columns and the prompt {prompt.text!r} "
                f"has {len(kept)}. Pass the prompt and the tokenizer of this very run."
            )
        self.prompt = prompt
        self.maps = maps
        self.preset = preset
        self._place = {column: i for i, column in enumerate(kept)}

    @property
    def columns(self) -> tuple[int, ...]:
        """The token columns that were captured, in the order of the last axis of ``maps``."""
        return tuple(self._place)

    @property
    def words(self) -> tuple[str, ...]:
        """The words that have a map, in prompt order, repeats included."""
        return tuple(word.text for word in self._held())

    def find(self, phrase: str) -> tuple[Heatmap, ...]:
        """One heatmap for each occurrence of a word or phrase, in prompt order.

        Raises:
            KeyError: it is not in the prompt, was cut off, or its columns were not captured.
        """
        found = self.prompt.find(phrase)
        held = [columns for columns in found if self._holds(columns)]
        if not held:
            raise KeyError(
                f"{phrase!r} is in the prompt, but its token columns {found} were not captured. "
                f"Captured: {sorted(self._place)}."
            )
        return tuple(self._of(phrase, columns) for columns in held)

    def token(self, column: int) -> Heatmap:
        """The heatmap of one token column.

        Raises:
            KeyError: no such column, or it was not captured.
        """
        if not self._holds((column,)):
            raise KeyError(
                f"No token column {column}. Captured: {min(self._place)} to {max(self._place)}, "
                f"{len(self._place)} in all."
            )
        return self._of(self.prompt.tokens[column].text, (column,))

    def __getitem__(self, key: str | int) -> Heatmap:
        if not isinstance(key, str):
            return self.token(key)
        found = self.find(key)
        columns = {column for heatmap in found for column in heatmap.columns}
        return self._of(key, tuple(sorted(columns)))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(self.words))

    def __len__(self) -> int:
        return len(set(self.words))

    def occurrences(self) -> list[Heatmap]:
        """One heatmap for each word that has a map, in prompt order, repeats on their own."""
        return [self._of(word.text, word.columns) for word in self._held()]

    @cached_property
    def top(self) -> float:
        """The highest value that any content word's map reaches, of all words where none is one
        (see :func:`sdattn.prompts.words.is_content_word`): what is drawn at full strength."""
        held = self._held()
        content = [word for word in held if is_content_word(word.text)] or held
        return max((float(self._values(word.columns).max()) for word in content), default=0.0)

    def keep(self, columns: Sequence[int]) -> Heatmaps:
        """The heatmaps of some token columns only.

        Raises:
            KeyError: one that was not captured, or that the preset leaves out.
        """
        if missing := [column for column in columns if not self._holds((column,))]:
            raise KeyError(
                f"There are no maps of token columns {missing}. There are: {self.columns}."
            )
        maps = self.maps[..., [self._place[column] for column in columns]]
        return Heatmaps(self.prompt, maps, columns, preset=self.preset)

    def segment(
        self,
        words: Sequence[str],
        size: tuple[int, int] | None = None,
        threshold: float | Literal["otsu"] | None = None,
        *,
        sigma: float = 0.0,
        **options: Any,
    ) -> Tensor:
        """Several words in one picture: which of them a pixel belongs to.

        A pixel belongs to the words whose masks hold it; of several to the one whose map is
        highest in its own range there.

        Args:
            words: words or phrases, each all its occurrences together; for one occurrence use
                :meth:`find` and :meth:`Heatmap.mask`.
            size: (height, width) in pixels; the maps' own cells by default.
            threshold, sigma, options: as of :meth:`Heatmap.mask`.

        Returns:
            int64 ``[height, width]``: 0 for no word, else the number of the word in ``words``,
            counted from 1.

        Raises:
            KeyError: a word that is not in the prompt.
            ValueError: no words, or one text in place of a list.
        """
        if isinstance(words, str) or not words:
            raise ValueError(f"words={words!r}: pass a list of words and phrases.")
        maps = [self[word] for word in words]
        maps = [replace(hm, values=smooth(hm.values, sigma)) for hm in maps]
        masks = [hm.mask(size, threshold, **options) for hm in maps]
        values = [hm.values if size is None else hm.resize(size) for hm in maps]
        return label_map(torch.stack(values), torch.stack(masks))

    def _repr_html_(self) -> str:
        from .notebook import stills  # pillow is loaded only when something is drawn

        maps = stills(((hm.label, hm.values.numpy()) for hm in self.occurrences()), self.top)
        return f"<p><bdi>{escape(self.prompt.text)}</bdi></p>{maps}"

    def _holds(self, columns: Sequence[int]) -> bool:
        return all(column in self._place for column in columns)

    def _held(self) -> list[Word]:
        return [word for word in self.prompt.seen if self._holds(word.columns)]

    def _of(self, label: str, columns: tuple[int, ...]) -> Heatmap:
        return Heatmap(label, self._values(columns), columns, self.top)

    def _values(self, columns: tuple[int, ...]) -> Tensor:
        maps = self.maps[..., [self._place[column] for column in columns]]
        return maps.sum(-1) if self.preset.words == "sum" else maps.mean(-1)
