"""Text columns spread along the image's own self-attention, while the model runs.

Cells that attend to each other belong together. If text and image share one softmax, a map can be
spread at once without an ``[N, N]`` matrix: ``S m`` is one more attention, whose values are the
maps. Each block sees something else in the image, so a call spreads the mean over all blocks of the
previous pass.

Source: GoCA (arXiv:2603.06178), for two products with the image's self-attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention.calls import AttentionCall
from ..attention.recording import addend
from ..follow.run_part import RunPart
from ..models.layers import AttentionLayer
from .attended import Attended, Columns
from .sdpa import TORCHS


class Spreading:
    """Maps that a capture's layers spread: means over the layers of the last pass that was kept.

    Let ``m_l`` be the attention of cells to text in layer ``l`` and ``S_l`` their attention to each
    other, both means over heads. Pass ``t`` has the maps ``m_t = mean_l m_l``, ``s_t = mean_l S_l
    m_(t-1)`` and, in each layer, ``S_l s_(t-1)``, which is the result. In the first pass a layer
    spreads its own map, ``S_l (S_l m_l)``.

    Most of the price is ``S_l``. If only a part of the layers spreads, the mean ``m_t`` is still
    over all, and in the first pass over those that ran before and the layer itself.

    Args:
        is_part: True if further layers only contribute their attention to the text.
    """

    def __init__(self, is_part: bool = False) -> None:
        self.is_part = is_part
        self.before: tuple[Tensor, Tensor] | None = None  # (m, s) of a pass, [images, N, T] each
        self._begin()

    def _begin(self) -> None:
        # of the running pass: each layer's attention to the text, and what it made of a map
        self.text = Mean()
        self.spread = Mean()

    def begin_pass(self) -> None:
        """Make the pass that ends now the previous one, if any of it was kept."""
        if self.text.total is not None and self.spread.total is not None:
            self.before = self.text.value(), self.spread.value()
        self._begin()

    def drop_pass(self) -> None:
        """Forget what a pass has so far, which did not end."""
        self._begin()

    def first(self, own: Tensor) -> Tensor:
        """Return the map that a layer spreads in the first pass, which pays ``own`` itself."""
        return self.text.value_with(own) if self.is_part else own


class Mean:
    """Mean over the layers of a pass, of ``[images, N, T]`` each."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.number = 0

    def add(self, of_layer: Tensor) -> None:
        self.total = self._with(of_layer.detach())
        self.number += 1

    def value(self) -> Tensor:
        assert self.total is not None
        return self.total / self.number

    def value_with(self, of_layer: Tensor) -> Tensor:
        return self._with(of_layer) / (self.number + 1)

    def _with(self, of_layer: Tensor) -> Tensor:
        # layers of one model may lie on several devices
        return of_layer if self.total is None else self.total.to(of_layer.device) + of_layer


def spreading_layers(
    layers: Sequence[AttentionLayer], part: RunPart | None
) -> Sequence[AttentionLayer]:
    """Return the layers, leaving out joint attention outside a part of the depth; at least one
    joint layer stays."""
    if part is None:
        return layers
    joint = [layer for layer in layers if layer.kind == "joint"]
    first = int(part.first * len(joint))
    last = math.ceil(part.last * len(joint))
    return [layer for layer in layers if layer.kind != "joint" or layer in joint[first:last]]


class Refined(Attended):
    """``S s``, where ``s`` is a map of the text that was spread before, see :class:`Spreading`.

    For a single head it is ``S_h s``, so that the mean over heads is the above. A cell whose
    attention to the image vanishes in its dtype is not spread: its row is zero.

    Args:
        text: attention of the image's queries to the text.
        spreading: the maps that all layers spread.
        image: the call between the image's queries and keys only; its softmax is ``S``.
    """

    def __init__(self, text: Attended, spreading: Spreading, image: AttentionCall):
        super().__init__(text.batch, text.heads, text.cells, text.keys)
        self.text = text
        self.spreading = spreading
        self.image = image

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        return self.every_head(columns)[:, heads]

    def _parts(self, columns: Columns) -> Iterator[Tensor]:
        # All heads at once: each spreads the mean of all.
        if torch.is_grad_enabled():  # add_to() has no graph
            summed = reduce(torch.add, self.text.head_sums(columns))
        else:
            summed = self.text.add_to(None, columns)
        own = summed / self.heads  # [B, N, T]
        if self.spreading.before is None:
            once = self._spread(self.spreading.first(own))
            twice = self._spread(once.mean(1))
        else:
            both = torch.cat(self.spreading.before, dim=-1).to(own.device)
            once, twice = self._spread(both).split(own.shape[-1], dim=-1)
        self.spreading.text.add(own)
        self.spreading.spread.add(once.mean(1))
        yield twice

    def _spread(self, maps: Tensor) -> Tensor:
        """Return ``[B, N, T]`` as each head spreads it, ``[B, heads, N, T]``."""
        if self.image.probs is not None:
            shares = self.image.probs.float()
            tiny = torch.finfo(shares.dtype).tiny  # for a row without attention to the image
            return shares / shares.sum(-1, keepdim=True).clamp_min(tiny) @ maps[:, None]
        query = self.image.query.float()
        key = self.image.key.float()
        mask = addend(self.image.mask)
        scale = self.image.scale
        # Kernels that make no matrix want values as wide as keys, so columns go in such groups.
        width = query.shape[-1]
        spread = []
        for some in maps.split(width, dim=-1):
            values = pad(some, (0, width - some.shape[-1]))[:, None].expand_as(key)
            padded = TORCHS(query, key, values, mask, scale=scale)
            spread.append(padded[..., : some.shape[-1]])
        return torch.cat(spread, dim=-1)
