"""`Callers`: which layers of a model are to call a store in a pass, and whether they did."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..models.attention_layer import Kind
from ..models.denoiser_call import innermost
from ..models.layers import AttentionLayer, Place
from .passes import CaptureError

_HOW_TO_GO_ON = (
    "Attention slicing, fused projections, an IP-Adapter and others replace processors. Set the "
    "store's after them, pipe.{}(store)); or let go of the model, store.detach(). "
    "sdattn.capture(pipe) looks on, whatever is set."
)
_OF_UNET = "unet.set_attn_processor(sdattn.TorchAttnProcessor"
_OF_TRANSFORMER = "transformer.set_attn_processor(sdattn.TorchJointProcessor"


class Callers:
    """The layers of a model that a store is attached to, and their calls pass by pass.

    Those whose processor has the store for its controller are to call it, once in each pass, and
    the same ones all through a run. Of a store that other code has called, by patching the layers,
    all that is known is whether it was called at all.

    Attributes:
        calls: how often the store was called in this pass, by whatever way.
        rests: whether the store sits this pass out, though some layers call it: in others
            something was put in the place of its processors for a while.
        skips: whether this pass is of no prompt, and its calls are not looked at.
        places: of all layers, each once, in the order in which they run.
    """

    def __init__(self, layers: Sequence[AttentionLayer]):
        # so that the weights are freed with their pipeline, not only with its last store
        names = {layer.module: (layer.name, layer.place, layer.kind) for layer in layers}
        self._layers = weakref.WeakKeyDictionary(names)
        self.places = tuple(dict.fromkeys(layer.place for layer in layers))
        is_joint = any(layer.kind == "joint" for layer in layers)
        self._how = _HOW_TO_GO_ON.format(_OF_TRANSFORMER if is_joint else _OF_UNET)
        self.calls, self.rests, self.skips = 0, False, False
        self._expected = 0  # calls in this pass
        self._holding: frozenset[str] = frozenset()  # layers whose processor has the store
        self._of_run: frozenset[str] = frozenset()  # those of the first pass
        self._called: set[str] | None = None  # None between passes
        self._had_its_turn = False  # the store was called since it was attached

    def __len__(self) -> int:
        return len(self._layers)

    def place(self, module: nn.Module) -> Place | None:
        """``"down"``, ``"mid"`` or ``"up"``, ``"double"`` or ``"single"``; None for a layer of
        another model."""
        known = self._layers.get(module)
        return None if known is None else known[1]

    def kind(self, module: nn.Module) -> Kind | None:
        """``"cross"``, ``"self"`` or ``"joint"``; None likewise."""
        known = self._layers.get(module)
        return None if known is None else known[2]

    def begin_pass(self) -> None:
        """Forget the pass before."""
        self.calls, self.rests, self.skips = 0, False, False
        self._holding, self._called = frozenset(), set()

    def look(self, store: Any) -> int:
        """Look which layers hold a processor of the store, in a pass that has begun.

        Returns:
            How often they call in a pass, all together; 0 where the store rests.
        """
        calls = {
            name: calls_in_a_pass(module.processor, kind)
            for module, (name, _, kind) in self._layers.items()
            if next(_controllers(module.processor)) is store
        }
        self._holding, self._expected = frozenset(calls), sum(calls.values())
        self.rests = self._is_suspended(store)
        return 0 if self.rests else self._expected

    def check_run(self, store: Any) -> None:
        """Refuse layers that came or went since the first pass of the run.

        Raises:
            CaptureError: there are some.
        """
        # The first pass of a run says which layers take part; from then on they are to stay the
        # same.
        if not (store.cur_step or store.cur_att_layer):
            self._of_run = self._holding
        gone, new = self._of_run - self._holding, self._holding - self._of_run
        if gone:
            raise CaptureError(
                f"{len(gone)} of the {len(self._of_run)} layers that call the "
                f"{type(store).__name__} have lost its processor since the first pass; they hold: "
                f"{self._standing(store, gone)}. {self._how} Between runs of a bare UNet call "
                "store.reset()."
            )
        if new:
            raise CaptureError(
                f"{len(new)} layers hold a processor of the {type(store).__name__} that did not in "
                f"the first pass: {_some(new)}. Set processors before the run, or call "
                "store.reset()."
            )

    def note(self, module: nn.Module) -> None:
        """Take note of a layer that is about to call.

        Raises:
            CaptureError: it has called in this pass.
        """
        if self._called is None or module not in self._layers:
            return
        name, *_ = self._layers[module]
        if name in self._called:
            raise CaptureError(
                f"{name} was run twice in one pass of the model, so its maps would count as those "
                "of two steps. Set processors that call the store in the other layers only."
            )
        self._called.add(name)

    def end_pass(self, store: Any) -> None:
        """Refuse a pass that the store did not see whole.

        Raises:
            CaptureError: no layer called, or not all that hold a processor of the store.
        """
        called, self._called = self._called, None
        # None: it was attached in the middle of the pass
        if called is None or self.rests or self.skips:
            return
        name = type(store).__name__
        if not self.calls and not self._is_suspended(store) and not self._has_had_its_turn():
            raise CaptureError(
                f"None of the {len(self)} layers of this model called the {name} that is attached "
                f"to it. They hold: {self._standing(store)}. {self._how}"
            )
        if self._holding and self.calls != self._expected:
            missed = self._holding - called
            by = f", not by {_some(missed)}" if missed else ""
            twice = "" if self._expected == len(self._holding) else f" {self._expected} times"
            raise CaptureError(
                f"{len(self._holding)} layers are to call the {name}{twice} in each pass, and in "
                f"this one it was called {self.calls} times{by}. Turn off what skips layers (a "
                "cache?), or set processors that call the store in the other layers only."
            )
        self._had_its_turn = self._had_its_turn or self.calls > 0

    def _is_suspended(self, store: Any) -> bool:
        """Whether what has replaced the store's processors will be taken out again."""
        each = (_controllers(module.processor) for module in self._layers)
        return any(one is store for _, *suspended in each for one in suspended)

    def _has_had_its_turn(self) -> bool:
        """Whether the store was called before, and another controller is in all layers now."""
        each = (next(_controllers(module.processor)) for module in self._layers)
        return self._had_its_turn and all(controller is not None for controller in each)

    def _standing(self, store: Any, names: frozenset[str] | None = None) -> str:
        """What some layers hold, all of them by default: ``32 x AttnProcessor2_0``."""
        held = [
            _described(module.processor, store)
            for module, (name, *_) in self._layers.items()
            if names is None or name in names
        ]
        return ", ".join(f"{number} x {kind}" for kind, number in Counter(held).items())


def calls_in_a_pass(processor: Any, kind: Kind) -> int:
    """How often a layer of this kind calls the controller of its processor: of joint attention
    twice where what the picture pays to itself is shown."""
    both = kind == "joint" and getattr(innermost(processor), "shows_picture", False)
    return 2 if both else 1


def _controllers(processor: Any) -> Iterator[Any]:
    """The controller that a layer calls, None for none; then those that it will call again when
    what has replaced them for a while is taken out."""
    while processor is not None:
        processor = innermost(processor)
        yield getattr(processor, "controller", None)
        processor = getattr(processor, "displaced", None)


def _described(processor: Any, store: Any) -> str:
    processor = innermost(processor)
    kinds = (kind.__name__ for kind in type(processor).__mro__)
    name = next(kind for kind in kinds if not kind.startswith("_"))
    if not hasattr(processor, "controller"):
        return name
    controller = processor.controller
    if controller is None or controller is store:
        return f"{name} with {'no controller' if controller is None else 'this store'}"
    return f"{name} with another {type(controller).__name__}"


def _some(names: frozenset[str]) -> str:
    first, more = sorted(names)[:3], len(names) - 3
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
