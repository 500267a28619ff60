"""`watch_unknown()`: watch a model of no known family, whose layers are found while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..attention import merge_heads
from ..errors import CaptureError, InvalidTypeError, InvalidValueError, OptionError, RunError, warn
from ..follow.capture_warnings import warn_of_running_eagerly
from ..follow.installer import Installation
from ..follow.passes import CaptureWarning, Pass
from ..follow.run import Run, Subscriber, follow
from ..keep.keep import Keep
from ..keep.map_store import CapturedMaps
from ..keep.sums import Sum
from ..look.sdpa import Unlike, kernel_name, no_softmax
from ..models.denoiser import Denoiser
from ..models.denoiser_call import called, compiled_parts, unwrapped
from ..models.families import listed
from ..models.layers import AttentionLayer, LayerSelection, checked_kinds, fits_any, select_layers
from .module_calls import ModuleCalls, SeenCall
from .told import Placed, ToldFamily, told_family
from .told_calls import by_head, placed

Store = TypeVar("Store", bound=CapturedMaps)


@contextmanager
def watch_unknown(
    model: Any,
    store_class: Callable[[Sequence[AttentionLayer], Keep], Store],
    keep: Keep,
) -> Iterator[Store]:
    """Watch a model of no known family while it runs and yield the store, see
    :func:`sdattn.capture`."""
    watch = new_watch(model, store_class([], keep), keep)
    model, run, store = called(model), watch.run, watch.store
    with run.installed:
        if compiled := compiled_parts(model.modules()):
            run.installed.run_eagerly(compiled)
            warn_of_running_eagerly(model)
        run.subscribe(watch)
        run.watch(model)
        try:
            watch.follow_every_module(run.installed)
            yield store
            store.drop_pass()  # one that an error broke off
            watch.check()
        finally:
            watch.close()
    if store.checks_itself:
        store.check()
    run.doubts.tell()


def new_watch(model: Any, store: Store, keep: Keep) -> UnknownWatch[Store]:
    """Return what fills a store, once it follows a model."""
    model = called(model)
    family = _checked_family(model, keep)
    run = follow(
        Denoiser(model, None, family),
        branch=keep.branch,
        guidance=keep.guidance,
        counts_gradients=keep.grad,
        frames=keep.frames,
    )
    selection = keep.layers, checked_kinds(keep.kinds)
    return UnknownWatch(run, store, family, selection, unwrapped(model))


def _checked_family(model: Any, keep: Keep) -> ToldFamily:
    """Return what is told of a model, which sdattn must not know by itself."""
    for name in ("text_states", "latent_size", "step_call", "depth", "max_bytes"):
        if getattr(keep, name) is not None:
            reason = "text= and grid= tell of a model of no known family. Leave it out."
            raise OptionError(name, getattr(keep, name), reason)
    inner = unwrapped(model)
    if not isinstance(inner, nn.Module):
        raise InvalidTypeError(
            f"text= and grid= tell of a model, and this is a {type(inner).__name__}. Pass the "
            "torch module that is called once a step."
        )
    family = listed(type(inner))
    if family and not (family.joined and family.order_of(inner) is None):  # it reads this model
        raise OptionError(
            "text",
            keep.text,
            f"a {type(inner).__name__} is of the family {family.name}. Leave it out.",
        )
    if not keep.queries.usual or keep.refine or keep.space != "attention":
        raise InvalidTypeError(
            "queries=, keys=, refine= and space= are for models of a known family. Leave them out "
            "where text= and grid= tell of the model."
        )
    return told_family(inner, keep.text, keep.grid, keep.image)


@dataclass(eq=False)
class UnknownWatch(Subscriber, Generic[Store]):
    """Running capture of a model of no known family.

    In the first pass the calls of every module are seen; then only of those that made one.
    """

    run: Run
    store: Store
    family: ToldFamily
    selection: tuple[LayerSelection, Sequence[str]]
    model: nn.Module
    running: Pass | None = None  # if its maps are kept
    hooks: Installation = field(default_factory=Installation)  # on modules
    modules: dict[str, nn.Module] = field(default_factory=dict)  # with a call that is kept
    places: dict[tuple[str, int, int, int], Placed | None] = field(default_factory=dict)
    found: dict[str, AttentionLayer] = field(default_factory=dict)  # chosen or not
    others: dict[str, bool] = field(default_factory=dict)  # calls that fit neither fact, and
    # whether their keys are as many as the text's tokens
    settled: set[str] = field(default_factory=set)  # layers whose rows are known
    is_known: bool = False  # a pass has ended
    unlike: dict[Any, Unlike] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = ModuleCalls(self.see, self._looks, self.run.is_followed)

    def follow_every_module(self, installed: Installation) -> None:
        """Follow the model and each of its modules."""
        modules = dict(self.model.named_modules())
        self.calls.follow(installed, {"": modules.pop("")})
        self.calls.follow(self.hooks, modules)

    def _looks(self) -> bool:
        return self.running is not None and self.run.is_open()

    def close(self) -> None:
        """Stop following modules."""
        with ExitStack() as ending:  # each, whatever becomes of the others
            ending.callback(self.store.close)
            ending.callback(self.calls.close)
            ending.callback(self.hooks.remove)
            ending.callback(self.modules.clear)
            ending.callback(self.found.clear)

    def _follow_found_modules(self) -> None:
        """Follow only modules that made an attention call that is kept, or another one inside of
        such a module, and those that did not run yet; the model's own hooks stay."""
        modules = dict(self.model.named_modules())
        kept = set(self.modules)
        inside = {path for path, around in self.calls.around.items() if around & kept}
        self.calls.only = kept | inside | (modules.keys() - self.calls.ran)
        self.hooks.remove()
        self.hooks = Installation()
        chosen = {path: m for path, m in modules.items() if path and path in self.calls.only}
        self.calls.follow(self.hooks, chosen)

    def begin_pass(self, begun: Pass) -> None:
        self.store.drop_pass()  # one that an error broke off
        if self.modules and self.is_known and self.calls.only is None:
            self._follow_found_modules()
        self.calls.doubtful.clear()  # of a pass that broke off
        self.calls.folded.clear()
        if not begun.rows:
            self.store.skipped += 1
            return
        self.store.begin_pass(begun)
        if self.store.keeps(len(self.store.passes) - 1):
            self.running = begun

    def end_pass(self, ended: Pass) -> None:
        with torch._C.DisableTorchFunction():  # the model itself is still running
            self.store.end_pass()
        if self.running is None:
            return
        self.running = None
        for unlike in self.calls.unlike:
            _, multiple, difference = self.unlike.get(unlike.by, unlike)
            self.unlike[unlike.by] = unlike._replace(
                multiple=multiple.fmax(unlike.multiple),
                difference=difference.fmax(unlike.difference),
            )
        self.calls.unlike.clear()
        self._check_rows()
        self.settled.update(self.store.sums)
        if not self.is_known:
            self._check_first_pass()
            self.is_known = True

    def _check_rows(self) -> None:
        """Refuse layers whose first call did not show which image each row belongs to."""
        for name in self.calls.several:
            raise RunError(
                f"{name}: its attention is of several images where the model got one (guidance "
                "inside the model, perhaps). Capture the module inside that gets them all, or "
                "leave this layer out (layers=…)."
            )
        for name in self.calls.doubtful:
            raise RunError(
                f"{name}: heads and images share an axis of its attention, and what it made "
                "reached no linear layer as images of heads, so which image each row belongs to is "
                "not known. Run one image at a time, or leave this layer out (layers=…)."
            )

    def _check_first_pass(self) -> None:
        """Refuse or tell what the first pass did not show to be right."""
        self._check_unlike()
        lost = [name for name, has_text in self.others.items() if has_text]
        if lost and self.store.layers and self.selection[0] is None:
            warn(
                f"{len(lost)} attention call(s) have as many keys as the text has tokens, and are "
                f"in no map: {'; '.join(lost)}.",
                CaptureWarning,
            )

    def see(self, seen: SeenCall) -> Placed | None:
        """Add one attention call of the running pass to its layer's maps, and return its place;
        None if it is in no map."""
        running = self.running
        if running is None or running.latent_size is None:
            return None
        path = seen.module or "model"
        if seen.call is None:
            self.others[f"{path} (with keys of its own, or nested tensors)"] = False
            return None
        has_text = seen.call.shape[-1] == running.n_text != seen.call.shape[-2] > 1
        call = by_head(seen.call, running.batch, running.latent_size)
        if isinstance(call, str):
            self.others[f"{path} ({call})"] = has_text
            return None
        batch, heads, queries, keys = call.shape
        frames = batch // running.batch
        place = self._place(seen.module, queries, keys, frames, running)
        if place is None:
            self.others[f"{path} ({queries} queries, {keys} keys)"] = has_text
        elif (layer_sum := self._sum_of(seen, place, heads, running)) is not None:
            if seen.is_part and place.level:
                raise RunError(
                    f"{path} attends to the same keys several times, in slices of its "
                    "queries, so how they make its grid is not known. Turn slicing off, or leave "
                    "this layer out (layers=…)."
                )
            self.modules[seen.module] = layer_sum.layer.module
            self._doubt(seen, layer_sum.layer.name, batch, heads)
            layer_sum.take(placed(call, place, frames))
            return place
        return None

    def _doubt(self, seen: SeenCall, name: str, batch: int, heads: int) -> None:
        """In a layer's first pass, doubt the order of images and heads where they could be
        exchanged, or images where they could be heads."""
        assert seen.call is not None
        output = seen.call.output
        if output is None or name in self.settled:
            return
        if batch == 1 and output.ndim == 3:
            self.calls.folded[name] = output.detach()
        elif batch > 1 and (output.ndim == 3 or batch == heads):
            if output.shape[-2] != seen.call.shape[-2]:  # [B, N, heads, d]
                output = output.transpose(1, 2)
            whole = output.detach().reshape(batch, heads, *output.shape[-2:])
            self.calls.doubtful[name] = merge_heads(whole)

    def check(self) -> None:
        """Raise for what the run did not show to be right; this may wait for the device."""
        self._check_unlike()
        found = list(self.found.values())
        _, kinds = self.selection
        if self.store.passes and not any(layer.kind in kinds for layer in found):
            of_other_kinds = [f"{layer.name} ({layer.kind})" for layer in found]
            unused = [f"{name} (a softmax without a product)" for name in self.calls.unused]
            seen = "; ".join([*self.others, *unused, *of_other_kinds]) or "none at all"
            raise CaptureError(
                f"No {' or '.join(kinds)} attention of the {type(self.model).__name__} fits text="
                f"{_named(self.family.text)} and a grid of {self.store.latent_size}. Seen were: "
                f"{seen}. sdattn.inspect_attention(model, ...) says what fits."
            )
        if self.store.passes:  # each choice fits some layer, so that a misspelt one is noticed
            select_layers(found, *self.selection, self.store.latent_size)
        if self.calls.unused:
            names = ", ".join(self.calls.unused)
            warn(
                f"{len(self.calls.unused)} module(s) made a softmax whose use was not seen, so "
                f"what they attend to is in no map: {names}.",
                CaptureWarning,
            )

    def _check_unlike(self) -> None:
        for by, multiple, difference in self.unlike.values():
            if multiple.device.type == "meta":
                continue
            self.store.kernels[kernel_name(by)] = float(difference)
            if multiple > 1:
                raise RunError(no_softmax(by))

    def _place(
        self, name: str, queries: int, keys: int, frames: int, running: Pass
    ) -> Placed | None:
        key = name, queries, keys, frames
        if key not in self.places:
            assert running.latent_size is not None
            layers, _ = self.selection
            size, length, is_named = running.latent_size, running.n_text, layers is not None
            try:
                place = self.family.place(name, queries, keys, size, length, is_named, frames)
            except InvalidValueError:
                layer = AttentionLayer(name, "block", "joint", 0, 0, None)
                if fits_any(layer, layers, size):
                    raise
                place = None  # of a layer that was not asked for
            self.places[key] = place
        return self.places[key]

    def _sum_of(self, seen: SeenCall, place: Placed, heads: int, running: Pass) -> Sum | None:
        """Return the layer's maps, new ones if it runs for the first time; None if it was not asked
        for."""
        name = seen.name(place.kind)
        if name not in self.found:
            module = self.model.get_submodule(seen.module)
            layer = AttentionLayer(name, "block", place.kind, place.level, heads, module)
            self.found[name] = layer
            layers, kinds = self.selection
            if layer.kind in kinds and fits_any(layer, layers, running.latent_size):
                self.store.add_layer(layer).running = running
        return self.store.sums.get(name)


def _named(text: Any) -> str:
    return f"a tensor {list(text.shape)}" if isinstance(text, Tensor) else repr(text)
