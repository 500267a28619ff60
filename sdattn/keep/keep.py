"""`Keep`: steps, heads and columns that a capture keeps, parsed and checked once, and their
bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from ..errors import InvalidValueError, refuse
from ..follow.pass_options import Guidance
from ..follow.run_part import RunPart, items_of
from ..look.output_space import Space
from ..look.queries import IMAGE_TO_TEXT, Queries, Side
from ..models.denoiser_call import Size
from ..models.layers import TEXT_KINDS, AttentionLayer, LayerSelection
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
    def is_all(self) -> bool:
        """True if all are kept one by one, so that any choice can be made later."""
        return self.each and self.numbers is None


@dataclass(frozen=True)
class Steps(_Choice):
    """Model calls to keep; ``given`` may also be ``"last"``, or a part of the run as a pair of
    floats. Numbers are indices into :attr:`CapturedMaps.passes`: calls for the kept branch alone,
    of which a second-order scheduler makes two in a step.

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


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Parts of a run that a capture keeps: the options of :func:`sdattn.capture`, with their
    defaults, read and checked by :meth:`of`.

    Attributes:
        layers, kinds: which attention layers; ``kinds`` are those that ``queries`` have by default.
        branch, guidance: rows of the batch to keep, and where the others are.
        steps, heads: model calls, and heads of a layer.
        tokens: key columns kept; None for all.
        among: key columns that the softmax is taken over, for each image or once for all; None for
            all columns.
        text_states: another text, in place of the prompt.
        device: device that holds the maps; None for the one that computes them.
        dtype: dtype of the maps.
        grad: True keeps their graph.
        latent_size: (rows, cols) of the queries of a model that does not know it.
        refine: ``"self"`` spreads joint layers' maps along the image's self-attention.
        space: ``"attention"``; ``"output"`` for products of joint layers' outputs.
        frames: frames of a video's grid, counted from 0; None for all.
        depth: part of the depth whose blocks spread them; None for all.
        queries: who attends, and to what; ``keys`` is a part of it.
        step_call: number of the call that counts in each step; None for the only one.
        max_bytes: bytes that the maps may take; None for no limit.
        text, grid, image: what is told of a model of no known family.
    """

    layers: LayerSelection = None
    kinds: Sequence[str] = TEXT_KINDS
    branch: str = "conditional"
    guidance: Guidance | None = "auto"
    steps: Steps = Steps("mean")
    heads: Heads = Heads("mean")
    tokens: tuple[int, ...] | None = None
    among: Sequence[Sequence[int]] | None = None
    text_states: Tensor | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype = torch.float32
    grad: bool = False
    latent_size: tuple[int, int] | None = None
    refine: str | None = None
    space: Space = "attention"
    frames: tuple[int, ...] | None = None
    depth: RunPart | None = None
    queries: Queries = IMAGE_TO_TEXT
    keys: Side | None = None
    step_call: int | None = None
    max_bytes: int | None = None
    text: Any = None
    grid: Any = None
    image: Any = None

    @classmethod
    def of(cls, **options: Any) -> Keep:
        """Read some of the options of :func:`sdattn.capture`; see there.

        Raises:
            ValueError: an option that is not valid.
        """
        read = dict(options)
        read["steps"] = Steps.of(options.get("steps", "mean"))
        read["heads"] = Heads.of(options.get("heads", "mean"))
        read["queries"] = Queries.of(options.get("queries", "image"), options.get("keys"))
        if options.get("kinds") is None:
            read["kinds"] = read["queries"].kinds
        if options.get("tokens") is not None:
            read["tokens"] = _columns(options["tokens"])
        if options.get("among") is not None:
            read["among"] = _lists_of_columns(options["among"])
        if options.get("frames") is not None:
            read["frames"] = _indices("frames", options["frames"])
        if options.get("depth") is not None:
            read["depth"] = _part_of_depth(options["depth"], options.get("refine"))
        read["max_bytes"] = checked_bytes(options.get("max_bytes"))
        keep = cls(**read)
        keep._check()
        return keep

    def _check(self) -> None:
        """Raise ValueError for options that are not valid, or not together."""
        if not self.dtype.is_floating_point:
            raise InvalidValueError(
                f"dtype={self.dtype}: maps are shares in [0, 1], which it cannot hold. Pass a "
                "floating dtype, e.g. torch.float16."
            )
        if self.refine not in (None, "self"):
            raise refuse("refine", self.refine, "'self', or None for the maps as they are")
        if self.space not in get_args(Space):
            raise refuse("space", self.space, get_args(Space))
        if self.among is not None and (self.refine or self.space == "output"):
            raise InvalidValueError(
                "among=... takes the softmax over some columns of a map that refine='self' has "
                "spread by then, or that space='output' has without a softmax. Leave one of them "
                "out."
            )
        queries = self.queries
        queries.check(refine=self.refine, among=self.among, space=self.space != "attention")
        queries.check(tokens=queries.cells and self.tokens, frames=queries.in_text and self.frames)

    def without_run(self) -> Keep:
        """Return the same for a store, which outlives the model: without what may hold it, or
        tensors of the run."""
        return replace(self, layers=None, text_states=None, text=None, grid=None, image=None)

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


def checked_bytes(max_bytes: object) -> int | None:
    """Return a limit of bytes, None for none; raise ValueError if it is no whole number above
    0."""
    number = whole(max_bytes)
    if max_bytes is not None and (number is None or number < 1):
        raise refuse("max_bytes", max_bytes, "a whole number of bytes, 4_000_000_000 say")
    return number


def _lists_of_columns(among: object) -> list[tuple[int, ...]]:
    lists = [_wholes(columns) for columns in items_of(among)]
    if not lists or not all(lists):
        raise InvalidValueError(
            f"among={among!r}: pass a list of columns, not empty, for each image."
        )
    return lists


def _part_of_depth(depth: object, refine: object) -> RunPart:
    part = RunPart.between(depth)
    if part is None or part.first == part.last or not refine:
        raise refuse("depth", depth, "with refine='self', a part of the depth, (0.5, 1.0)")
    return part


def _columns(tokens: object) -> tuple[int, ...]:
    columns = _wholes(tokens)
    if not columns:
        raise InvalidValueError(f"tokens={tokens!r}: pass token columns from 0, or None for all.")
    return columns
