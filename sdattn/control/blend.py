import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention import query_grid
from ..attention.device_copies import DeviceCopies
from ..errors import InvalidTypeError, InvalidValueError, refuse
from ..follow.run_part import items_of
from ..models.values import checked_part, checked_whole, whole
from ..prompts.tokens import Prompt


class LocalBlend:
    """Blend that keeps the source's latents except where some words are, in the source or in the
    target.

    The mask is where the words' maps of one resolution, spread by a 3x3 maximum, exceed
    ``threshold`` times their peak.

    Source: Hertz et al. 2022, section 3.2, "Local editing"; google/prompt-to-prompt.

    Args:
        prompts: the source and one or more targets.
        words: for each prompt a word or phrase, or a list of them: ``["cat", ["dog", "a"]]``.
        num_steps: passes of the model in the run.
        subtract: words, given likewise, whose own (unspread) mask is subtracted.
        start: part of the run after which blending begins.
        threshold: share of the peak, in [0, 1].
        grid: (rows, cols) of the layers to use (default: the stored grid nearest, in ratio, to a
            sixteenth of the latent's cells or to 16x16 if that is more).

    Raises:
        KeyError: a word that is not in its prompt.
        ValueError: another number of choices than of prompts, or a number outside [0, 1].
        TypeError: texts, or something else than prompts.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        words: Sequence[str | Sequence[str]],
        num_steps: int,
        *,
        subtract: Sequence[str | Sequence[str]] | None = None,
        start: float = 0.2,
        threshold: float = 0.3,
        grid: tuple[int, int] | None = None,
    ):
        self.prompts = prompts = checked_read(prompts, type(self).__name__)
        if grid is not None and len([side for side in items_of(grid) if whole(side)]) != 2:
            raise refuse("grid", grid, "(rows, cols) in cells")
        self.alpha = DeviceCopies(_chosen_columns("words", prompts, words))
        self.subtracted = None
        if subtract is not None:
            self.subtracted = DeviceCopies(_chosen_columns("subtract", prompts, subtract))
        self.start = round(checked_part("start", start) * checked_whole("num_steps", num_steps))
        self.threshold = checked_part("threshold", threshold)
        self.grid = grid
        self.counter = 0

    def __call__(self, x_t: Tensor, attention_store: Mapping[str, list[Tensor]]) -> Tensor:
        """Blend latents ``[prompts, C, rows, cols]`` by the summed maps of a store; raise
        ValueError if no layer of the grid is stored."""
        self.counter += 1
        n_prompts = len(self.alpha.own)
        if len(x_t) != n_prompts:
            raise InvalidValueError(
                f"LocalBlend was made for {n_prompts} prompts and the batch has {len(x_t)} images. "
                "Use num_images_per_prompt=1."
            )
        if self.counter <= self.start:
            return x_t
        size = (x_t.shape[-2], x_t.shape[-1])
        maps = self._maps(attention_store, size)  # [prompts, layers*heads, rows, cols, T]
        # Where the words are, minus where the subtracted words are, whose mask is not spread.
        mask = self._mask(maps, self.alpha, size, spread=True)
        if self.subtracted is not None:
            mask &= ~self._mask(maps, self.subtracted, size, spread=False)
        # Outside of it every target gets the source's latents.
        return torch.where(mask, x_t, x_t[:1])

    def _maps(self, store: Mapping[str, list[Tensor]], size: tuple[int, int]) -> Tensor:
        by_grid: dict[tuple[int, ...], list[Tensor]] = {}
        for key, maps in store.items():
            for m in maps if key.endswith("_cross") else ():
                # Eight halvings are more than any UNet has; a coarser grid is never reached.
                by_grid.setdefault(query_grid(m.shape[1], size, n_levels=8), []).append(m)
        grid: tuple[int, ...] | None = self.grid
        if grid is None and by_grid:
            cells = max(16**2, size[0] * size[1] // 16)
            grid = min(by_grid, key=lambda g: abs(math.log(g[0] * g[1] / cells)))
        if grid not in by_grid:
            raise InvalidValueError(
                f"LocalBlend asked for maps of {grid or 'any grid'}, and the store holds "
                f"{sorted(by_grid) or 'none'}. Register the controller that holds it, or choose "
                "another grid."
            )
        prompts = len(self.alpha.own)
        parts = [m.unflatten(0, (prompts, -1)).unflatten(2, grid) for m in by_grid[grid]]
        return torch.cat(parts, dim=1)

    def _mask(
        self, maps: Tensor, alpha: DeviceCopies, size: tuple[int, int], spread: bool
    ) -> Tensor:
        chosen = alpha.on(maps.device, maps.dtype)[:, None, None, None]
        # The sum over a word's columns, the mean over heads and layers.
        heat = (maps * chosen).sum(-1).mean(1, keepdim=True)  # [prompts, 1, rows, cols]
        if spread:
            heat = F.max_pool2d(heat, 3, stride=1, padding=1)
        heat = F.interpolate(heat, size=size)
        peak = heat.amax((2, 3), keepdim=True).clamp(min=0)  # a word may have a negative weight
        mask = heat > self.threshold * peak
        return mask | mask[:1]  # where either image has the words


def checked_read(prompts: object, who: str) -> list[Prompt]:
    """Return prompts as a list; raise TypeError if one is no :class:`sdattn.Prompt`."""
    given = items_of(prompts)
    read = [prompt for prompt in given if isinstance(prompt, Prompt)]
    if not read or len(read) < len(given):
        raise InvalidTypeError(
            f"{who} got {prompts!r}, which do not say their tokens. Pass "
            "sdattn.read_prompts(pipe, [source, target])."
        )
    return read


def _chosen_columns(
    name: str, prompts: Sequence[Prompt], words: Sequence[str | Sequence[str]]
) -> Tensor:
    """Return 1 at the columns of each prompt's words, 0 elsewhere: float32 ``[prompts, T]``."""
    is_list = isinstance(words, Sequence) and not isinstance(words, (str, bytes))
    if not is_list or len(words) != len(prompts) or not all(map(_are_words, words)):
        text = f"the words of each of the {len(prompts)} prompts, [['cat'], ['dog']] say"
        raise refuse(name, words, text)
    chosen = torch.zeros(len(prompts), len(prompts[0].tokens))
    for i, (prompt, some) in enumerate(zip(prompts, words, strict=True)):
        for word in [some] if isinstance(some, str) else some:
            for columns in prompt.find(word):
                chosen[i, list(columns)] = 1
    return chosen


def _are_words(choice: object) -> bool:
    """Check for a word, or a list of some."""
    if isinstance(choice, str) or not isinstance(choice, Collection):
        return isinstance(choice, str)
    return all(isinstance(word, str) for word in choice)
