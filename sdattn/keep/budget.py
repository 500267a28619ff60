"""`Expected`: the bytes that a capture will hold. A run that would hold more than is allowed is
refused before its first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OptionError, size_text
from ..models.denoiser_call import Size
from ..models.layers import AttentionLayer
from .keep import MUCH, Keep

logger = logging.getLogger(__name__)

_LESS = "fewer steps, heads, layers or words, or draw fewer or smaller images at a time"


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

    def check(self) -> None:
        """Refuse a run whose maps would take more than ``max_bytes``; without such a limit, log a
        warning if they will take much.

        Raises:
            OptionError: they would.
        """
        allowed = self.keep.max_bytes
        if allowed is not None and self.nbytes > allowed:
            text = (
                f"this run of {self.passes} model call(s) would hold up to "
                f"{size_text(self.nbytes)} of maps, and {size_text(allowed)} are allowed. Keep "
                f"{_LESS}, or allow more."
            )
            raise OptionError("max_bytes", allowed, text)
        if allowed is None and self.nbytes > MUCH:
            logger.warning(
                "Capture will hold up to %s by the end of this run of %d model calls. To hold "
                "less, keep %s.",
                size_text(self.nbytes),
                self.passes,
                _LESS,
            )


def check_known(keep: Keep, latent_size: Size | None, passes: int | None) -> None:
    """Refuse a run with a limit of bytes whose maps cannot be counted before it.

    Raises:
        OptionError: its queries are a mere sequence, or its steps have no known number.
    """
    if keep.max_bytes is None:
        return
    if latent_size is None:
        text = "the number of this model's queries is not known. Pass `latent_size`."
        raise OptionError("max_bytes", keep.max_bytes, text)
    if passes is None and keep.steps.is_all:
        text = (
            "how many steps a run has is not known of a model without its pipeline. Capture "
            "the pipeline, or a list of steps."
        )
        raise OptionError("max_bytes", keep.max_bytes, text)
