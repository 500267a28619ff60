"""Maps of layers and tokens -> one heatmap for each word of each image.

heatmaps(store, tokenizer, prompt)  ->  [Heatmaps, ...], one an image
Heatmaps["red circle"]              ->  Heatmap: values [rows, cols], overlay(), mask()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .chunks import read_long_prompt
from .layers import TEXT_KINDS
from .maps import CaptureError, MapStore
from .prompts import read_prompts
from .tokens import Prompt, Token, read_prompt

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap:
    """Where one word, phrase or token went in one image.

    Attributes:
        label: what it shows, as written in the prompt.
        values: float32 ``[rows, cols]`` in latent cells, row 0 at the top, in [0, 1]: the share of
            a cell's attention that goes to the columns. The columns of a prompt sum to 1 in
            cross-attention, and to less in joint attention, where the rest goes to the picture;
            those of an image prompt sum to 1 by themselves.
        columns: the token columns that were added up.
    """

    label: str
    values: Tensor
    columns: tuple[int, ...]

    def __repr__(self) -> str:
        rows, cols = self.values.shape
        low, high = self.range
        return f"Heatmap({self.label!r}, {rows}x{cols}, {low:.2g} to {high:.2g})"

    @property
    def range(self) -> tuple[float, float]:
        """(smallest, largest) value, a probability."""
        return float(self.values.min()), float(self.values.max())

    def resize(self, size: tuple[int, int]) -> Tensor:
        """The values at ``size`` = (height, width) in pixels: float32, bilinear between cells."""
        if min(size) < 1:
            raise ValueError(f"Asked for a size of {size}; pass (height, width) in pixels.")
        return resize_maps(self.values[None], size)[0]

    def mask(self, size: tuple[int, int] | None = None, threshold: float = 0.5) -> Tensor:
        """Where the map reaches ``threshold`` times its largest value.

        Args:
            size: (height, width) in pixels; latent cells by default.
            threshold: share of the largest value, in [0, 1].

        Returns:
            bool ``[height, width]``; all False for a map of zeros.
        """
        if not 0 <= threshold <= 1:
            raise ValueError(
                f"threshold={threshold}: pass a share of the largest value, from 0 to 1."
            )
        values = self.values if size is None else self.resize(size)
        peak = values.max()
        return (values >= threshold * peak) & (peak > 0)

    def overlay(self, image: Image.Image, **options: Any) -> Image.Image:
        """The map in colour over the image, see :func:`sdattn.render.overlay`."""
        from .render import overlay  # pillow is loaded only when something is drawn

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
        prompt: the :class:`sdattn.tokens.Prompt`: words, tokens and what was cut off.
        maps: float32 ``[rows, cols, columns kept]``.
    """

    def __init__(self, prompt: Prompt, maps: Tensor, columns: Sequence[int] | None = None):
        kept = tuple(range(len(prompt.tokens))) if columns is None else tuple(columns)
        if len(kept) != maps.shape[-1]:
            raise ValueError(
                f"The maps have {maps.shape[-1]} token columns and the prompt {prompt.text!r} "
                f"has {len(kept)}. Pass the prompt and the tokenizer of this very run."
            )
        self.prompt = prompt
        self.maps = maps
        self._place = {column: i for i, column in enumerate(kept)}

    @property
    def columns(self) -> tuple[int, ...]:
        """The token columns that were captured, in the order of the last axis of ``maps``."""
        return tuple(self._place)

    @property
    def words(self) -> tuple[str, ...]:
        """The words that have a map, in prompt order, repeats included."""
        return tuple(word.text for word in self.prompt.seen if self._holds(word.columns))

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
        return tuple(self._sum(phrase, columns) for columns in held)

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
        return self._sum(self.prompt.tokens[column].text, (column,))

    def __getitem__(self, key: str | int) -> Heatmap:
        if isinstance(key, int):
            return self.token(key)
        found = self.find(key)
        columns = {column for one in found for column in one.columns}
        return self._sum(key, tuple(sorted(columns)))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(self.words))

    def __len__(self) -> int:
        return len(set(self.words))

    def occurrences(self) -> list[Heatmap]:
        """One heatmap for each word that has a map, in prompt order, repeats on their own."""
        words = [word for word in self.prompt.seen if self._holds(word.columns)]
        return [self._sum(word.text, word.columns) for word in words]

    def _holds(self, columns: Sequence[int]) -> bool:
        return all(column in self._place for column in columns)

    def _sum(self, label: str, columns: tuple[int, ...]) -> Heatmap:
        places = [self._place[column] for column in columns]
        return Heatmap(label, self.maps[..., places].sum(-1), columns)


