"""`Budget`: the bytes that the captures of a run may hold together. A run that would hold more is
refused before its first step, with what would hold less."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..errors import OptionError, refuse, size_text
from ..models.denoiser_call import Size
from ..models.values import whole
from .expected import Expected, change, total
from .keep import MUCH, Keep

logger = logging.getLogger(__name__)

# Changes that may be advised: around a call, for a run, to one who types a command
CAPTURE = ("steps", "fewer steps", "heads", "dtype", "layers", "tokens", "frames", "images", "size")
RUN = (
    *("steps", "fewer steps", "heads", "dtype", "branch", "ask", "refine"),
    *("spots", "words", "num_frames", "images", "size"),
)
COMMAND = ("steps", "heads", "branch", "ask", "refine", "spots", "num_frames", "images", "size")


@dataclass(frozen=True, eq=False)
class Budget:
    """Bytes that the captures of one run may hold together.

    Attributes:
        allowed: number of bytes.
        offers: changes that may be advised, of :data:`sdattn.keep.expected.CHANGES`.
        part: name of the capture that asks.
        stores: for each capture of the run what it will hold, from what another one will.
    """

    allowed: int
    offers: Sequence[str] = CAPTURE
    part: str = "prompt"
    stores: list[Callable[[Expected], Expected]] = field(default_factory=list)

    @classmethod
    def of(
        cls, max_bytes: int | Budget | None, offers: Sequence[str] | None = None
    ) -> Budget | None:
        """Read a user's value. A budget stays as it is, with the ``offers`` it has already.

        Raises:
            ValueError: it is not a whole number above 0.
        """
        if isinstance(max_bytes, Budget):
            known = max_bytes.offers
            return replace(max_bytes, offers=[o for o in known if o in (offers or known)])
        number = whole(max_bytes)
        if max_bytes is not None and (number is None or number < 1):
            raise refuse("max_bytes", max_bytes, "a whole number of bytes, 4_000_000_000 say")
        return None if number is None else cls(number, offers or CAPTURE)

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
            OptionError: they would; the message says what would hold less.
        """
        if total(stores) > self.allowed:
            text = (
                f"this run of {stores[0].passes} model call(s) would hold up to "
                f"{size_text(total(stores))} of maps, and {size_text(self.allowed)} are allowed. "
            )
            raise OptionError("max_bytes", self.allowed, text + self._advice(stores))

    def _advice(self, stores: Sequence[Expected]) -> str:
        """Say which changes are enough alone, and how many are together."""
        found = [one for name in self.offers if (one := change(name, stores, self.allowed))]
        ways = [_told(*one) for one in found if total(one[1]) <= self.allowed]
        together = []
        for name in self.offers:
            if total(stores) > self.allowed and (one := change(name, stores, self.allowed)):
                text, stores = one
                together.append(text)
        every = _told(f"{_listed(together, 'and')} together", stores) if together else ""
        if total(stores) > self.allowed:
            return f"The least is to {every}: allow more." if together else "Allow more."
        if len(together) > 1:
            ways.append(every)
        return f"To hold less, {_listed(ways, 'or')}."


def warn_of_much(expected: Expected) -> None:
    """Log what a store will hold if it is much."""
    if expected.nbytes > MUCH:
        logger.warning(
            "Capture will hold up to %s by the end of this run of %d model calls. Choose layers, "
            "tokens, steps or heads to hold less.",
            size_text(expected.nbytes),
            expected.passes,
        )


def _told(text: str, stores: Sequence[Expected]) -> str:
    return f"{text} ({size_text(total(stores))})"


def _listed(items: Sequence[str], word: str) -> str:
    *first, last = items
    return f"{', '.join(first)} {word} {last}" if first else last
