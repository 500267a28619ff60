from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import nn

from ..attention.joint_processor import Spans
from ..errors import InvalidValueError
from ..follow.drawn import DrawnPrompts
from ..follow.installer import put_innermost
from ..follow.pass_options import Guidance
from ..follow.passes import Pass
from ..follow.run import Subscriber, follow
from ..follow.text_watch import RepeatedCalls
from ..models.denoiser_call import innermost
from ..models.families.unet import is_unet
from ..models.guidance import guided_order
from ..models.layers import Kind, Place
from ..models.pipeline import Pipeline
from ..models.replaced_calls import function_name, replaced_call
from .controlled_layers import (
    calls_in_a_pass,
    check_guidance,
    check_prompts,
    controlled_layers,
    holds,
    is_suspended,
    is_taken,
    standing,
)

_HOW = (
    "Attention slicing, fused projections, an IP-Adapter and others replace processors. Set the "
    "store's after them: pipe.{}(store)). store.detach() lets go of the model and keeps the maps."
)
_UNET = "unet.set_attn_processor(sdattn.TorchAttnProcessor"
_TRANSFORMER = "transformer.set_attn_processor(sdattn.TorchJointProcessor"


class Attachable(Protocol):
    """A store as its link sees it, see :class:`sdattn.AttentionStore`."""

    guidance: Guidance | None
    cur_step: int
    passes: int
    drawn: DrawnPrompts | None
    repeats: RepeatedCalls

    def reset(self) -> None: ...
    def note(self, problem: str) -> None: ...
    def pass_over(self, why: str) -> None: ...
    def begin_pass(
        self, begun: Pass, *, levels: int, places: Sequence[Place], prompts: slice | None
    ) -> None: ...
    def end_pass(self, calls: int) -> None: ...


class _Layer(NamedTuple):
    place: Place
    kind: Kind
    heads: int
    before: object  # the processor that it held when the store was attached


