"""Text columns spread along the picture's own self-attention, in the call that made both.

Cells that attend to each other belong together. Where text and picture share one softmax, the
picture's part of it is there beside the text's, so that a map can be spread at once, and no
``[N, N]`` matrix is made or kept: ``S m`` is one more attention, whose values are the maps.

Source: GoCA (arXiv:2603.06178), for two products with the picture's self-attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .attended import Attended, Columns, Rows, addend, chosen_mask, chosen_rows
from .sdpa import SdpaCall

PRODUCTS = 2


class Refined(Attended):
    """``S (S m)``: ``m`` is what the cells pay to the text, ``[N, T]``, ``S`` what they pay to each
    other, ``[N, N]``, each row of which sums to 1; both are means over the layer's heads.

    Of a single head it is ``S_h (S m)``, so that the mean over heads is the above.

    Args:
        text: what the picture's queries pay to the text.
        query: the picture's, ``[B, heads, N, d]``.
        key: the picture's, of the same shape.
        mask: None or the addend to the scores of ``S``, ``[B or 1, heads or 1, N or 1, N]``.
        scale: of these scores; None for ``1 / sqrt(d)``.
    """

    def __init__(
        self,
        text: Attended,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
    ):
        super().__init__(text.batch, text.heads, text.cells, text.keys)
        self.text, self.query, self.key = text, query, key
        self.mask, self.scale = mask, scale

    @classmethod
    def of_call(cls, call: SdpaCall, picture: slice, text: Attended) -> Refined:
        """Of one call for text and picture together, where in it the picture is, and what is known
        of the text."""
        mask = addend(call.mask)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.ndim)][..., picture]
            mask = mask if mask.shape[2] == 1 else mask[:, :, picture]
        query, key = call.query[:, :, picture], call.key[:, :, picture]
        return cls(text, query, key, mask, call.scale)

    def of(self, rows: Rows) -> Attended:
        query, key = chosen_rows(self.query, rows), chosen_rows(self.key, rows)
        return Refined(self.text.of(rows), query, key, chosen_mask(self.mask, rows), self.scale)

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        if torch.is_grad_enabled():  # add_to() has no graph
            summed = reduce(torch.add, self.text.head_sums(columns))
        else:
            summed = self.text.add_to(None, columns)
        maps = summed / self.heads
        for _ in range(PRODUCTS - 1):
            maps = self._spread(maps, slice(None)).mean(1)
        return self._spread(maps, heads)

    def _parts(self, columns: Columns) -> Iterator[Tensor]:
        # All heads at once: what each of them spreads is the mean of all.
        yield self.probs(slice(None), columns)

    def _spread(self, maps: Tensor, heads: slice) -> Tensor:
        """``[B, N, T]`` as each of some heads spreads it, ``[B, heads, N, T]``."""
        query, key = self.query[:, heads].float(), self.key[:, heads].float()
        mask = self.mask if self.mask is None or self.mask.shape[1] == 1 else self.mask[:, heads]
        # Kernels that make no matrix want values as wide as keys: so many columns at a time.
        width = query.shape[-1]
        found = []
        for some in maps.split(width, dim=-1):
            values = pad(some, (0, width - some.shape[-1]))[:, None].expand_as(key)
            spread = scaled_dot_product_attention(query, key, values, mask, scale=self.scale)
            found.append(spread[..., : some.shape[-1]])
        return torch.cat(found, dim=-1)


class RefinedProbs(Refined):
    """The same, where the picture's part of the softmax was made.

    A cell that pays the picture nothing that its dtype can hold is spread nowhere: its row is zero.

    Args:
        text: what the picture's queries pay to the text.
        picture: what they pay to the picture's keys, ``[B, heads, N, N]``.
    """

    def __init__(self, text: Attended, picture: Tensor):
        Attended.__init__(self, text.batch, text.heads, text.cells, text.keys)
        self.text, self.picture = text, picture

    def of(self, rows: Rows) -> Attended:
        return RefinedProbs(self.text.of(rows), chosen_rows(self.picture, rows))

    def _spread(self, maps: Tensor, heads: slice) -> Tensor:
        shares = self.picture[:, heads].float()
        tiny = torch.finfo(shares.dtype).tiny  # of a row that pays nothing to the picture
        return shares / shares.sum(-1, keepdim=True).clamp_min(tiny) @ maps[:, None]
