"""Similarity of the attention's outputs for text and image, in place of attention.

Joint attention makes an output for each token and each cell. Before the output projection they lie
in one space, so their product says how similar a cell has become to a token (`OutputSpace`). Or a
cell is compared with the cell of its frame that matches a token best (`GramCol`).

Source: Helbling et al. 2025, "ConceptAttention" (arXiv:2502.04320), whose concepts are tokens next
to the prompt; here they are the prompt's own, or another text's (:mod:`sdattn.look.other_text`).

GramCol and IMAP: for a head, with ``q`` and ``k`` as they are handed to torch's attention, ``o``
its output before the output projection, ``p`` a cell of frame ``f`` and ``t`` a token of the text:

    p*(f, t) = argmax_p q[f, p] . k[t]        the cell of the frame that stands for the token
    M[f, p, t] = o[f, p*(f, t)] . o[f, p]     a column of the Gram matrix of the frame's outputs
    z[f, p, t] = (M - mean of M over words) / (standard deviation over words + 1e-6)

GramCol is the mean of ``z`` over all heads of a layer, IMAP over the ``BEST`` heads whose outputs
tell the frames apart best, by the Calinski-Harabasz index of ``o`` with the frames as clusters:
``(sum_f P |m_f - m|^2 / (F - 1)) / (sum_f,p |o[f, p] - m_f|^2 / (F P - F))``.

Source: Jun et al. 2026, "I'm a Map! Interpretable Motion-Attentive Maps" (arXiv:2603.02919), for
the argmax, the column, z-scores over words and the five heads. From the authors' code
(youngjun-jun/IMAP): the argmax and the heads are chosen anew in each call of each layer; the
deviation is a sample's (divided by one less than the number of words), plus 1e-6; z-scores come
before any mean; calls and layers are averaged. There a word is, by default, the first token of a
text of its own in a stream next to the prompt's; GramCol is the sum over heads, and the layers of
both are listed for each model. Our reading: the words are the prompt's own, which that code knows
as well, with padding; z-scores are over the columns that ``capture(among=)`` names, for which the
presets name the tokens of the prompt's words alone; a word of several tokens is their mean; all
layers are read. For Wan that code takes the queries and outputs of cross-attention, which are
mixtures of the text's values; that is not done here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention.calls import Rows, chosen_rows
from ..attention.device_copies import DeviceCopies
from ..errors import CaptureError
from ..models.denoiser_call import Size
from .attended import PART, Attended, Columns, chosen_columns

Space = Literal["attention", "output", "gramcol", "imap"]
Z_SCORES: tuple[Space, ...] = ("gramcol", "imap")  # whose maps compare words with each other
BEST = 5  # heads of IMAP
EPSILON = 1e-6


class OutputSpace(Attended):
    """The product ``o_t . o_x / d`` for each head, of any sign, of cells ``[B, heads, N, d]`` and
    tokens ``[B, heads, T, d]`` before the output projection. The mean over heads does not grow with
    their number."""

    def __init__(self, image: Tensor, text: Tensor):
        batch, heads, cells, _ = image.shape
        super().__init__(batch, heads, cells, text.shape[2])
        self.image, self.text = image, text

    def of_rows(self, rows: Rows) -> Attended:
        return OutputSpace(chosen_rows(self.image, rows), chosen_rows(self.text, rows))

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        text = chosen_columns(self.text[:, heads].float(), columns, dim=2)
        return self.image[:, heads].float() @ text.mT / text.shape[-1]

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        text = chosen_columns(self.text, columns, dim=2)
        # all heads in one product
        cells, tokens = (part.transpose(1, 2).flatten(2).float() for part in (self.image, text))
        scale = 1 / text.shape[-1]
        if total is None:
            return cells @ tokens.mT * scale
        return total.baddbmm_(cells, tokens.mT, alpha=scale)


class GramCol(Attended):
    """``z`` of each head, float32 of any sign; 0 if a cell is equally similar to all words.

    Args:
        query: queries of the image, ``[B, heads, N, d]``, frame by frame.
        key: keys of the text, ``[B, heads, T, d]``.
        output: outputs of the image before the output projection, ``[B, heads, N, d]``.
        frames: F, which divides ``N``; 1 for an image.
        best: number of heads to use, the ones that tell the frames apart best; they are ``z`` times
            ``heads / best``, the others 0. None for all heads.
        kept: bool ``[B, 1, 1, T]``, keys that the z-score is over, at least two; other keys are 0.
            None for all.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        output: Tensor,
        frames: int = 1,
        best: int | None = None,
        kept: DeviceCopies | None = None,
    ):
        batch, heads, cells, _ = query.shape
        super().__init__(batch, heads, cells, key.shape[2])
        self.query, self.key, self.output = query, key, output
        self.frames, self.best, self.kept = frames, best, kept
        self._compared: Sequence[int] = range(self.keys)  # in order, of any image

    def of_rows(self, rows: Rows) -> Attended:
        query, key = chosen_rows(self.query, rows), chosen_rows(self.key, rows)
        output, kept = chosen_rows(self.output, rows), self.kept
        if kept is not None:
            kept = DeviceCopies(chosen_rows(kept.on(self.key.device), rows))
        return GramCol(query, key, output, self.frames, self.best, kept)

    def among(self, kept: DeviceCopies, columns: Sequence[int]) -> Attended:
        chosen = copy.copy(self)
        chosen.kept, chosen._compared = kept, columns
        return chosen

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        found = self._scores(heads)  # [B, heads, N, compared]
        if self.best is not None:
            found = found * self._weights[:, heads, None, None]
        asked, compared = range(self.keys) if columns is None else columns, self._compared
        if list(asked) == list(compared):
            return found
        place = {column: i for i, column in enumerate(compared)}
        found = pad(found, (0, 1))  # zeros for the others
        return chosen_columns(found, [place.get(column, len(compared)) for column in asked])

    def _scores(self, heads: slice) -> Tensor:
        columns = None if len(self._compared) == self.keys else self._compared
        grid = self.frames, -1
        query = self.query[:, heads].float().unflatten(2, grid)  # [B, heads, F, P, d]
        output = self.output[:, heads].float().unflatten(2, grid)
        key = chosen_columns(self.key[:, heads].float(), columns, dim=2)[:, :, None]
        peaks = (query @ key.mT).argmax(3)  # [B, heads, F, T]
        if self.kept is None:
            is_kept = torch.ones(1, 1, 1, len(self._compared), dtype=torch.bool, device=key.device)
        else:
            is_kept = chosen_columns(self.kept.on(key.device), columns)  # [B, 1, 1, T]
        kept = is_kept[..., None].float()
        number = kept.sum(3, keepdim=True).clamp_min(1)  # words
        # M is linear in o[p*], so that its mean over words is taken away there: of large products
        # that are nearly alike few digits would be left.
        found = output.take_along_dim(peaks[..., None], 3)  # [B, heads, F, T, d]
        found = (found - (found * kept).sum(3, keepdim=True) / number) * kept
        apart = output @ found.mT  # [B, heads, F, P, T]
        deviation = ((apart**2).sum(-1, keepdim=True) / (number - 1).clamp_min(1)).sqrt()
        # Where one cell stands for all words they are alike, and what is left is rounding.
        lowest = peaks.masked_fill(~is_kept, self.cells).amin(-1)
        differ = lowest < peaks.masked_fill(~is_kept, -1).amax(-1)  # [B, heads, F]
        return (apart / (deviation + EPSILON) * differ[..., None, None]).flatten(2, 3)

    @cached_property
    def _weights(self) -> Tensor:
        """Weight of each head, float32 ``[B, heads]``, with mean 1; nothing is read back."""
        assert self.best is not None
        step = max(1, PART // (self.batch * self.cells * self.output.shape[-1]))
        parts = self.output.detach().split(step, dim=1)
        found = torch.cat([separability(part, self.frames) for part in parts], dim=1)
        best = min(self.best, self.heads)
        chosen = found.topk(best, dim=1).indices
        return torch.zeros_like(found).scatter(1, chosen, self.heads / best)


def separability(output: Tensor, frames: int) -> Tensor:
    """Return the Calinski-Harabasz index of ``[B, heads, N, d]`` with frames as clusters, float32
    ``[B, heads]``: the spread of frames' means over the spread of cells around them."""
    cells = output.float().unflatten(2, (frames, -1))  # [B, heads, F, P, d]
    each, (number, of_frame) = cells.mean(3), cells.shape[2:4]
    between = of_frame * ((each - each.mean(2, keepdim=True)) ** 2).sum((2, 3))
    within = ((cells - each.unsqueeze(3)) ** 2).sum((2, 3, 4))
    within = within.clamp_min(torch.finfo(within.dtype).tiny)
    return between / within * (number * (of_frame - 1) / (number - 1))


def check_frames(space: Space, size: Size | None) -> None:
    """Raise CaptureError for ``"imap"`` if a grid (frames, rows, cols) has not two frames of
    several cells."""
    if space != "imap" or (size and len(size) == 3 and size[0] > 1 < size[1] * size[2]):
        return
    raise CaptureError(
        f"space='imap' takes the heads that tell a video's frames apart, and the grid of this run "
        f"is {size}. Draw more frames, or take space='gramcol', which takes all heads."
    )
