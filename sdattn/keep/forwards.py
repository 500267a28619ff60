"""`Forwards`: which layers of a run have a forward that other code put there, pass by pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..follow.installer import Installation
from ..models.layers import AttentionLayer
from ..models.replaced_calls import replaced_call

if TYPE_CHECKING:
    from ..look.observers import ObservingProcessor


class _Forward(NamedTuple):
    """A layer's forward when last asked for, None for its class's; and where its observer is, if it
    has one."""

    own: Any
    slot: AttentionLayer | None = None
    observer: ObservingProcessor | None = None


def _own(layer: AttentionLayer) -> Any:
    from ..look.replaced_forward import own_forward  # torch's compiler comes with it

    return own_forward(layer.module)


class Forwards:
    """The forwards of a run's layers, and their observers, see :mod:`sdattn.look.replaced_forward`.

    Args:
        installed: the run's installation.
    """

    def __init__(self, installed: Installation):
        self._installed = installed
        self._known: dict[AttentionLayer, _Forward] = {}

    def replaced(self, layers: Iterable[AttentionLayer]) -> list[AttentionLayer]:
        """Return the layers that got a forward of other code since this was last asked."""
        found = []
        for layer in layers:
            known = self._known.get(layer)
            held = vars(layer.module).get("forward")
            own = None if held is None else _own(layer)
            if known is not None and known.own is own:
                continue
            if known is not None and known.slot is not None:
                self._installed.leave(known.slot)  # what was put there since stays
            self.forget(layer)  # the new one may call it
            self._known[layer] = _Forward(own)
            if replaced_call(layer.module) is not None:
                found.append(layer)
        return found

    def put(
        self, layer: AttentionLayer, slot: AttentionLayer, observer: ObservingProcessor
    ) -> None:
        """Put an observer around a layer's forward."""
        self._known[layer] = _Forward(self._known[layer].own, slot, observer)
        self._installed.put(slot, observer)

    def forget(self, layer: AttentionLayer) -> None:
        """End the observer of a layer's forward, if there is one."""
        known = self._known.pop(layer, None)
        if known is not None and known.observer is not None:
            known.observer.end()

    def close(self) -> None:
        """Let go of all."""
        self._known.clear()
