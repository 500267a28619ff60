"""The types of an attention layer of diffusers, its processor and what that is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from ..models.pipeline import Model

Output = Tensor | tuple[Tensor, ...]  # of a processor: the image's, or the image's and the text's
Arguments = dict[str, Any]  # of a processor, by diffusers' names
IsOpen = Callable[[], bool]  # whether a pass of the followed run is open in this thread


class Layer(Model, Protocol):
    """An attention layer of diffusers."""

    heads: int
    _modules: dict[str, nn.Module | None]


class Processor(Protocol):
    """The object that a layer holds to compute its attention."""

    def __call__(self, attn: Layer, /, *args: Any, **kwargs: Any) -> Output: ...
