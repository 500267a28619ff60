"""`Keep`: what a capture keeps of steps, heads and columns, and how many bytes that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from ..models.layers import AttentionLayer
from .steps import Heads, Selection, Steps

MUCH = 1e9  # bytes; a warning is logged where more will be held


@dataclass(frozen=True)
class Keep:
    """What a capture keeps, read and checked by :meth:`of`.

    Attributes:
        steps, heads: of the calls of the model and of the heads of a layer.
        tokens: the key columns that are kept, None for all.
        among: for each image (or once for all) the key columns that the softmax is taken over;
            None for all of them.
        device: where the maps are held; None for where they are computed.
        dtype: of the maps.
        grad: whether their graph is kept.
    """

    steps: Steps
    heads: Heads
    tokens: tuple[int, ...] | None
    among: Sequence[Sequence[int]] | None
    device: torch.device | str | None
    dtype: torch.dtype
    grad: bool

    @classmethod
    def of(
        cls,
        steps: Selection | Steps = "mean",
        heads: Selection | Heads = "mean",
        tokens: Sequence[int] | None = None,
        among: Sequence[Sequence[int]] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        grad: bool = False,
    ) -> Keep:
        """Read the options of :func:`sdattn.capture`; see there.

        Raises:
            ValueError: one that cannot be.
        """
        if among is not None and (isinstance(among, str) or not among or not all(among)):
            raise ValueError(f"among={among!r}: pass a list of columns, not empty, for each image.")
        if not dtype.is_floating_point:
            raise ValueError(
                f"dtype={dtype}: maps are shares in [0, 1], which it cannot hold. Pass a floating "
                "dtype, torch.float16 say."
            )
        columns = None if tokens is None else _columns(tokens)
        return cls(Steps.of(steps), Heads.of(heads), columns, among, device, dtype, grad)

    @property
    def held_dtype(self) -> torch.dtype:
        """The dtype of what is held: running sums are float32 at least."""
        return self.dtype if self.steps.each else torch.promote_types(self.dtype, torch.float32)

    def nbytes(
        self,
        layers: Sequence[AttentionLayer],
        latent_size: tuple[int, int],
        n_keys: int,
        *,
        images: int = 1,
        passes: int = 1,
    ) -> int:
        """How many bytes a store will hold at the end of a run.

        Args:
            layers: the watched layers. A self-attention layer has as many keys as queries.
            latent_size: (rows, cols) of the latent.
            n_keys: token columns kept of a layer that sees the text.
            images: rows kept of the batch.
            passes: calls of the model.
        """
        total = 0
        for layer in layers:
            rows, cols = layer.grid(latent_size)
            keys = rows * cols if layer.kind == "self" else n_keys
            heads = self.heads.used(layer.heads) if self.heads.each else 1
            total += heads * rows * cols * keys
        return images * self.steps.held(passes) * total * self.held_dtype.itemsize


def _columns(tokens: Sequence[Any]) -> tuple[int, ...]:
    whole = all(isinstance(token, Integral) for token in tokens)
    if not whole or not len(tokens) or min(tokens) < 0:
        raise ValueError(f"tokens={tokens!r}: pass token columns from 0, or None for all.")
    return tuple(map(int, tokens))