def heatmaps(
    store: MapStore,
    tokenizer: Any,
    prompt: str | Mapping[str, Sequence[int]] | Prompt | Sequence[Any],
    **options: Any,
) -> list[Heatmaps]:
    """The heatmaps of each image of a captured run.

    All layers of the store that see the text are averaged over steps and heads, brought to the
    finest grid among them (bilinear, which keeps the columns' sum) and averaged.

    Args:
        store: what ``capture()`` gave.
        tokenizer: the pipeline; or its tokenizer, where the text is that tokenizer's alone (Stable
            Diffusion 1, 2 and XL).
        prompt: the prompt, or one a prompt of the run, in its order. With several images a prompt
            the images of one prompt follow each other, as the pipelines put them; with
            ``branch="both"`` the negative prompts come first. Where text states were passed to the
            pipeline in place of a prompt: labels, ``{"cat": [2], "red dog": [4, 5]}``.
        options: of the pipeline's call that change what the text encoder reads, see
            :func:`sdattn.read_prompts`.

    Returns:
        One :class:`Heatmaps` an image.

    Raises:
        CaptureError: the store holds no layer that sees the text.
        ValueError: the number of prompts does not fit the number of images, or the number of
            token columns does not fit the tokenizer.
    """
    prompts = [prompt] if isinstance(prompt, (str, Mapping, Prompt)) else list(prompt or [])
    each = _images_each(store, len(prompts))
    branches = store.branches[::each]
    read: list[Prompt | None] = [None] * len(prompts)
    for branch in dict.fromkeys(branches):  # a batch is read as a whole: it may share its length
        places = [i for i, one in enumerate(branches) if one == branch]
        texts = [prompts[i] for i in places]
        negative = branch == "unconditional"
        for i, one in zip(places, _read(store, tokenizer, texts, negative, options), strict=True):
            read[i] = one
    return heatmaps_of(store, [one for one in read if one is not None])


def _read(
    store: MapStore, tokenizer: Any, texts: list[Any], negative: bool, options: Mapping[str, Any]
) -> list[Prompt]:
    columns = store.n_text or 0
    is_tokenizer = hasattr(tokenizer, "convert_ids_to_tokens")
    if not is_tokenizer or not all(isinstance(one, str) for one in texts):
        return read_prompts(tokenizer, texts, columns, negative=negative, **options)
    most = tokenizer.model_max_length
    if columns > most:
        return [read_long_prompt(tokenizer, one, columns, **options) for one in texts]
    # CLIP is filled up whatever the prompt, others to a length that the pipeline chooses
    length = most if "CLIP" in type(tokenizer).__name__ else columns
    return [read_prompt(tokenizer, one, max_length=length) for one in texts]


def _images_each(store: MapStore, prompts: int) -> int:
    each, rest = divmod(store.images, max(prompts, 1))
    if rest or not each or not prompts:
        raise ValueError(
            f"{prompts} prompt(s) do not fit {store.images} image(s). Pass one prompt for all "
            "images, or one for each prompt of the run, in order."
        )
    return each


def heatmaps_of(store: MapStore, prompts: Sequence[Prompt]) -> list[Heatmaps]:
    """:func:`heatmaps` for prompts that have been read."""
    values = average_layers(cross_maps(store))
    each = _images_each(store, len(prompts))
    for one in prompts:
        if len(one.tokens) != store.n_text:
            raise ValueError(
                f"The attention has {store.n_text} token columns of text, and the tokenizer made "
                f"{len(one.tokens)} of the prompt {one.text!r}. Pass the pipeline that ran, or its "
                "own tokenizer."
            )
    shown = [_with_images(one, (store.n_keys or 0) - len(one.tokens)) for one in prompts]
    return [Heatmaps(shown[i // each], maps, store.tokens) for i, maps in enumerate(values)]


def _with_images(prompt: Prompt, columns: int) -> Prompt:
    """The prompt with the columns of image prompts behind its own."""
    names = [f"<image {number}>" for number in range(1, columns + 1)]
    images = tuple(Token(-1, name, 0, 0, name) for name in names)
    return replace(prompt, tokens=prompt.tokens + images)


def cross_maps(store: MapStore) -> dict[str, Tensor]:
    """The store's layers that see the text, each averaged over steps and heads.

    Returns:
        layer name to float32 ``[images, rows, cols, tokens]`` on the CPU.
    """
    names = [layer.name for layer in store.layers if layer.kind in TEXT_KINDS]
    found = {name: store.maps[name].detach().float().cpu() for name in names if name in store.maps}
    return {
        name: one.flatten(1, -4).mean(1) if one.ndim > 4 else one for name, one in found.items()
    }


def average_layers(layers: Mapping[str, Tensor]) -> Tensor:
    """The mean over layers, at the finest grid among them.

    Args:
        layers: layer name to ``[images, rows, cols, tokens]``.

    Returns:
        ``[images, rows, cols, tokens]``.

    Raises:
        CaptureError: there is no layer.
    """
    maps = list(layers.values())
    if not maps:
        raise CaptureError(
            "There are no maps of cross- or joint attention, and only those have token columns. "
            'Capture with kinds=("cross", "joint") and run the pipeline inside the with block.'
        )
    finest = max((m.shape[1:3] for m in maps), key=lambda grid: grid[0] * grid[1])
    by_grid: dict[tuple[int, int], list[Tensor]] = {}
    for m in maps:
        by_grid.setdefault((m.shape[1], m.shape[2]), []).append(m)
    total = sum(
        _resize_last(torch.stack(group).sum(0), (finest[0], finest[1]))
        for group in by_grid.values()  # one resize a resolution: it is linear
    )
    return torch.as_tensor(total) / len(maps)


def _resize_last(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize ``[images, rows, cols, tokens]``."""
    return resize_maps(maps.permute(0, 3, 1, 2), size).permute(0, 2, 3, 1)


def resize_maps(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """``[..., rows, cols]`` at ``size`` = (rows, cols): bilinear, cell centres aligned."""
    batched = maps.reshape(-1, 1, *maps.shape[-2:])
    resized = torch.nn.functional.interpolate(
        batched, size=size, mode="bilinear", align_corners=False
    )
    return resized.reshape(*maps.shape[:-2], *size)
