"""Maps of one layer: a running sum over calls and heads, or each map that was asked for."""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, reduce
from typing import cast

import torch
from torch import Tensor

from ..attention.calls import ALL, LayerCall, ProjectedCall
from ..attention.core import grid_text
from ..attention.device_copies import DeviceCopies, HostCopy, chosen, travels
from ..errors import NotFoundError
from ..follow.passes import CaptureError, Pass
from ..look.attended import (
    AmongKeys,
    Attended,
    ByQuery,
    Columns,
    HeadSums,
    Turned,
)
from ..look.key_owners import other_owners
from ..look.view import View
from ..models.denoiser_call import Size
from ..models.layers import AttentionLayer
from .keep import Keep
from .queue import Queue, Total, may_wait


class RunningSum:
    """Maps of one layer: a running sum over calls (or the last call alone) and over the averaged
    heads, or a list with one entry per step.

    Args:
        layer: layer that the maps belong to.
        keep: parts to keep.

    Attributes:
        running: running pass, if it is kept for this layer; else None.
        calls: number of calls added.
        seen: passes whose maps are held, or whose mean is held, in order.
        keys: key columns of the layer, kept or not; None before it ran.
        grid: (rows, cols) of its queries, for a video (frames, rows, cols) with the kept frames;
            None before it ran.
    """

    def __init__(self, layer: AttentionLayer, keep: Keep, queue: Queue | None = None):
        self.layer = layer
        self.keep = keep
        self.queue = queue or Queue()
        self.running: Pass | None = None
        self.calls = 0
        self.seen: list[Pass] = []
        self.keys: int | None = None
        self.grid: Size | None = None
        self.total = Total(layer.name, keep.steps.last)
        self.steps: list[Tensor] = []
        self.copy = HostCopy()
        self.view = View(keep.queries, keep.space)
        self._summed = 1  # heads that are averaged
        self.rows_apart: dict[str, Tensor] = {}  # most in any call, see key_owners
        self._fitting: tuple[Size | None, int] | None = None  # latent and cells of the last call
        self._kept: DeviceCopies | None = None  # of the keys that ``among`` names
        self._is_turned = keep.queries.turned
        self._queries: Columns = None  # that are kept, known in the first call; None for all
        self._cells: tuple[int, ...] | None = None  # of the frames that are kept; None for all

    def wanted(self) -> bool:
        """Check whether the layer's call that begins now is kept."""
        return self.running is not None

    def take(self, call: LayerCall) -> None:
        """Add the attention of one call of the layer, in the running pass; raise CaptureError for
        other rows or cells, a second call, or missing columns or heads."""
        if torch.is_grad_enabled() and not self.keep.grad:
            with torch.no_grad():
                self.take(call)
            return
        running = self.running
        assert running is not None
        if call.batch != running.batch:
            raise CaptureError(
                f"{self.layer.name} ran on {call.batch} rows in a pass of {running.batch}, so "
                "which image each row belongs to is not known. Leave this layer out (layers=…)."
            )
        for kind, apart in call.rows_apart.items():
            before = self.rows_apart.get(kind, apart)
            self.rows_apart[kind] = before.fmax(apart) if before.shape == apart.shape else apart
        rows = running.kept or ALL
        # The usual case: one float32 sum over heads and steps. A plain layer's may wait.
        is_usual = self._is_usual and running.frame_rows == 1 and self.total.may_wait
        if is_usual and may_wait(call):
            columns = self._checked(call, running)
            self.queue.put(self.total, call, rows, columns)
            self._count(running)
        else:  # rows of the other branch are dropped before anything is computed
            self.add(self.view.of(call, rows))

    def add(self, attended: HeadSums) -> None:
        """Add the attention of one call's kept rows."""
        running = self.running
        assert running is not None
        if self._is_turned:
            looks = self.keep.queries
            if looks.cells is not None:
                self._check_grid(attended.cells * running.frame_rows, running, "queries")
            if not self.calls:  # a capture has one latent size
                size = running.latent_size
                self._queries = looks.numbers(self.layer, size, running.frame_rows)
            assert isinstance(attended, ByQuery)  # Queries.check() refuses what is not
            attended = Turned(attended.of_queries(self._queries))
        if running.frame_rows > 1:
            attended = attended.together(running.frame_rows)
        columns = self._checked(attended, running)
        if self.keep.among is not None and self.layer.kind != "self":
            assert isinstance(attended, Attended)  # can_record() refuses what asks for heads
            attended = self._among(attended, running.n_text or attended.keys)
        if self._in_place:
            self.total.add(attended, columns)
        else:
            self._add_apart(attended, columns)
        self._count(running)

    def _count(self, running: Pass) -> None:
        self.calls += 1
        if self.keep.steps.last:
            self.seen.clear()
        self.seen.append(running)

    def _checked(self, attended: HeadSums | ProjectedCall, running: Pass) -> Columns:
        """Return the kept key columns of a call, None for all; refuse one whose cells are not the
        layer's grid, or a second one in a pass. In a custom model, one module may be several
        layers."""
        if running.n_text and self.seen and self.seen[-1] is running:
            raise CaptureError(called_twice(self.layer.name))
        cells = attended.cells
        if (running.latent_size, cells) != self._fitting:
            self._check_grid(cells, running, "keys" if self._is_turned else "queries")
        if not self.calls:
            self._begin(attended, running.latent_size)
        if self.layer.kind == "self" or self.keep.queries.cells is not None:
            return None
        columns = self.keep.tokens
        if columns is not None and max(columns) >= attended.keys:
            raise CaptureError(
                f"Asked for token column {max(columns)} of {self.layer.name}, which has "
                f"{attended.keys} (0 to {attended.keys - 1})."
            )
        return columns

    def _check_grid(self, cells: int, running: Pass, what: str) -> None:
        """Refuse a call whose queries or keys are not the cells of the layer's grid."""
        size = running.latent_size
        grid = self._grid(size, cells)
        if math.prod(grid) == cells:
            self._fitting = size, cells
            return
        found = f"{self.layer.name} ran on {cells} {what}, and its grid is {grid_text(grid)}"
        if not running.n_text:
            raise CaptureError(f"{found}. Pass the latent_size of its queries, (rows, cols).")
        if cells > math.prod(grid):
            raise CaptureError(
                f"{found} ({math.prod(grid)} cells) in a latent of {grid_text(size or ())}, so it "
                "attends to other images too (StyleAligned and consistent characters share keys), "
                f"whose {what} have no place in its own. Turn that off, or leave out the layers "
                "that share them (layers=…)."
            )
        raise CaptureError(
            f"{found} ({math.prod(grid)} cells) in a latent of {grid_text(size or ())}, so "
            "something merges or shrinks its tokens, and where each of them is cannot be known. "
            "Turn it off: token merging (ToMe) by tomesd.remove_patch(pipe), a hires fix that "
            "shrinks deep layers for some steps (Kohya's) likewise. Or leave out the steps with it "
            "(steps=(0.5, 1.0)) or this layer (layers=…)."
        )

    def _begin(self, attended: HeadSums | ProjectedCall, size: Size | None) -> None:
        cells = attended.cells
        self.keys = attended.keys
        self.grid = self._grid(size, cells)
        if self.keep.frames is not None:
            self._choose_frames(self.keep.frames, self.grid)
        self._summed = 1 if self.keep.heads.each else attended.heads

    def _grid(self, size: Size | None, cells: int) -> Size:
        if self.keep.queries.in_text:
            return (cells,)
        return (1, cells) if size is None else self.layer.grid(size)

    def _choose_frames(self, frames: tuple[int, ...], grid: Size) -> None:
        if len(grid) < 3 or max(frames) >= grid[0]:
            there = f"{grid[0]} (0 to {grid[0] - 1})" if len(grid) == 3 else "none: it is an image"
            raise CaptureError(
                f"Asked for frame {max(frames)} of {self.layer.name}, whose grid is "
                f"{grid_text(grid)}. Its frames: {there}."
            )
        each = math.prod(grid[1:])
        self._cells = tuple(frame * each + cell for frame in frames for cell in range(each))
        self.grid = (len(frames), *grid[1:])

    def check_owners(self) -> None:
        """Raise CaptureError if a row attended to another row's keys."""
        if problem := other_owners(self.layer.name, self.rows_apart):
            raise CaptureError(problem)

    def tensors(self) -> list[Tensor]:
        self.queue.work_off()
        self._receive()
        return self.steps if self.total.sums is None else [self.total.sums]

    def _add_apart(self, attended: HeadSums, columns: Columns) -> None:
        """Hold a call's maps one by one, or add them on another device or in another dtype."""
        # First make the call's maps, all heads or their sum, a few heads at a time,
        pieces: Iterable[Tensor]  # to be summed, [images, (heads,) N, tokens]
        if self.keep.heads.each:
            assert isinstance(attended, Attended)
            pieces = [self._chosen_heads(attended.every_head(columns))]
        else:
            pieces = attended.head_sums(columns)
        if self._cells is not None:
            cells = self._cells
            pieces = (chosen(piece, -2, cells) for piece in pieces)
        device = self.keep.device
        dtype = self.keep.held_dtype
        # then held one by one, or moved. On its way from a GPU a map is not waited for until the
        # next.
        if self.keep.steps.each or device is not None:  # a copy to another device is made once
            step = reduce(self._sum, pieces)
            if self.keep.steps.each and self._summed > 1:
                step = step / self._summed
            if not self.keep.grad and travels(step, device):
                self._receive()
                self.copy.send(step.to(dtype))
            else:
                self._hold(step.to(device=device, dtype=dtype))
            return
        if self.keep.steps.last:
            self.total.sums = None
        for piece in pieces:
            piece = piece.to(dtype)
            self.total.sums = (
                piece if self.total.sums is None else self._sum(self.total.sums, piece)
            )

    def _hold(self, step: Tensor) -> None:
        if self.keep.steps.each:
            self.steps.append(step)
        elif self.total.sums is None or self.keep.steps.last:
            self.total.sums = step
        else:
            self.total.sums = self._sum(self.total.sums, step)

    def _receive(self) -> None:
        """Add the maps that are on their way from a GPU, out of their pinned memory."""
        sent = self.copy.take()
        steps = self.keep.steps
        if sent is not None:
            is_added = self.total.sums is not None and not steps.last
            self._hold(sent if is_added else sent.clone())

    @cached_property
    def _in_place(self) -> bool:
        keep = self.keep
        moved = keep.device is not None or keep.held_dtype != torch.float32
        apart = moved or keep.frames is not None
        return not (apart or keep.grad or keep.heads.each or keep.steps.each)

    @cached_property
    def _is_usual(self) -> bool:
        return self._in_place and self.keep.among is None and not self._is_turned

    def map(self) -> Tensor:
        """Return ``[images, (steps,) (heads,) (frames,) rows, cols, tokens]``."""
        self.queue.work_off()
        if self.total.is_spoilt:
            raise CaptureError(
                f"Something wrote into the query or key of {self.layer.name} after the layer had "
                "run, and had not done so in the first step, so what it attended to is lost. "
                "Leave this layer out (layers=…)."
            )
        self._receive()
        if self.total.sums is None:
            held = torch.stack(self.steps, dim=1)
        else:
            held = self.total.sums / (self._summed * (1 if self.keep.steps.last else self.calls))
        return held.to(self.keep.dtype).unflatten(-2, cast(Size, self.grid))

    def _among(self, attended: Attended, n_text: int) -> Attended:
        """Return the softmax over each image's chosen keys."""
        shape = attended.batch, 1, 1, n_text
        if self._kept is None or self._kept.own.shape != shape:
            self._kept = DeviceCopies(self._among_mask(attended.batch, n_text))
        return AmongKeys(attended, self._kept)

    def _among_mask(self, images: int, n_text: int) -> Tensor:
        lists = list(self.keep.among or ())
        if len(lists) not in (1, images) or max(map(max, lists)) >= n_text:
            raise CaptureError(
                f"among has {len(lists)} list(s) of columns up to {max(map(max, lists))}; "
                f"{self.layer.name} has {images} image(s) and {n_text} columns of text. Pass one "
                "list, or one for each image."
            )
        kept = torch.zeros(images, 1, 1, n_text, dtype=torch.bool, device="cpu")
        for image in range(images):
            kept[image, ..., list(lists[image % len(lists)])] = True
        return kept

    def _sum(self, total: Tensor, piece: Tensor) -> Tensor:
        return total + piece if self.keep.grad else total.add_(piece)

    def _chosen_heads(self, probs: Tensor) -> Tensor:
        numbers = self.keep.heads.numbers
        if numbers is None:
            return probs
        if max(numbers) >= probs.shape[1]:
            raise CaptureError(
                f"Asked for head {max(numbers)} of {self.layer.name}, which has {probs.shape[1]} "
                f"(0 to {probs.shape[1] - 1})."
            )
        return chosen(probs, 1, numbers)


def called_twice(name: str) -> str:
    """Return the message for a layer whose columns belong to more than one text."""
    return (
        f"{name} was called twice in one pass of the model (regional prompting does so, with a "
        "text for each region), so which text its columns are of is not known. Turn that off, or "
        "leave this layer out (layers=…)."
    )


class MapsByLayer(Mapping[str, Tensor]):
    """Maps of a store's layers, in order, each computed on access."""

    def __init__(self, sums: Mapping[str, RunningSum]):
        self._sums = sums

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:  # asks that layer only
            raise NotFoundError(
                f"No map of a layer {name!r}. The store has: {', '.join(self) or 'none yet'}."
            )
        return self._sums[name].map()

    def __contains__(self, name: object) -> bool:
        held = self._sums.get(name) if isinstance(name, str) else None
        return held is not None and bool(held.calls)

    def __iter__(self) -> Iterator[str]:
        return (name for name, held in self._sums.items() if held.calls)

    def __len__(self) -> int:
        return sum(1 for _ in self)
