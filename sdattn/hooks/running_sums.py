"""What is held of one layer: a running sum over calls and heads, or each that was asked for."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from ..attention.device_copies import DeviceCopies, chosen
from ..errors import NotFoundError
from .attended import AmongKeys, Attended, Columns
from .host_copy import HostCopy, travels
from .keep import Keep
from .passes import CaptureError


class RunningSum:
    """The maps of one layer: a running sum over calls (the last alone, where no more is asked for)
    and over as many heads as are averaged, or a list with one entry a step.

    Args:
        name: of the layer, for errors.
        keep: what is kept.
        grid: (rows, cols) of its queries.
        heads: of the layer.

    Attributes:
        calls: how many calls were added.
    """

    def __init__(self, name: str, keep: Keep, grid: tuple[int, int], heads: int):
        self.name, self.keep, self.grid = name, keep, grid
        self.summed = 1 if keep.heads.each else heads
        self.calls = 0
        self.total: Tensor | None = None
        self.steps: list[Tensor] = []
        self.copy = HostCopy()
        self._kept: DeviceCopies | None = None  # of the keys that ``among`` names

    def tensors(self) -> list[Tensor]:
        self._receive()
        return self.steps if self.total is None else [self.total]

    def add(self, attended: Attended, columns: Columns) -> None:
        """Take in what the kept rows of one call attended to."""
        # The usual case: one float32 sum over heads and steps, added where it is computed.
        if self._in_place:
            self.total = attended.add_to(None if self.keep.steps.last else self.total, columns)
            self.calls += 1
            return
        # Else the call's maps are made first, all heads or their sum a few heads at a time,
        pieces: Iterable[Tensor]  # to be summed, [images, (heads,) N, tokens]
        if self.keep.heads.each:
            pieces = [self._chosen_heads(attended.every_head(columns))]
        else:
            pieces = attended.head_sums(columns)
        self.calls += 1
        device, dtype = self.keep.device, self.keep.held_dtype
        # then held one by one, or moved. On its way from a GPU a map is not waited for until the
        # next.
        if self.keep.steps.each or device is not None:  # a copy to another device is made once
            step = reduce(self._sum, pieces)
            if self.keep.steps.each and self.summed > 1:
                step = step / self.summed
            if not self.keep.grad and travels(step, device):
                self._receive()
                self.copy.send(step.to(dtype))
            else:
                self._hold(step.to(device=device, dtype=dtype))
            return
        if self.keep.steps.last:
            self.total = None
        for piece in pieces:
            piece = piece.to(dtype)
            self.total = piece if self.total is None else self._sum(self.total, piece)

    def _hold(self, step: Tensor) -> None:
        if self.keep.steps.each:
            self.steps.append(step)
        elif self.total is None or self.keep.steps.last:
            self.total = step
        else:
            self.total = self._sum(self.total, step)

    def _receive(self) -> None:
        """Take in what is on its way from a GPU, out of the pinned memory that it came to."""
        sent, steps = self.copy.take(), self.keep.steps
        if sent is not None:
            is_added = self.total is not None and not steps.last
            self._hold(sent if is_added else sent.clone())

    @property
    def _in_place(self) -> bool:
        """Whether a layer's heads are summed where they are computed, in its running sum."""
        keep = self.keep
        moved = keep.device is not None or keep.held_dtype != torch.float32
        return not (moved or keep.grad or keep.heads.each or keep.steps.each)

    def map(self) -> Tensor:
        """``[images, (steps,) (heads,) rows, cols, tokens]``."""
        self._receive()
        if self.total is None:
            held = torch.stack(self.steps, dim=1)
        else:
            held = self.total / (self.summed * (1 if self.keep.steps.last else self.calls))
        return held.to(self.keep.dtype).unflatten(-2, self.grid)

    def among(self, attended: Attended, n_text: int) -> Attended:
        """The softmax over the keys that were chosen for each image.

        Raises:
            CaptureError: they are of other images, or beyond the text.
        """
        shape = attended.batch, 1, 1, n_text
        if self._kept is None or self._kept.own.shape != shape:
            self._kept = DeviceCopies(self._among_mask(attended.batch, n_text))
        return AmongKeys(attended, self._kept)

    def _among_mask(self, images: int, n_text: int) -> Tensor:
        lists = list(self.keep.among or ())
        if len(lists) not in (1, images) or max(map(max, lists)) >= n_text:
            raise CaptureError(
                f"among has {len(lists)} list(s) of columns up to {max(map(max, lists))}; "
                f"{self.name} has {images} image(s) and {n_text} columns of text. Pass one list, "
                "or one for each image."
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
                f"Asked for head {max(numbers)} of {self.name}, which has {probs.shape[1]} "
                f"(0 to {probs.shape[1] - 1})."
            )
        return chosen(probs, 1, numbers)


class MapsByLayer(Mapping[str, Tensor]):
    """The maps of a store's layers, in their order, each made when it is asked for."""

    def __init__(self, names: Sequence[str], held: Mapping[str, RunningSum]):
        self._names, self._held = names, held

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._held:
            raise NotFoundError(
                f"No map of a layer {name!r}. The store has: {', '.join(self) or 'none yet'}."
            )
        return self._held[name].map()

    def __contains__(self, name: object) -> bool:
        return name in self._held  # without making the map

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._held)

    def __len__(self) -> int:
        return len(self._held)