class Attachment(Subscriber):
    """The link between a store and the model whose layers call it.

    Nothing of the model is replaced. Its hooks go with :meth:`close` or with the store, whichever
    is first; both ends are held weakly.

    Attributes:
        is_suspended: True if the store sits this pass out: other processors replace its own for a
            while.

    Raises:
        TypeError: a model whose layers' places are not known.
        ValueError: unknown guidance, or guidance that contradicts the store's.
    """

    def __init__(self, target: Pipeline | nn.Module, store: Attachable):
        denoiser, layers = controlled_layers(target)
        try:
            if denoiser.pipeline is not None:
                guided_order(denoiser.pipeline)
        except ValueError:
            raise InvalidValueError(
                f"How a {type(target).__name__} lays out guidance in its batch is not known. "
                "Attach its UNet, store.attach(pipe.unet), and say it: "
                "AttentionStore(guidance='batch') if the first half of the batch is "
                "unconditional, guidance=None to keep every row."
            ) from None
        self.run = follow(denoiser, hears_texts=True)
        check_guidance(self.run, store)
        self._levels = denoiser.levels
        # weak, so that the weights go with their pipeline
        self._layers = weakref.WeakKeyDictionary[nn.Module, _Layer]()
        for layer in layers:
            held = innermost(layer.module.processor)
            self._layers[layer.module] = _Layer(layer.place, layer.kind, layer.heads, held)
        self.n_layers = len(self._layers)
        self._heads = {layer.heads for layer in layers}
        self._places = tuple(dict.fromkeys(layer.place for layer in layers))
        self._kinds = Counter(layer.kind == "self" for layer in layers)
        self._how = _HOW.format(_UNET if is_unet(denoiser.model) else _TRANSFORMER)
        self._store = weakref.ref(store)
        self._is_new_run = False
        self._begin_call()
        self.forget()
        store.repeats = self.run.doubts.repeats
        self.run.subscribe(self)
        self.run.watch(denoiser.model)
        self.close = weakref.finalize(store, self.run.installed.remove)

    def forget(self) -> None:
        """Forget what was counted in this run."""
        self._n_missed = 0  # passes
        self._n_seen = 0
        self._n_calls: int | None = None  # in the first pass

    def place(self, layer: nn.Module) -> Place | None:
        """Return a layer's place, such as ``"down"`` or ``"double"``; None for another model's."""
        known = self._layers.get(layer)
        return None if known is None else known.place

    def joint_spans(self, layer: nn.Module) -> Spans | None:
        """Return the places of image and text in a layer's running call, ``slice(0, 0)`` for no
        text, or None if not known."""
        known = self._layers.get(layer)
        if known is not None and known.kind != "joint":
            return slice(0, 0), slice(0, 0)
        return self.run.reader.shared_spans()

    def begin_call(self, is_cross: bool) -> bool:
        """Count a call; return True if the store must look at it."""
        if not self.run.in_call:
            return True
        if not self._calls:
            self._looks = self._begins()
        self._calls[not is_cross] += 1
        return self._looks

    def check_rows(self, store: Attachable, rows: int, batch: int | None) -> None:
        """Make the store remember rows that are not its batch times a layer's heads."""
        fits = batch and rows % batch == 0 and rows // batch in self._heads
        if self.run.in_call and not fits:
            store.note(
                f"it was handed {rows} rows for a batch of {batch} and {sorted(self._heads)} "
                "heads. Hand it [batch*heads, N, T]."
            )

    def problem(self, store: Attachable) -> str:
        """Describe what the store missed in the last run; empty if it saw all."""
        if not self._n_missed:
            return "" if self._n_seen else self.run.doubts.strays()
        for layer in self._layers:
            replaced = replaced_call(layer)
            if replaced is not None and holds(innermost(layer.processor), store):
                method, function = replaced
                return (
                    f"the layers' `{method}` was replaced, by {function_name(function)}, and what "
                    "stands there calls no processor. Undo that, or let it call the store."
                )
        which = f"the last {self._n_missed} passes"
        if self._n_seen:
            which = f"{self._n_missed} of {self._n_missed + self._n_seen} passes"
        return (
            f"none of the {self.n_layers} layers called it in {which}. They hold "
            f"{standing(self._layers, store)}. {self._how}"
        )

    def restore(self, store: Attachable) -> str:
        """Put back the previous processors; return a warning about layers that keep theirs."""
        n_own = 0
        n_registered = 0
        for module, layer in self._layers.items():
            processor = innermost(module.processor)
            if hasattr(processor, "displaced"):
                n_registered += 1  # whoever put it there puts back what is under it
            elif holds(layer.before, store):
                n_own += 1
            elif not (isinstance(processor, nn.Module) and list(processor.parameters())):
                put_innermost(module, layer.before)
        if n_own:
            return (
                f"{n_own} layers keep the processor of this store, which was set before it was "
                "attached, so that what they held before is not known. Set others, or attach "
                "first."
            )
        if n_registered:
            return (
                f"{n_registered} layers are held by a registered controller and get the store's "
                "processor back when it is taken out. Remove that one first."
            )
        return ""

    def begin_run(self, first: Pass) -> None:
        self.forget()
        self._is_new_run = True

    def begin_pass(self, begun: Pass) -> None:
        self._begin_call()

    def stray(self, call: Pass) -> None:
        self._begin_call()

    def failed(self, error: Exception) -> None:
        self._begin_call()
        self._error = f"a pass could not be read ({type(error).__name__}: {error})"

    def _begin_call(self) -> None:
        """Begin to count the layers' calls; the store's pass begins with the first of them."""
        self.is_suspended = False
        self._looks = False
        self._calls: Counter[bool] = Counter()  # by "is self-attention"
        self._error = ""

    def _begins(self) -> bool:
        """Begin a pass when its first layer calls: by then, hooks that set processors have run."""
        store = self._store()
        begun = self.run.running
        self.is_suspended = is_suspended(self._layers, store)
        if store is None or self.is_suspended:
            return False
        if begun is None:
            store.pass_over(self._error)
            return False
        if begun.stray:
            return False
        if self._is_new_run:
            missed = self._n_missed
            self._is_new_run = False
            store.reset()
            self._n_missed = missed
        if begun.of_no_prompt:
            return False
        if begun.again:
            store.note(
                f"{self.run.doubts.step_calls()} capture(pipe, step_call=0) keeps one of them."
            )
        prompts = self._rows(store, begun)
        # if every row is kept, the first may be the negative prompts'
        is_known = store.guidance is not None or prompts == slice(0, begun.batch)
        if not store.cur_step:
            store.drawn = self.run.drawn if is_known else None
            check_prompts(store, self.run.drawn)
            try:
                self.run.refuse_crop()
            except InvalidValueError as error:
                store.note(str(error))
        schedule = self.run.reader.schedule
        store.passes = 1 if schedule is None else len(schedule)
        store.begin_pass(begun, levels=self._levels, places=self._places, prompts=prompts)
        return True

    def _rows(self, store: Attachable, begun: Pass) -> slice | None:
        """Return the prompts' rows of the batch, or None if no pipeline knows them."""
        try:
            prompts = begun.prompts
        except InvalidValueError as error:
            if store.guidance in ("auto", "batch"):  # else the pipeline is not asked
                store.note(str(error))
            return None
        if prompts is None and store.guidance == "auto" and begun.batch % 2 == 0:
            store.note(
                f"the model was called with a batch of {begun.batch} outside of its pipeline, so "
                "whether its first half is unconditional is not known. Make the store with "
                "guidance=None (every row is an image), 'batch' (it is) or 'passes' (the first of "
                "two passes is)."
            )
        return prompts

    def end_pass(self, ended: Pass) -> None:
        store = self._store()
        if store is None or ended.of_no_prompt:
            return
        if not self._calls:
            # It is suspended, or had its turn before all layers got another controller.
            had_its_turn = store.cur_step and is_taken(self._layers)
            if not (had_its_turn or is_suspended(self._layers, store)):
                self._n_missed += 1
        elif self._looks:
            self._n_seen += 1
            if (
                self.run.reader.schedule is None
            ):  # a bare model has no runs, so no pass can be missing
                self._n_missed = 0
            self._check_calls(store)
            store.end_pass(self._calls.total())

    def _check_calls(self, store: Attachable) -> None:
        """Make the store remember layers that were skipped, or that ran twice."""
        calls = self._calls.total()
        expected = 0
        for module, layer in self._layers.items():
            expected += calls_in_a_pass(innermost(module.processor), layer.kind, store)
        if self._n_calls is None:
            self._n_calls = calls
        n_joint = self.n_layers - self._kinds[True]
        ran_twice = self._calls[False] > n_joint or self._calls[True] > self.n_layers
        if calls < expected:
            store.note(
                f"a pass should have {expected} calls, but {calls} came. Turn off anything that "
                "skips layers (a cache?), or let only the other layers call the store."
            )
        elif ran_twice:
            store.note(
                f"{calls} calls came in one pass of {self.n_layers} layers: some ran twice. Let "
                "only the others call the store."
            )
        elif calls != self._n_calls:
            store.note(
                f"{self._n_calls} calls came in the first pass and {calls} in a later one. The "
                f"layers hold {standing(self._layers, store)}. Set processors before the run. "
                f"{self._how}"
            )
