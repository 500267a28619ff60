"""`Keep`: what a capture keeps of steps, heads and columns, read once where it comes in, and its
bytes; `RunPart`: a part of a run, one meaning for captures, knockouts, edits and presets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch

from ..errors import InvalidValueError
from ..models.layers import AttentionLayer
from ..models.pipeline_call import whole

MUCH = 1e9  # bytes; a warning is logged where more will be held
# "mean", "all", indices; of steps also "last", or a part of the run, (0.5, 1.0)
Selection = str | Sequence[int] | tuple[float, float]
Span = float | tuple[float, float]  # 0.8 means (0, 0.8), in parts of the run


@dataclass(frozen=True)
class RunPart:
    """A part of a run, ``0 <= first <= last <= 1``.

    A pass of the model belongs to it where the middle of the pass lies in it, the bounds included.
    So of an odd number of passes the one in the very middle belongs to both halves, and a run of a
    single pass has it in either. From a point to that same point there is nothing.
    """

    first: float
    last: float

    @classmethod
    def between(cls, pair: Any) -> RunPart | None:
        """The part between two points of the run; None for what is no pair of such numbers."""
        items = _items(pair)
        numbers = [number for item in items if (number := _number(item)) is not None]
        if not len(items) == len(numbers) == 2:
            return None
        first, last = numbers
        return cls(first, last) if 0 <= first <= last <= 1 else None

    @classmethod
    def of(cls, span: Any, passes: int | str = "their number") -> RunPart:
        """A part as knockouts and edits take it: 0.8 for the first 80 %, or ``(0.2, 0.8)``.

        Raises:
            ValueError: it is none; the message names the number of ``passes``.
        """
        found = cls.between((0.0, span) if isinstance(span, Real) else span)
        if found is None:
            raise InvalidValueError(
                f"{span!r}: pass a part of the run from 0 to 1, such as 0.8 or (0.2, 0.8). For n "
                f"steps pass n / {passes}."
            )
        return found

    @classmethod
    def read(cls, pair: Any) -> RunPart | None:
        """A part as captures take it, where indices of steps may stand as well: ``(0.5, 1.0)``.

        Returns:
            None for what is no part: two indices, a word, numbers outside [0, 1].

        Raises:
            ValueError: the tuple of the whole numbers 0 and 1, which could be either.
        """
        found = cls.between(pair)
        if found is None or found.first == found.last:
            return None
        if any(whole(number) is None for number in pair):
            return found
        if isinstance(pair, tuple):
            raise InvalidValueError(
                f"steps={pair!r} can be read in two ways. Pass [0, 1] for the first two calls of "
                "the model, (0.0, 1.0) for the whole run."
            )
        return None

    def holds(self, position: float | None) -> bool:
        """Whether a pass with its middle there belongs to it; None is a place that is not known."""
        if position is None or self.first == self.last:
            return False
        return self.first <= position <= self.last

    def passes(self, number: int) -> list[int]:
        """Which of so many passes belong to it, counted from 0."""
        return [i for i in range(number) if self.holds((i + 0.5) / number)]


def _number(item: Any) -> float | None:
    """A number as a float; None for anything else, True and False too."""
    is_real = isinstance(item, Real) and not isinstance(item, bool)
    number = item if is_real else whole(item)
    return None if number is None else float(number)


def _items(value: Any) -> tuple[Any, ...]:
    """What a list holds; nothing of a word, of a number, or of an array that is one number."""
    is_one = isinstance(value, str) or getattr(value, "ndim", None) == 0
    return tuple(value) if isinstance(value, Collection) and not is_one else ()


@dataclass(frozen=True)
class Steps:
    """Which calls of the model are kept.

    Attributes:
        given: as a user reads it: ``"mean"``, ``"all"``, ``"last"``, a list of indices, or a part
            of the run as a pair of floats.
        each: whether they are kept one by one; if not, one map stands for all of them.
        last: whether that map is the last call's alone, and no mean.
        numbers: the indices that were chosen, None where none were.
        part: the part of the run that was chosen, None where none was.
    """

    given: Selection
    each: bool = False
    last: bool = False
    numbers: tuple[int, ...] | None = None
    part: RunPart | None = None

    @classmethod
    def of(cls, value: Any) -> Steps:
        """Read what a user passed, or what was read before.

        Raises:
            ValueError: it is none of these.
        """
        if isinstance(value, Steps):
            return value
        if isinstance(value, str) and value in ("mean", "all", "last"):
            return cls(value, each=value == "all", last=value == "last")
        if part := RunPart.read(value):
            return cls((part.first, part.last), part=part)
        more = '"last", a part of the run such as (0.5, 1.0), '
        numbers = _indices("steps", value, more)
        return cls(list(numbers), each=True, numbers=numbers)

    @property
    def every(self) -> bool:
        """Whether all calls are kept one by one, so that any choice can still be made of them."""
        return self.each and self.numbers is None

    def keeps(self, number: int, position: float | None) -> bool:
        """Whether a call is kept: the ``number``-th, counted from 0, in the middle of whose part
        of the run ``position`` is."""
        if self.part is not None:
            return self.part.holds(position)
        return self.numbers is None or number in self.numbers

    def held(self, passes: int) -> int:
        """How many maps are held of so many calls."""
        return len(self.numbers) if self.numbers else passes if self.each else 1


@dataclass(frozen=True)
class Heads:
    """Which heads of a layer are kept.

    Attributes:
        given: as a user reads it: ``"mean"``, ``"all"`` or a list of indices.
        each: whether they are kept one by one, not their mean.
        numbers: the indices that were chosen, None where none were.
    """

    given: Selection
    each: bool = False
    numbers: tuple[int, ...] | None = None

    @classmethod
    def of(cls, value: Any) -> Heads:
        """Read what a user passed, or what was read before.

        Raises:
            ValueError: it is none of these.
        """
        if isinstance(value, Heads):
            return value
        if isinstance(value, str) and value in ("mean", "all"):
            return cls(value, each=value == "all")
        numbers = _indices("heads", value)
        return cls(list(numbers), each=True, numbers=numbers)

    @property
    def every(self) -> bool:
        """Whether all heads are kept one by one."""
        return self.each and self.numbers is None

    def used(self, heads: int) -> int:
        """How many heads of a layer with ``heads`` of them the maps are of."""
        return len(self.numbers) if self.numbers else heads


def _indices(name: str, value: Any, more: str = "") -> tuple[int, ...]:
    found = _wholes(value)
    if not found or len(set(found)) < len(found):
        raise InvalidValueError(
            f'{name}={value!r}: pass "mean", "all", {more}or a list of indices from 0, not empty, '
            "each once."
        )
    return found


def _wholes(value: Any) -> tuple[int, ...]:
    """The whole numbers from 0 that a list holds; nothing if it holds anything else."""
    numbers = [whole(item) for item in _items(value)]
    good = [number for number in numbers if number is not None and number >= 0]
    return tuple(good) if len(good) == len(numbers) else ()


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
        lists = None if among is None else [_wholes(columns) for columns in _items(among)]
        if lists is not None and not (lists and all(lists)):
            raise InvalidValueError(
                f"among={among!r}: pass a list of columns, not empty, for each image."
            )
        if not dtype.is_floating_point:
            raise InvalidValueError(
                f"dtype={dtype}: maps are shares in [0, 1], which it cannot hold. Pass a floating "
                "dtype, torch.float16 say."
            )
        columns = None if tokens is None else _columns(tokens)
        return cls(Steps.of(steps), Heads.of(heads), columns, lists, device, dtype, grad)

    @cached_property
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


def _columns(tokens: Any) -> tuple[int, ...]:
    columns = _wholes(tokens)
    if not columns:
        raise InvalidValueError(f"tokens={tokens!r}: pass token columns from 0, or None for all.")
    return columns
