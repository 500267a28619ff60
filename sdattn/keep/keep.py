"""`Keep`: steps, heads and columns that a capture keeps, parsed and checked once, and their
bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import torch

from ..errors import InvalidValueError, refuse
from ..follow.run_part import RunPart, items_of
from ..look.output_space import Space
from ..look.queries import IMAGE_TO_TEXT, Queries, Side
from ..models.denoiser_call import Size
from ..models.layers import AttentionLayer
from ..models.values import whole

MUCH = 1e9  # bytes; a warning is logged where more will be held
# "mean", "all", indices; of steps also "last", or a part of the run, (0.5, 1.0)
Selection = str | Sequence[int] | tuple[float, float]


@dataclass(frozen=True)
class _Choice:
    """Model calls, or heads of a layer, to keep.

    Attributes:
        given: as a user reads it: ``"mean"``, ``"all"`` or a list of indices.
        each: True if they are kept one by one; False if one map stands for all of them.
        numbers: chosen indices, or None.
    """

    given: Selection
    each: bool = False
    numbers: tuple[int, ...] | None = None

    @property
    def every(self) -> bool:
        """True if all are kept one by one, so that any choice can be made later."""
        return self.each and self.numbers is None


@dataclass(frozen=True)
class Steps(_Choice):
    """Model calls to keep; ``given`` may also be ``"last"``, or a part of the run as a pair of
    floats.

    Attributes:
        last: True if the one map is the last call's alone, not a mean.
        part: chosen part of the run, or None.
    """

    last: bool = False
    part: RunPart | None = None

    @classmethod
    def of(cls, value: object) -> Steps:
        """Read a user's value; a value already read is returned as it is.

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

    def keeps(self, number: int, position: float | None) -> bool:
        """Check whether the ``number``-th call, counted from 0, is kept; ``position`` is the middle
        of its part of the run."""
        if self.part is not None:
            return self.part.holds(position)
        return self.numbers is None or number in self.numbers

    def held(self, passes: int) -> int:
        """Return the number of maps kept after ``passes`` model calls."""
        if self.numbers:
            return len(self.numbers)
        return passes if self.each else 1


@dataclass(frozen=True)
class Heads(_Choice):
    """Heads of a layer to keep."""

    @classmethod
    def of(cls, value: object) -> Heads:
        """Read a user's value; a value already read is returned as it is.

        Raises:
            ValueError: it is none of these.
        """
        if isinstance(value, Heads):
            return value
        if isinstance(value, str) and value in ("mean", "all"):
            return cls(value, each=value == "all")
        numbers = _indices("heads", value)
        return cls(list(numbers), each=True, numbers=numbers)

    def used(self, heads: int) -> int:
        """Return how many of a layer's ``heads`` heads are in the maps."""
        return len(self.numbers) if self.numbers else heads


def _indices(name: str, value: object, more: str = "") -> tuple[int, ...]:
    numbers = _wholes(value)
    if not numbers or len(set(numbers)) < len(numbers):
        raise InvalidValueError(
            f'{name}={value!r}: pass "mean", "all", {more}or a list of indices from 0, not empty, '
            "each once."
        )
    return numbers


def _wholes(value: object) -> tuple[int, ...]:
    """Return the whole numbers from 0 in a list; empty if it holds anything else."""
    numbers = [whole(item) for item in items_of(value)]
    good = [number for number in numbers if number is not None and number >= 0]
    return tuple(good) if len(good) == len(numbers) else ()


