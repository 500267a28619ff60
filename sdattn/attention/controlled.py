"""`ControlledProcessor`: what attention processors open to a controller have in common."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import InvalidValueError, RunError
from .core import fold_heads, unfold_heads

Controller = Callable[[Tensor, bool, str], Tensor | None]


class ControlledProcessor:
    """A processor that computes its probabilities, and has a controller read or edit them.

    Args:
        controller, place: as of :class:`sdattn.TorchAttnProcessor`.

    Attributes:
        asks: whether the controller is asked now; the attention is plain where it is not.
        watchers: shown the probabilities ``[B, heads, N, T]`` that make the output, behind any
            edit.
    """

    def __init__(self, controller: Controller | None = None, place: str = ""):
        self.controller = controller
        self.place = place
        self.asks = True
        self.watchers: list[Callable[[Tensor], object]] = []

    def _show(self, attn: Any, probs: Tensor) -> None:
        for watcher in (*self.watchers, *getattr(attn, "watchers", ())):
            watcher(probs)

    def _edited(self, folded: Tensor, is_cross: bool, place: str) -> Tensor:
        """What the controller makes of contiguous ``[B*heads, N, T]``; an edit in place counts."""
        assert self.controller is not None
        edited = self.controller(folded, is_cross, place)
        if edited is None:
            edited = folded
        if edited.shape != folded.shape:
            raise InvalidValueError(
                f"The controller {type(self.controller).__name__} was given attention "
                f"{list(folded.shape)} ([batch*heads, queries, keys]) and returned "
                f"{list(edited.shape)}. Return the same shape, or None after an edit in place."
            )
        return edited

    def _controlled(self, attn: Any, probs: Tensor, is_cross: bool) -> Tensor:
        """``[B, heads, N, T]`` as the controller leaves them."""
        if self.controller is None or not self.asks:
            return probs
        return self._edited_whole(probs, is_cross, self._place(attn, len(probs)))

    def _edited_whole(self, probs: Tensor, is_cross: bool, place: str) -> Tensor:
        folded = fold_heads(probs).contiguous()  # [B*heads, N, T]
        return self._edited(folded, is_cross, place).to(probs.dtype).view_as(probs)

    def _place(self, attn: Any, batch: int) -> str:
        """The layer's place: the one given, or what a store that knows the layer says."""
        begin_layer = getattr(self.controller, "begin_layer", None)
        if begin_layer is None:
            return self.place
        known = begin_layer(attn, batch)
        if not (self.place or known):
            raise RunError(
                f"The {type(self.controller).__name__} does not know which layers call it, and a "
                f"layer of class {type(attn).__name__} did. {self.controller.HOW}"  # type: ignore[union-attr]
            )
        return self.place or known


@contextmanager
def unasked(processors: Iterable[Any]) -> Iterator[None]:
    """Leave the controllers of these processors unasked for the length of a block."""
    open_ones = [one for one in processors if isinstance(one, ControlledProcessor)]
    before = [one.asks for one in open_ones]
    for one in open_ones:
        one.asks = False
    try:
        yield
    finally:
        for one, asks in zip(open_ones, before, strict=True):
            one.asks = asks


def mask_by_head(mask: Tensor, batch: int, heads: int, n_keys: int) -> Tensor:
    """A layer's mask, ``[B, 1 or N, T]`` or folded ``[B*heads, 1 or N, T]``, as 4-D."""
    if mask.ndim == 3 and mask.shape[0] == batch * heads and heads > 1:
        mask = unfold_heads(mask, heads)  # [B, heads, 1 or N, T]
    elif mask.ndim == 3 and mask.shape[0] in (1, batch):
        mask = mask.unsqueeze(1)  # [B, 1, 1 or N, T]
    if mask.ndim != 4 or mask.shape[-1] != n_keys:
        raise InvalidValueError(
            f"An attention mask of shape {list(mask.shape)} does not fit {batch} images, {heads} "
            f"heads and {n_keys} keys. Pass [batch, 1 or queries, keys]."
        )
    return mask


def projected_out(to_out: Any, hidden_states: Tensor) -> Tensor:
    """Through a layer's output projection: a module, or a list of modules in a row."""
    layers = to_out if isinstance(to_out, nn.ModuleList) else [to_out]
    for layer in layers:  # a linear projection and, in diffusers, a dropout
        hidden_states = layer(hidden_states)
    return hidden_states
