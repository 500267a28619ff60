"""`Budget`: the bytes that the captures of a run may hold together. A run that would hold more is
refused before its first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import OptionError, refuse, size_text
from ..models.denoiser_call import Size
from ..models.layers import AttentionLayer
from ..models.values import whole
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


@dataclass(frozen=True, eq=False)
class Budget:
    """Bytes that the captures of one run may hold together.

    Attributes:
        allowed: number of bytes.
        stores: for each capture of the run what it will hold, from what another one will.
    """

    allowed: int
    stores: list[Callable[[Expected], Expected]] = field(default_factory=list)

    @classmethod
    def of(cls, max_bytes: int | Budget | None) -> Budget | None:
        """Read a user's value; a budget stays as it is.

        Raises:
            ValueError: it is not a whole number above 0.
        """
        if max_bytes is None or isinstance(max_bytes, Budget):
            return max_bytes
        number = whole(max_bytes)
        if number is None or number < 1:
            raise refuse("max_bytes", max_bytes, "a whole number of bytes, 4_000_000_000 say")
        return cls(number)

    def check_known(self, keep: Keep, latent_size: Size | None, passes: int | None) -> None:
        """Refuse a run whose maps cannot be counted before it.

        Raises:
            OptionError: its queries are a mere sequence, or its steps have no known number.
        """
        if latent_size is None:
            text = "the number of this model's queries is not known. Pass `latent_size`."
            raise OptionError("max_bytes", self.allowed, text)
        if passes is None and keep.steps.every:
            text = (
                "how many steps a run has is not known of a model without its pipeline. Capture "
                "the pipeline, or a list of steps."
            )
            raise OptionError("max_bytes", self.allowed, text)

    def check(self, stores: Sequence[Expected]) -> None:
        """Refuse a run whose stores would hold more than is allowed.

        Raises:
            OptionError: they would.
        """
        needed = sum(store.nbytes for store in stores)
        if needed > self.allowed:
            text = (
                f"this run of {stores[0].passes} model call(s) would hold up to "
                f"{size_text(needed)} of maps, and {size_text(self.allowed)} are allowed. Keep "
                f"{_LESS}, or allow more."
            )
            raise OptionError("max_bytes", self.allowed, text)


def warn_of_much(expected: Expected) -> None:
    """Log what a store will hold if it is much."""
    if expected.nbytes > MUCH:
        logger.warning(
            "Capture will hold up to %s by the end of this run of %d model calls. To hold less, "
            "keep %s.",
            size_text(expected.nbytes),
            expected.passes,
            _LESS,
        )
