"""How alike the attention's outputs of text and image are, in place of what one pays the other.

Joint attention makes an output for each token of the text as for each cell of the image. Before
the output projection they lie in one space, so that their product says how much a cell came to be
like a token; the kernel has made both already.

Source: Helbling et al. 2025, "ConceptAttention" (arXiv:2502.04320), whose concepts are tokens
beside the prompt; here they are the prompt's own, or those of another text
(:mod:`sdattn.hooks.text_stream`).
"""

from __future__ import annotations

from torch import Tensor

from .attended import Attended, Columns, Rows, chosen_columns, chosen_rows


class OutputSpace(Attended):
    """``o_t . o_x / d`` of each head, of any sign, so that the mean over heads is the product over
    concatenated heads divided by their features: what a wider model has no more of.

    Args:
        image: outputs of the cells before the output projection, ``[B, heads, N, d]``.
        text: those of the tokens, ``[B, heads, T, d]``.
    """

    def __init__(self, image: Tensor, text: Tensor):
        batch, heads, cells, _ = image.shape
        super().__init__(batch, heads, cells, text.shape[2])
        self.image, self.text = image, text

    def of(self, rows: Rows) -> Attended:
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
