"""Every attention call of a model of which nothing is known, with the module that makes it.

While the model runs, a mode of torch's sees its functions. An attention call is a call of torch's
``scaled_dot_product_attention`` or of what answers in its place, of torch's multi-head attention,
or a softmax whose result is the first factor of a product. The module is the innermost one that
runs just then. In the first pass every module is followed; after it only those that made a call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import merge_heads
from ..attention.calls import UNKNOWN, AttentionCall
from ..errors import RunError
from ..follow.installer import Installation
from ..look.dispatched import hidden_backend, watching
from ..look.sdpa import PRODUCTS, TORCHS, SdpaWatch, factors_of
from ..look.unknown_processors import agrees
from .multi_head import (
    FUNCTION,
    call_of_encoder_layer,
    call_of_function,
    call_of_module,
    is_encoder_layer,
    is_multi_head,
    may_fuse,
)

SOFTMAX = (torch.softmax, Tensor.softmax, nn.functional.softmax)
LINEAR: Any = nn.functional.linear
LOOKED_AT = frozenset({TORCHS, FUNCTION, LINEAR, *SOFTMAX, *PRODUCTS})
Shape = tuple[int, int]  # of scores or probabilities: how many numbers in all, and in a softmax


@dataclass(eq=False)
class SeenCall:
    """One attention call.

    Attributes:
        module: path of the innermost module that ran.
        made_by: the function that made it.
        call: what it computed; its heads may be folded into its rows. None if that cannot be seen.
        number: the call's place among its module's calls while it ran this time, from 0.
        names: names that layers have so far, by module, number and kind.
        is_part: True if a call that the module made before had the very same values: the queries
            come in slices.
        arrived: numbers of images that the output went on as, by heads put together, in the next
            linear layers; noted while blind.
    """

    module: str
    made_by: str
    call: AttentionCall | None
    number: int
    names: dict[tuple[str, int, str | None], str]
    is_part: bool = False
    arrived: set[int] = field(default_factory=set)

    def name(self, kind: str | None) -> str:
        """Return the name of the layer, once it is known of what kind the call is: the module's
        path for its first call, ``path:number:kind`` for its others. A first call of another kind
        in a later pass is one of these too."""
        layer = self.module, self.number, kind
        if layer not in self.names:
            name = self.module or "model"
            if self.number or name in self.names.values():
                name = ":".join(filter(None, (name, str(self.number), kind)))
            self.names[layer] = name
        return self.names[layer]


@dataclass(eq=False)
class _Running:
    """A module that runs, how many attention calls it made, and softmaxes that no product used, its
    own and its parts' (``nn.Softmax``), each with the path of the module that made it."""

    path: str
    module: nn.Module
    calls: int = 0
    softmaxes: list[tuple[Shape, str]] = field(default_factory=list)
    queries: dict[Shape, Tensor] = field(default_factory=dict)  # first factors of scores
    values: list[weakref.ref[Tensor]] = field(default_factory=list)

    def used(self, shape: Shape) -> bool:
        """Take out a softmax of a shape, the first that was made; False if there is none."""
        for number, (made, _) in enumerate(self.softmaxes):
            if made == shape:
                del self.softmaxes[number]
                return True
        return False

    def had(self, value: Tensor | None) -> bool:
        """Check whether a call had the very same values, and note them."""
        before = any(one() is value for one in self.values) and value is not None
        if value is not None:
            self.values.append(weakref.ref(value))
        return before