@dataclass(frozen=True)
class Keep:
    """Parts of the attention that a capture keeps, read and checked by :meth:`of`.

    Attributes:
        steps, heads: model calls, and heads of a layer.
        tokens: key columns kept; None for all.
        among: key columns that the softmax is taken over, for each image or once for all; None for
            all columns.
        device: device that holds the maps; None for the one that computes them.
        dtype: dtype of the maps.
        grad: True keeps their graph.
        refine: True spreads joint layers' maps along the image's self-attention.
        depth: part of the depth whose blocks spread them; None for all.
        queries: who attends, and to what.
        space: ``"attention"``; ``"output"`` for products of joint layers' outputs.
        frames: frames of a video's grid, counted from 0; None for all.
    """

    steps: Steps
    heads: Heads
    tokens: tuple[int, ...] | None
    among: Sequence[Sequence[int]] | None
    device: torch.device | str | None
    dtype: torch.dtype
    grad: bool
    refine: bool = False
    space: Space = "attention"
    frames: tuple[int, ...] | None = None
    depth: RunPart | None = None
    queries: Queries = IMAGE_TO_TEXT

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
        refine: str | None = None,
        space: Space = "attention",
        frames: Sequence[int] | None = None,
        depth: tuple[float, float] | None = None,
        queries: Any = "image",
        keys: Side | None = None,
    ) -> Keep:
        """Read the options of :func:`sdattn.capture`; see there.

        Raises:
            ValueError: an option that is not valid.
        """
        lists = None if among is None else [_wholes(columns) for columns in items_of(among)]
        if lists is not None and not (lists and all(lists)):
            raise InvalidValueError(
                f"among={among!r}: pass a list of columns, not empty, for each image."
            )
        if not dtype.is_floating_point:
            raise InvalidValueError(
                f"dtype={dtype}: maps are shares in [0, 1], which it cannot hold. Pass a floating "
                "dtype, e.g. torch.float16."
            )
        if refine not in (None, "self"):
            raise refuse("refine", refine, "'self', or None for the maps as they are")
        if space not in get_args(Space):
            raise refuse("space", space, get_args(Space))
        if lists is not None and (refine or space == "output"):
            raise InvalidValueError(
                "among=... takes the softmax over some columns of a map that refine='self' has "
                "spread by then, or that space='output' has without a softmax. Leave one of them "
                "out."
            )
        part = None if depth is None else RunPart.between(depth)
        if depth is not None and not (refine and part and part.first < part.last):
            raise refuse("depth", depth, "with refine='self', a part of the depth, (0.5, 1.0)")
        columns = None if tokens is None else _columns(tokens)
        is_refined = refine is not None
        asked = Queries.of(queries, keys)
        asked.check(refine=is_refined, among=lists, space=space != "attention")
        asked.check(tokens=asked.cells and tokens, frames=asked.in_text and frames)
        return cls(
            steps=Steps.of(steps),
            heads=Heads.of(heads),
            tokens=columns,
            among=lists,
            device=device,
            dtype=dtype,
            grad=grad,
            refine=is_refined,
            space=space,
            frames=None if frames is None else _indices("frames", frames),
            depth=part,
            queries=asked,
        )

    @cached_property
    def held_dtype(self) -> torch.dtype:
        """Dtype of the held maps: running sums are at least float32."""
        return self.dtype if self.steps.each else torch.promote_types(self.dtype, torch.float32)

    def nbytes(
        self,
        layers: Sequence[AttentionLayer],
        latent_size: Size,
        n_keys: int,
        *,
        images: int = 1,
        passes: int = 1,
        frame_rows: int = 1,
    ) -> int:
        """Return the bytes that a store holds at the end of a run.

        Args:
            layers: watched layers. A self-attention layer has as many keys as queries.
            latent_size: size of the latent, (frames, rows, cols) for a video.
            n_keys: token columns kept in a layer that sees the text.
            images: kept rows of the batch, or videos.
            passes: calls of the model.
            frame_rows: frames of a video that each attend only to themselves, see
                :class:`sdattn.models.denoiser_call.DenoiserCall`.
        """
        total = sum(self._values(layer, latent_size, n_keys, frame_rows) for layer in layers)
        return images * self.steps.held(passes) * total * self.held_dtype.itemsize

    def _values(
        self, layer: AttentionLayer, latent_size: Size, n_keys: int, frame_rows: int
    ) -> int:
        """Return the number of values in a layer's map of one image and step."""
        grid = layer.grid(latent_size)
        cells = math.prod(grid)
        columns = n_keys
        if self.queries.cells is not None:
            columns = len(self.queries.cells)
        elif layer.kind == "self":
            columns = cells // frame_rows
        rows = n_keys if self.queries.in_text else cells
        if self.frames is not None:
            rows = len(self.frames) * rows // grid[0]
        heads = self.heads.used(layer.heads) if self.heads.each else 1
        return heads * rows * columns


def _columns(tokens: object) -> tuple[int, ...]:
    columns = _wholes(tokens)
    if not columns:
        raise InvalidValueError(f"tokens={tokens!r}: pass token columns from 0, or None for all.")
    return columns
