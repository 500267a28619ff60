from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..attention.core import grid_text
from ..errors import InvalidValueError, NotFoundError, refuse
from ..files.tables import labelled
from ..files.terminal import shorter
from ..files.videos import key_frames
from ..models.values import whole
from ..prompts.tokens import Prompt, Word
from ..prompts.words import is_content_word, name_things
from .arrival import Arrival, Calibration, arrivals, mean_strength
from .heatmap import Heatmap, check_frame
from .layermaps import resize_maps
from .masks import label_map, mask_of, smooth
from .presets import PRESETS, Preset
from .statistics import WordStatistics, to_dataframe

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from .heatmap import Pixels


class Heatmaps(Mapping[str, Heatmap]):
    """The heatmaps of one image, a mapping from the prompt's words to :class:`Heatmap`.

        hm["cat"]              a word; all its occurrences together
        hm["a cat"]            a phrase: words that follow each other
        hm.find("a")           each occurrence on its own, a tuple
        hm["<sos>"], hm["<eos>"], hm["<pad>"], hm["<template>"]
        hm["<image 1>"]        first column of the image prompts (IP-Adapter);
                               an adapter's columns sum to 1
        hm["<characters 2:5>"] a part of a word: all tokens with one of these characters
        hm["<columns 3:5>"]    token columns 3 and 4
        hm[3]                  token column 3

    As in any mapping, ``hm.values()`` is a method and gives the :class:`Heatmap` of each word; the
    numbers are in ``hm.maps``, or in ``hm["cat"].map`` for one word.

    Attributes:
        prompt: the :class:`sdattn.Prompt`: words, tokens and what was cut off.
        maps: float32 ``[(frames,) rows, cols, columns kept]``, with ``frames`` as in
            :class:`Heatmap`.
        preset: the preset that made them.
    """

    def __init__(
        self,
        prompt: Prompt,
        maps: Tensor,
        columns: Sequence[int] | None = None,
        *,
        preset: Preset = PRESETS["default"],
        frames: Sequence[int] | None = None,
        top: float | None = None,
    ):
        kept = tuple(range(len(prompt.tokens))) if columns is None else tuple(columns)
        if len(kept) != maps.shape[-1]:
            raise InvalidValueError(
                f"The maps have {maps.shape[-1]} token columns and the prompt {prompt.text!r} "
                f"has {len(kept)}. Pass the prompt and the tokenizer of this run."
            )
        self.prompt = prompt
        self.maps = maps
        self.preset = preset
        self.frames = None if frames is None else tuple(frames)
        self._place = {column: i for i, column in enumerate(kept)}
        self._top = top  # the video's, if these are one of its frames

    def __repr__(self) -> str:
        grid = grid_text(self.maps.shape[:-1])
        words = f"{len(self.held)} word{'' if len(self.held) == 1 else 's'}"
        prompt = shorter(self.prompt.text, 60)
        return f"Heatmaps({words} of {prompt!r}, {grid}, preset {self.preset.title})"

    @property
    def columns(self) -> tuple[int, ...]:
        """The token columns that were captured, in the order of the last axis of ``maps``."""
        return tuple(self._place)

    @property
    def words(self) -> tuple[str, ...]:
        """The words that have a map, in prompt order, repeats included."""
        return tuple(word.text for word in self.held)

    @property
    def held(self) -> list[Word]:
        """The words of :meth:`occurrences`."""
        return [word for word in self.prompt.seen if self._holds(word.columns)]

    @property
    def encoders(self) -> dict[str, Heatmaps]:
        """The heatmaps of the columns of each text encoder that has some of its own: ``"CLIP"`` and
        ``"T5"`` for SD3, ``hm.encoders["T5"]["cat"]``; empty if all columns are of one encoder."""
        found = {}
        for name, (prompt, columns) in self.prompt.by_encoder().items():
            own = self.keep([column for column in columns if column in self._place])
            own.prompt = prompt
            found[name] = own
        return found

    def find(self, phrase: str) -> tuple[Heatmap, ...]:
        """Return one heatmap for each occurrence of a word or phrase, in prompt order; raise
        KeyError if it is not in the prompt, was cut off, or was not captured."""
        found = self.prompt.find(phrase)
        held = [columns for columns in found if self._holds(columns)]
        if not held:
            raise NotFoundError(
                f"{phrase!r} is in the prompt, but its token columns {found} were not captured. "
                f"Captured: {sorted(self._place)}."
            )
        label = self.prompt.label(phrase)
        return tuple(self._of(label, columns) for columns in held)

    def token(self, column: int) -> Heatmap:
        """Return the heatmap of one token column; raise KeyError if it does not exist or was not
        captured."""
        number = whole(column)
        if number is None or not self._holds((number,)):
            raise NotFoundError(
                f"No token column {column}. Captured: {min(self._place)} to {max(self._place)}, "
                f"{len(self._place)} in all."
            )
        return self._of(self.prompt.tokens[number].text, (number,))

    def __getitem__(self, key: str | int) -> Heatmap:
        if not isinstance(key, str):
            return self.token(key)
        found = self.find(key)
        columns = set[int]().union(*(heatmap.columns for heatmap in found))
        return self._of(found[0].label, tuple(sorted(columns)))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(self.words))

    def __len__(self) -> int:
        return len(set(self.words))

    def occurrences(self) -> list[Heatmap]:
        """Return one heatmap for each word that has a map, in prompt order, repeats included."""
        return [self._of(word.text, word.columns) for word in self.held]

    @cached_property
    def top(self) -> float:
        """The highest value in the map of a content word (of any word if there are none): full
        strength."""
        if self._top is not None:
            return self._top
        held = self.held
        content = [word for word in held if is_content_word(word.text)] or held
        peaks = [self._values(word.columns).detach().max() for word in content]
        return max(map(float, peaks), default=0.0)

    def frame(self, number: int) -> Heatmaps:
        """Return the heatmaps of one frame, as :meth:`Heatmap.frame` does."""
        check_frame(len(self.maps) if self.maps.ndim == 4 else 0, number, repr(self))
        maps = self.maps[number]
        return Heatmaps(self.prompt, maps, self.columns, preset=self.preset, top=self.top)

    def keep(self, columns: Sequence[int]) -> Heatmaps:
        """Return the heatmaps of some token columns; raise KeyError for one that there is no map
        of."""
        missing = [column for column in columns if column not in self._place]
        if missing:
            raise NotFoundError(
                f"There are no maps of token columns {missing}. There are: {self.columns}."
            )
        maps = self.maps[..., [self._place[column] for column in columns]]
        kept = Heatmaps(self.prompt, maps, columns, preset=self.preset, frames=self.frames)
        kept._top = self._top
        return kept

    def segment(
        self,
        words: Sequence[str],
        size: Pixels | None = None,
        threshold: float | Literal["otsu"] | None = None,
        *,
        sigma: float = 0.0,
        **options: Any,
    ) -> Tensor:
        """Return which of several words each pixel belongs to; raise KeyError for an unknown word.
        It belongs to the word whose mask holds it and, if several do, whose map is highest there
        relative to its own range.

        Args:
            words: words or phrases, each with all its occurrences.
            size: (height, width) in pixels, or the image (default: the cells of
                :attr:`Heatmap.map`).
            threshold, sigma, options: as for :meth:`Heatmap.mask`.

        Returns:
            int64 ``[(frames,) height, width]``: 0 for no word, else its number in ``words``, from
            1.
        """
        if isinstance(words, str) or not words:
            raise refuse("words", words, "a list of words and phrases")
        maps = [self[word] for word in words]
        values = [smooth(heatmap.values, sigma) for heatmap in maps]
        if size is not None:
            pixels = maps[0].pixels(size)
            values = [resize_maps(one[None], pixels)[0] for one in values]
        masks = [mask_of(seen, threshold, **options) for seen in values]
        return label_map(torch.stack(values), torch.stack(masks))

    def score(self, words: Sequence[str] | None = None) -> float:
        """Return how well the words arrived in the image, higher if more of them did, each once.

        It is the mean over their maps of ``ln(peak) - rival``, where the rival is the highest value
        away from the peak, as a share of the peak: see :func:`sdattn.maps.arrival.rival_of`.
        Compare it between seeds of one prompt, in the same model and preset, only.

        Args:
            words: words or phrases, each occurrence counts (default: those that likely name a
                thing, see :func:`sdattn.prompts.words.name_things`; if there are none, all content
                words).

        Raises:
            KeyError: a word has no map.
            ValueError: an empty list, or by default a prompt without content words.
        """
        return mean_strength(self._of_words(words))

    def missing(
        self,
        words: Sequence[str] | None = None,
        *,
        calibration: Calibration | str | Path | None = None,
    ) -> list[Arrival]:
        """Return the words that probably did not arrive in the image, the weakest first: those
        whose peak hardly leads over the other judged words there, see
        :func:`sdattn.maps.arrival.leads`. A single word is never among them.

        Args:
            words: as for :meth:`score`.
            calibration: threshold for this model, or its file; words below it are ``"missing"``.
                Without one those below :data:`sdattn.maps.arrival.WEAK` are ``"weak"``.

        Raises:
            KeyError, ValueError: as :meth:`score` does; or the calibration is for another preset.
            FileNotFoundError: there is no such file.
        """
        if isinstance(calibration, (str, Path)):
            calibration = Calibration.read(calibration)
        if calibration is not None:
            calibration.check(self.preset.title)
        content = [one for one in self.occurrences() if is_content_word(one.label)]
        return arrivals(self._of_words(words), content, calibration)

    def judged(self) -> list[Heatmap]:
        """Return the maps of the words that :meth:`score` judges by default; empty if none can
        be."""
        seen = self.prompt.seen
        things = [seen[i] for i in name_things([word.text for word in seen])]
        content = [word for word in seen if is_content_word(word.text)]
        for chosen in (things, content):
            if held := [word for word in chosen if self._holds(word.columns)]:
                return [self._of(word.text, word.columns) for word in held]
        return []

    def _of_words(self, words: Sequence[str] | None) -> list[Heatmap]:
        """Return a map for each occurrence of some words, or :meth:`judged`."""
        if words is None:
            if not (maps := self.judged()):
                raise InvalidValueError(
                    f"No word of {self.prompt.text!r} that has a map names a thing. Pass `words`."
                )
            return maps
        if isinstance(words, str) or not words:
            raise refuse("words", words, "a list of words and phrases, or None")
        return [one for word in words for one in self.find(word)]

    def statistics(self) -> list[WordStatistics]:
        """Return the statistics of :meth:`occurrences`; raise as :meth:`WordStatistics.of` does."""
        return [heatmap.statistics() for heatmap in self.occurrences()]

    def to_dataframe(self) -> pd.DataFrame:
        """Return a pandas table of :meth:`statistics`; raise ValueError for values that are not
        finite.

        Columns, see :class:`sdattn.maps.statistics.WordStatistics`: ``word``, ``columns``,
        ``peak``, ``mean``, ``mass``, ``centre_row``, ``centre_col``, ``area``, ``entropy``.
        Centres, from the top and from the left, and the area are fractions of the image. None
        becomes NaN.
        """
        rows = ({**found.flat(), "columns": found.columns} for found in self.statistics())
        return to_dataframe(rows, ("word", "columns"))

    def to_xarray(self) -> xr.DataArray:
        """Return the words' maps as an xarray array, float32 ``(word, [frame,] row, col)``.

        ``sel(word="a")`` gives every "a" of the prompt, along ``word`` if there are several.
        ``row`` and ``col`` are the centres of the cells as fractions of the image, from the top and
        from the left; pass ``yincrease=False`` to plot it upright. The attributes name prompt,
        preset and unit.
        """
        maps = self.occurrences()
        values = np.zeros((len(maps), *self.maps.shape[:-1]), np.float32)
        for i, heatmap in enumerate(maps):
            values[i] = heatmap.values.detach().numpy()
        axes: dict[str, Any] = {"word": [heatmap.label for heatmap in maps]}
        if self.maps.ndim == 4:
            axes["frame"] = self.frames or range(len(self.maps))
        axes |= {"row": (0, 1), "col": (0, 1)}
        about = {"prompt": self.prompt.text, "preset": self.preset.name, "units": self.preset.unit}
        return labelled(values, axes, **about)

    def _repr_html_(self) -> str:
        from .notebook import stills, video_stills  # pillow is loaded only when something is drawn

        maps = self.occurrences()
        if self.maps.ndim == 4:
            numbers = self.frames or range(len(self.maps))
            shown = [(f"latent frame {numbers[i]}", i, None) for i in key_frames(len(numbers))]
            found = video_stills(maps, shown)
        else:
            found = stills(maps)
        return f"<p><bdi>{escape(self.prompt.text)}</bdi></p>{found}"

    def _holds(self, columns: Sequence[int]) -> bool:
        return all(column in self._place for column in columns)

    def _of(self, label: str, columns: tuple[int, ...]) -> Heatmap:
        values = self._values(columns)
        ends = None
        if self.preset.refine:  # such a map is nowhere 0 and would tint the whole image
            ranked = values.detach().flatten().sort().values
            peak = float(ranked[-1])
            ends = min(float(ranked[len(ranked) // 4]), peak / 2), peak
        return Heatmap(label, values, columns, top=self.top, frames=self.frames, ends=ends)

    def _values(self, columns: tuple[int, ...]) -> Tensor:
        maps = self.maps[..., [self._place[column] for column in columns]]
        return maps.sum(-1) if self.preset.words == "sum" else maps.mean(-1)
