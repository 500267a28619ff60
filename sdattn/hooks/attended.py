"""`Attended`: what one call of an attention layer attended to, computed when it is asked for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = slice | Tensor
# (heads, key columns or None for all) -> probabilities, float32 [images, heads, N, T]
OfHeads = Callable[[slice, Sequence[int] | None], Tensor]
PART = 1 << 23  # probabilities that are computed at a time: all heads of SD 1.x, some of SD3


@dataclass(frozen=True)
class Attended:
    """What one call of one layer attended to. Probabilities are computed when they are asked for.

    Attributes:
        batch: rows of the batch.
        heads: of the layer.
        cells: N, the queries.
        keys: T, the key columns.
        of_rows: rows of the batch, as an index of its axis, to what they attended to.
    """

    batch: int
    heads: int
    cells: int
    keys: int
    of_rows: Callable[[Rows], OfHeads]

    def parts(self, rows: Tensor, columns: Sequence[int] | None) -> Iterator[Tensor]:
        """The probabilities of some rows, float32 ``[images, heads, N, T]``, a few heads at a time.

        Args:
            rows: ``[images]``, of the batch.
            columns: the keys that are kept, None for all. The softmax is over all.
        """
        numbers = rows.tolist()
        first, last = numbers[0], numbers[-1]
        in_a_row = numbers == list(range(first, last + 1))  # then their part is a view, not a copy
        probs_of = self.of_rows(slice(first, last + 1) if in_a_row else rows)
        step = max(1, PART // (len(numbers) * self.cells * self.keys))
        for start in range(0, self.heads, step):
            yield probs_of(slice(start, min(start + step, self.heads)), columns)


def given_probs(probs: Tensor) -> Attended:
    """Of probabilities that are there already, ``[B, heads, N, T]``; of the tensor none is kept."""
    batch, heads, cells, keys = probs.shape

    def of_rows(rows: Rows) -> OfHeads:
        def of_heads(heads: slice, columns: Sequence[int] | None) -> Tensor:
            own = probs[rows][:, heads].to(torch.float32, copy=True)
            return chosen_columns(own, columns)

        return of_heads

    return Attended(batch, heads, cells, keys, of_rows)


def chosen_columns(probs: Tensor, columns: Sequence[int] | None) -> Tensor:
    """Some of the keys of ``[..., T]``, None for all."""
    return probs if columns is None else probs[..., list(columns)]
