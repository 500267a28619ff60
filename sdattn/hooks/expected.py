"""`Expected`: what a store will hold at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..models.denoiser_call import Size
from ..models.layers import AttentionLayer
from .keep import Keep


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The maps that a store will hold at the end of a run.

    Attributes:
        keep, layers: what is kept, and of which layers.
        latent_size: size of the latent, (frames, rows, cols) for a video.
        columns: token columns of the layers that see the text, kept or not.
        rows: kept rows of the batch, or videos.
        passes: calls of the model.
        frame_rows: frames of a video that each attend only to themselves; else 1.
    """

    keep: Keep
    layers: Sequence[AttentionLayer]
    latent_size: Size
    columns: int
    rows: int = 1
    passes: int = 1
    frame_rows: int = 1

    @property
    def nbytes(self) -> int:
        tokens = self.keep.tokens
        return self.keep.nbytes(
            self.layers,
            self.latent_size,
            self.columns if tokens is None else len(tokens),
            images=self.rows,
            passes=self.passes,
            frame_rows=self.frame_rows,
        )
