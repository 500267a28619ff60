"""`LayerPart`: the part to keep of a layer's calls, fixed at the first of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..attention.calls import ProjectedCall
from ..attention.core import grid_text
from ..attention.device_copies import DeviceCopies, chosen
from ..follow.passes import CaptureError, Pass
from ..look.attended import AmongKeys, Attended, ByQuery, Columns, HeadSums, Turned
from ..models.denoiser_call import Size
from ..models.layers import AttentionLayer
from .keep import Keep


class LayerPart:
    """Part that is kept of each call of a layer: its columns, cells and heads.

    Args:
        layer: layer that was called.
        keep: what a capture keeps.
        attended: kept rows of the layer's first call.
        running: its pass.

    Attributes:
        keys: key columns of the layer, kept or not.
        columns: kept key columns; None for all.
        grid: (rows, cols) of its queries, for a video (frames, rows, cols) with the kept frames.
        heads: number of heads that a map is the sum of.

    Raises:
        CaptureError: the cells are not the layer's grid, or columns, heads or frames are missing.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        keep: Keep,
        attended: HeadSums | ProjectedCall,
        running: Pass,
    ):
        self.layer = layer
        self.keep = keep
        self._size = running.latent_size
        self._n_text = running.n_text
        self._frames = running.frame_rows  # that are rows of the batch
        self._is_turned = keep.queries.turned
        self._check_cells(attended)
        self._shape = attended.cells, attended.keys
        self._queries: Columns = None
        if self._is_turned:
            self._queries = keep.queries.numbers(layer, self._size, self._frames)
        self.keys = attended.keys
        cells = attended.cells * self._frames
        images = attended.batch // self._frames
        if not isinstance(attended, ProjectedCall):
            shown = self._turned_together(attended)
            self.keys = shown.keys
            cells = shown.cells
            images = shown.batch
        self.grid = self._grid(cells)
        self._cells: tuple[int, ...] | None = None  # of the frames that are kept; None for all
        if keep.frames is not None:
            self._choose_frames(keep.frames)
        self.columns: Columns = None
        if layer.kind != "self" and keep.queries.cells is None:
            self.columns = keep.tokens
        self.heads = 1 if keep.heads.each else attended.heads
        self._check_numbers("token column", self.columns, self.keys)
        self._check_numbers("head", keep.heads.numbers, attended.heads)
        self._among: DeviceCopies | None = None
        if keep.among is not None and layer.kind != "self":
            self._among = DeviceCopies(self._among_mask(images, running.n_text or self.keys))

    def check(self, attended: HeadSums | ProjectedCall) -> None:
        """Refuse a call on other cells than the first."""
        cells, keys = self._shape
        if attended.cells != cells or (self._is_turned and attended.keys != keys):
            self._check_cells(attended)

    def shown(self, attended: HeadSums) -> HeadSums:
        """Return the attention of a call's kept rows as it is kept: turned round, or among some
        keys, with a video's frames in one row."""
        attended = self._turned_together(attended)
        if self._among is None:
            return attended
        assert isinstance(attended, Attended)  # can_record() refuses what asks for heads
        return AmongKeys(attended, self._among)

    def map_of(self, attended: HeadSums) -> Tensor:
        """Return a call's map in a new tensor, ``[images, (heads,) N, tokens]``, the sum over heads
        if these are averaged; a few heads are computed at a time."""
        if self.keep.heads.each:
            assert isinstance(attended, Attended)
            numbers = self.keep.heads.numbers
            if numbers is not None:
                return self._of_frames(attended.some_heads(numbers, self.columns))
            return self._of_frames(attended.every_head(self.columns))
        total: Tensor | None = None
        for piece in map(self._of_frames, attended.head_sums(self.columns)):
            if total is None:
                total = piece
            else:
                total = total + piece if self.keep.grad else total.add_(piece)
        assert total is not None
        return total

    def _of_frames(self, maps: Tensor) -> Tensor:
        return maps if self._cells is None else chosen(maps, -2, self._cells)

    def _turned_together(self, attended: HeadSums) -> HeadSums:
        if self._is_turned:
            assert isinstance(attended, ByQuery)  # Queries.check() refuses what is not
            attended = Turned(attended.of_queries(self._queries))
        return attended.together(self._frames) if self._frames > 1 else attended

    def _check_cells(self, attended: HeadSums | ProjectedCall) -> None:
        """Refuse a call whose queries, and keys if maps show these, are not the layer's grid."""
        if not self._is_turned or self.keep.queries.cells is not None:
            self._check_grid(attended.cells * self._frames, "queries")
        if self._is_turned:
            self._check_grid(attended.keys * self._frames, "keys")

    def _check_grid(self, cells: int, what: str) -> None:
        size = self._size
        grid = self._grid(cells)
        if math.prod(grid) == cells:
            return
        found = f"{self.layer.name} ran on {cells} {what}, and its grid is {grid_text(grid)}"
        if not self._n_text:
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

    def _grid(self, cells: int) -> Size:
        if self.keep.queries.in_text:
            return (cells,)
        return (1, cells) if self._size is None else self.layer.grid(self._size)

    def _choose_frames(self, frames: tuple[int, ...]) -> None:
        grid = self.grid
        if len(grid) < 3 or max(frames) >= grid[0]:
            there = f"{grid[0]} (0 to {grid[0] - 1})" if len(grid) == 3 else "none: it is an image"
            raise CaptureError(
                f"Asked for frame {max(frames)} of {self.layer.name}, whose grid is "
                f"{grid_text(grid)}. Its frames: {there}."
            )
        each = math.prod(grid[1:])
        cells = list[int]()
        for frame in frames:
            cells += range(frame * each, (frame + 1) * each)
        self._cells = tuple(cells)
        self.grid = (len(frames), *grid[1:])

    def _check_numbers(self, what: str, numbers: Columns, there: int) -> None:
        if numbers is not None and max(numbers) >= there:
            raise CaptureError(
                f"Asked for {what} {max(numbers)} of {self.layer.name}, which has {there} "
                f"(0 to {there - 1})."
            )

    def _among_mask(self, images: int, n_text: int) -> Tensor:
        """Return which of the text's keys the softmax is over, bool ``[images, 1, 1, n_text]``."""
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