class ModuleCalls(SdpaWatch):
    """Watch of a model's attention calls.

    Args:
        see: function that gets each call when it was made.
        looks: function that tells, when a module begins, whether anybody looks.
        is_followed: function that tells whether this thread's modules are followed.
        is_blind: True makes every attention put out the same numbers in any run, so that no token
            learns of another.
            Otherwise no bit is changed: torch's own multi-head attention and encoder layers choose
            another operation while a mode is there, so the mode is left while they run.

    Attributes:
        only: paths of the modules that are followed; None for all that have hooks.
        ran: paths of the modules that ran, while all were followed.
        around: paths of modules that made a call or may run fused, each with the paths of those it
            ran in.
        unused: paths of modules with a softmax that no product was seen to use, and its last axis.
        doubtful: attention outputs ``[B, N, heads*d]``, by layer, whose heads were put together row
            by row and which no linear layer got so far: its rows may be other images' than they
            seem.
        folded: attention outputs ``[heads, N, d]``, by layer, for one image as it seems.
        several: names of those that a linear layer got as several images.
    """

    def __init__(
        self,
        see: Callable[[SeenCall], object],
        looks: Callable[[], bool] = lambda: True,
        is_followed: Callable[[], bool] = lambda: True,
        is_blind: bool = False,
    ):
        super().__init__()
        self.unused: dict[str, int] = {}
        self.doubtful: dict[str, Tensor] = {}
        self.folded: dict[str, Tensor] = {}
        self.several: set[str] = set()
        self.only: set[str] | None = None
        self.ran: set[str] = set()
        self.around: dict[str, set[str]] = {}
        self._names: dict[tuple[str, int, str | None], str] = {}
        self._see = see
        self._looks = looks
        self._is_followed = is_followed
        self._is_blind = is_blind
        self._running: list[_Running] = []
        self._entered: AbstractContextManager[None] | None = None  # while the mode is at work
        self._parts: set[nn.Module] = set()  # torch's encoder layers, and what is inside
        self._hidden: set[str] = set()  # kernels that do not call torch's attention
        self._gone: tuple[SeenCall, Tensor] | None = None  # the last call and its output, if blind
        self._inside = 0  # what answers in the place of torch's attention, and may call that

    def follow(self, installed: Installation, modules: Mapping[str, nn.Module]) -> None:
        """Follow the calls of some modules, by path, until the installation is removed.

        Torch's encoder layers run as one fused operation unless they or their parts hold hooks, so
        they are followed from outside, and their parts not at all. Scripted modules take no hooks,
        and what they compute is no call that could be seen.
        """
        layers = {module: path for path, module in modules.items() if is_encoder_layer(module)}
        for layer in layers:
            self._parts.update(layer.modules())
        if layers:
            installed.around_from_outside(layers, self._begin, self._end)
        for path, module in modules.items():
            if module in self._parts or isinstance(module, torch.jit.ScriptModule):
                continue
            hidden = hidden_backend(getattr(module, "processor", None))
            if hidden is not None:
                self._hidden.add(hidden)
            installed.around(module, partial(self._begin, path), self._end)

    def close(self) -> None:
        """Leave the mode, also one that an interrupt left behind."""
        self._running.clear()
        self._switch()

    def wants_logsumexp(self, call: AttentionCall) -> bool:
        # With it, the text's share of joint attention needs the scores of the text's keys alone.
        # Cross-attention needs them all.
        return not self._is_blind and call.key.shape[-2] >= call.query.shape[-2]

    def attend(self, attend: Any, by: Any, *args: Any, **kwargs: Any) -> Tensor:
        blinds = self._is_blind and not self._inside
        self._inside += 1
        try:
            replaced = getattr(nn.functional.scaled_dot_product_attention, "function", None)
            if blinds and by is not None and by is replaced:
                super().attend(attend, by, *args, **kwargs)  # compared with torch's own
                self.calls.pop()
            if blinds:
                attend, by = partial(_zeros, *attend.args, **attend.keywords), None
            output = super().attend(attend, by, *args, **kwargs)
        finally:
            self._inside -= 1
        call = self.calls.pop()
        if self._inside or not self._running:
            return output
        return self._made("scaled_dot_product_attention", call, output)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in LOOKED_AT:
            return func(*args, **kwargs)
        if func is LINEAR and (self.doubtful or self.folded or self._gone):
            self._compare(args[0] if args else kwargs["input"])
        output = super().__torch_function__(func, types, args, kwargs)
        if not self._running:
            return output
        if func is FUNCTION:
            attended, weights = output
            call = call_of_function(args, kwargs)
            return self._made(FUNCTION.__name__, call, attended), weights
        running = self._running[-1]
        if func in SOFTMAX and output.ndim in (3, 4):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            running.softmaxes.append((_shape(output, dim), running.path or "model"))
        elif func in PRODUCTS:
            return self._product(running, factors_of(func, [*args, *kwargs.values()]), output)
        return output

    def _product(self, running: _Running, factors: Sequence[Any], output: Tensor) -> Tensor:
        """Note a product whose first factor has the shape of a softmax that was made before. One
        with a plain matrix mixes heads or features, and is no sum of values."""
        if len(factors) != 2 or factors[0].ndim not in (3, 4) or factors[1].ndim < 3:
            return output
        probs, value = factors
        if not running.used(_shape(probs)):
            if self._is_blind:
                running.queries[_shape(output)] = probs
            return output
        query = running.queries.get(_shape(probs), UNKNOWN)
        call = AttentionCall(query, value=value, probs=probs, output=output)
        return self._made("softmax and product", call, output)

    def _made(self, made_by: str, call: AttentionCall | None, output: Tensor) -> Tensor:
        running = self._running[-1]
        self._note_around(running.path)
        number = running.calls
        running.calls += 1
        is_part = call is not None and running.had(call.value)
        with torch._C.DisableTorchFunction():  # what looks makes softmaxes of its own
            seen = SeenCall(running.path, made_by, call, number, self._names, is_part)
            if self._is_blind:
                output = _blind(output)
                self._gone = seen, output
            self._see(seen)
        return output

    def _note_around(self, path: str) -> None:
        self.around.setdefault(path, set()).update(one.path for one in self._running)

    def _begin(self, path: str, module: nn.Module, *_: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            torch.compiler.disable(_refuse_graph)(path)
        is_followed = self.only is None or path in self.only
        if is_followed and self._looks():
            if not path:
                self._running.clear()  # what an interrupt left behind
            if self.only is None:
                self.ran.add(path)
            if may_fuse(module):
                self._note_around(path)
            self._running.append(_Running(path, module))
            self._switch()

    def _end(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not self._running or not self._is_followed():
            return
        if self._running[-1].module is not module:
            return
        if self._entered is None and output is not None:
            if is_multi_head(module):
                self._made(FUNCTION.__name__, call_of_module(module, args, kwargs), output[0])
            elif is_encoder_layer(module):
                self._made(FUNCTION.__name__, call_of_encoder_layer(module, args, kwargs), output)
        last = self._running.pop()
        if self._running:  # the product may follow in a module around this one
            self._running[-1].softmaxes += last.softmaxes
            self._running[-1].queries |= last.queries
        else:
            self.unused |= {path: keys for (_, keys), path in last.softmaxes}
        self._switch()

    def _switch(self) -> None:
        """Enter the mode or leave it, as the modules that run now need it."""
        is_left_alone = not self._is_blind and any(may_fuse(one.module) for one in self._running)
        is_needed = bool(self._running) and not is_left_alone
        if is_needed and self._entered is None:
            self._entered = watching(self, self._hidden, self._is_followed)
            self._entered.__enter__()
        elif not is_needed and self._entered is not None:
            entered = self._entered
            self._entered = None
            entered.__exit__(None, None, None)

    def _compare(self, arrived: Tensor) -> None:
        """Strike out each doubtful output that a linear layer gets, or a part of it."""
        for name, output in list(self.doubtful.items()):
            if _is_part_of(output, arrived):
                del self.doubtful[name]
        for name, output in self.folded.items():
            images = len(arrived) if arrived.ndim == 3 else 1
            if images < 2 or arrived.numel() != output.numel() or len(output) % images:
                continue
            if agrees(merge_heads(output.unflatten(0, (images, -1))), arrived):
                self.several.add(name)
        if self._gone is not None:
            _note_images(*self._gone, arrived)


def _note_images(seen: SeenCall, output: Tensor, arrived: Tensor) -> None:
    """Note as how many images a linear layer gets a call's output, whose heads are folded into its
    rows, or as many as its images."""
    images = len(arrived) if arrived.ndim == 3 else 1
    if seen.call is None or seen.call.output is None:
        return
    if output.ndim == 3 and len(output) % images == 0:
        output = output.unflatten(0, (images, -1))
    elif output.ndim == 4 and output.shape[-2] != seen.call.shape[-2]:  # [B, N, heads, d]
        output = output.transpose(1, 2)
    if output.ndim == 4 and _is_part_of(merge_heads(output), arrived):
        seen.arrived.add(images)


def _is_part_of(output: Tensor, arrived: Tensor) -> bool:
    """Check whether a linear layer got an output ``[B, N, heads*d]``, or its first or last tokens,
    perhaps with more features behind."""
    if arrived.ndim != 3 or len(arrived) != len(output):
        return False
    got = arrived[..., : output.shape[-1]]
    length = got.shape[1]
    return any(agrees(part, got) for part in (output[:, :length], output[:, -length:]))


def _refuse_graph(path: str) -> None:
    raise RunError(
        f"torch.compile compiles a function around the watched {path or 'model'}, whose attention "
        "calls are not seen in its graph. Call the plain function, or compile the model itself, "
        "which runs eagerly while it is watched."
    )


def _shape(scores: Tensor, dim: int = -1) -> Shape:
    return scores.numel(), scores.shape[dim] if scores.ndim else 1


def _zeros(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    return query.new_zeros(*query.shape[:-1], value.shape[-1])


def _blind(output: Tensor) -> Tensor:
    """Return small numbers of an output's shape, no two rows alike, the same in any run."""
    places = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    return (places.mul_(1.7).sin_() / 100).to(output.dtype).reshape(output.shape)
