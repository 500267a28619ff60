"""Similarity of the attention's outputs for text and image, in place of attention.

Joint attention makes an output for each token and each cell. Before the output projection they lie
in one space, so their product says how similar a cell has become to a token.

Source: Helbling et al. 2025, "ConceptAttention" (arXiv:2502.04320), whose concepts are tokens next
to the prompt; here they are the prompt's own, or another text's (:mod:`sdattn.look.other_text`).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .attended import Attended, Columns, chosen_columns

Space = Literal["attention", "output"]


class OutputSpace(Attended):
    """The product ``o_t . o_x / d`` for each head, of any sign, of cells ``[B, heads, N, d]`` and
    tokens ``[B, heads, T, d]`` before the output projection. The mean over heads does not grow with
    their number."""

    def __init__(self, image: Tensor, text: Tensor):
        batch, heads, cells, _ = image.shape
        super().__init__(batch, heads, cells, text.shape[2])
        self.image = image
        self.text = text

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        text = chosen_columns(self.text[:, heads].float(), columns, dim=2)
        return self.image[:, heads].float() @ text.mT / text.shape[-1]

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        text = chosen_columns(self.text, columns, dim=2)
        # all heads in one product
        cells = self.image.transpose(1, 2).flatten(2).float()
        tokens = text.transpose(1, 2).flatten(2).float()
        scale = 1 / text.shape[-1]
        if total is None:
            return cells @ tokens.mT * scale
        return total.baddbmm_(cells, tokens.mT, alpha=scale)
