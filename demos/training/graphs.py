"""Steps of training as CUDA graphs: one launch a step in place of some thousand.

A miniature's operations take a GPU microseconds each, less than Python needs to ask for them.
Source: "Whole-network capture" in PyTorch's notes on CUDA semantics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

WARM = 5  # steps of a shape that run as they are, before one is recorded

Shapes = tuple[tuple[int, ...], ...]


class Graphs:
    """A training step that is recorded once for each shape of what it is shown, then replayed.

    Attributes:
        learn: a step; given tensors, returns the loss. It may ask nothing back from the GPU.
    """

    def __init__(self, learn: Callable[..., Tensor]) -> None:
        self.learn = learn
        self.aside = torch.cuda.Stream()
        self.seen: Counter[Shapes] = Counter()
        self.kept: dict[Shapes, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}

    def __call__(self, *shown: Tensor) -> Tensor:
        """Take one step; return its loss, on the GPU."""
        shapes = tuple(tuple(one.shape) for one in shown)
        self.seen[shapes] += 1
        if self.seen[shapes] <= WARM:
            return self.as_it_is(*shown)
        if shapes not in self.kept:
            self.kept[shapes] = self.record(*shown)
        graph, held, loss = self.kept[shapes]
        for place, one in zip(held, shown, strict=True):
            place.copy_(one)
        graph.replay()
        return loss.clone()

    def as_it_is(self, *shown: Tensor) -> Tensor:
        """Take a step beside the main stream, as one that will be recorded has to."""
        self.aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.aside):
            loss = self.learn(*shown)
        torch.cuda.current_stream().wait_stream(self.aside)
        return loss

    def record(self, *shown: Tensor) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        """Return the graph of a step, where it reads what it is shown, and where its loss will be;
        nothing is learnt meanwhile."""
        graph, held = torch.cuda.CUDAGraph(), [one.clone() for one in shown]
        with torch.cuda.graph(graph, stream=self.aside, capture_error_mode="thread_local"):
            loss = self.learn(*held)
        return graph, held, loss
