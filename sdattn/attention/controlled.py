"""`ControlledProcessor`: the base of attention processors that are open to a controller."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from ..errors import InvalidTypeError, InvalidValueError
from .calls import AttentionCall
from .calls import Spans as Spans
from .core import unfold_heads


class Controller(Protocol):
    """Reads or edits the probabilities of one layer after the other."""

    def __call__(self, attn: Tensor, is_cross: bool, place_in_unet: str, /) -> Tensor | None:
        """Take ``[B*heads, N, T]``; return what to use instead, or None for ``attn`` itself."""


class LayerController:
    """Base of a controller that knows the layers that call it.

    Attributes:
        may_edit: False if it leaves what it is shown as it is. In joint attention it is then shown
            a part of a larger tensor, and copies what it keeps.
    """

    may_edit = True

    def show(
        self, layer: nn.Module, batch: int, attn: Tensor, is_cross: bool, place: str
    ) -> Tensor | None:
        """Take a layer's ``[B*heads, N, T]``, as a :class:`Controller` does."""
        raise NotImplementedError

    def joint_spans(self, layer: nn.Module) -> Spans | None:
        """Return where image and text are in a layer of joint attention, or None if unknown."""

    def pass_over(self, why: str) -> None:
        """Remember a call that cannot be shown; raise if it was to be edited."""


class ControlledProcessor:
    """A processor that computes its probabilities and has a controller read or edit them.

    Attributes:
        asks: whether the controller is asked now; otherwise the attention is plain.
        watchers: called with each :class:`sdattn.attention.calls.AttentionCall`, after any edit.
    """

    def __init__(self, controller: Controller | None = None, place: str = ""):
        check_controller(controller)
        self.controller = controller
        self.place = place
        self.asks = True
        self.has_asked = False
        self.watchers: list[Callable[[AttentionCall], object]] = []

    def _show(self, attn: Any, make: Callable[[], AttentionCall]) -> None:
        """Show the watchers, if there are any, the call that ``make`` returns."""
        if watchers := (*self.watchers, *getattr(attn, "watchers", ())):
            call = make()
            for watcher in watchers:
                watcher(call)

    def _edited(self, attn: Any, folded: Tensor, batch: int, is_cross: bool) -> Tensor:
        """Return contiguous ``[B*heads, N, T]`` as the controller leaves it."""
        controller = self.controller
        self.has_asked = True
        if isinstance(controller, LayerController):
            edited = controller.show(attn, batch, folded, is_cross, self.place)
        else:
            assert controller is not None
            edited = controller(folded, is_cross, self.place)
        if edited is None:
            edited = folded
        if edited.shape != folded.shape:
            raise InvalidValueError(
                f"The controller {type(controller).__name__} was given attention "
                f"{list(folded.shape)} ([batch*heads, queries, keys]) and returned "
                f"{list(edited.shape)}. Return the same shape, or None after an edit in place."
            )
        return edited

    def _controlled(self, attn: Any, folded: Tensor, batch: int, is_cross: bool) -> Tensor:
        if self.controller is None or not self.asks:
            return folded
        return self._edited(attn, folded, batch, is_cross).to(folded.dtype)


def check_controller(controller: object) -> None:
    """Raise TypeError unless it can be called as ``controller(probs, is_cross, place)``."""
    if controller is None:
        return
    if any(hasattr(controller, name) for name in ("components", "attn_processors")):
        kind = type(controller).__name__  # its call takes three arguments too
        raise InvalidTypeError(
            f"A {kind} is a pipeline or its model, not a controller. Pass what the processor calls "
            "with its probabilities: store = sdattn.AttentionStore(pipeline=pipe), then "
            "sdattn.TorchAttnProcessor(store)."
        )
    takes = inspect.Signature()  # for an object that cannot be called
    if callable(controller):
        try:
            takes = inspect.signature(controller)
        except (TypeError, ValueError):  # a builtin, which may take anything
            return
    try:
        takes.bind(None, True, "down")
    except TypeError as error:
        raise InvalidTypeError(
            f"A {type(controller).__name__} is called as controller(probs, is_cross, place), and "
            f"takes {takes} ({error}). Pass a function of these three that hands over what it "
            "needs, for example lambda probs, is_cross, place: store(probs, is_cross, place, 8)."
        ) from None


@contextmanager
def unasked(processors: Iterable[object]) -> Iterator[None]:
    """Do not ask these processors' controllers inside the block."""
    asking = [one for one in processors if isinstance(one, ControlledProcessor) and one.asks]
    for processor in asking:
        processor.asks = False
    try:
        yield
    finally:
        for processor in asking:
            processor.asks = True


def mask_by_head(mask: Tensor, batch: int, heads: int, n_keys: int) -> Tensor:
    """Return a layer's mask, ``[B, 1 or N, T]`` or folded ``[B*heads, 1 or N, T]``, as 4-D."""
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


def projected_out(to_out: nn.Module, hidden_states: Tensor) -> Tensor:
    layers = to_out if isinstance(to_out, nn.ModuleList) else [to_out]
    for layer in layers:  # a linear projection and, in diffusers, a dropout
        hidden_states = layer(hidden_states)
    return hidden_states
