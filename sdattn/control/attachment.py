from __future__ import annotations

import weakref
from collections import Counter
from typing import NamedTuple, cast

from torch import nn

from ..attention.joint_processor import Spans
from ..errors import InvalidValueError
from ..hooks.drawn import PromptWatch
from ..hooks.installer import Installation, PassHooks, in_backward, put_innermost
from ..hooks.pass_reader import PassReader
from ..hooks.passes import Pass, Strays
from ..models.attention_layer import Kind
from ..models.denoiser_call import Size, innermost
from ..models.guidance import guided_order
from ..models.layers import Place, is_unet
from ..models.pipeline import Pipeline
from ..models.running_call import running_variables
from ..models.values import refuse_crop
from .controlled_layers import check_guidance, controlled_layers
from .held import FollowingStore, calls_in_a_pass, holds, is_suspended, is_taken, standing

_HOW = (
    "Attention slicing, fused projections, an IP-Adapter and others replace processors. Set the "
    "store's after them: pipe.{}(store)). store.detach() lets go of the model and keeps the maps."
)
_UNET = "unet.set_attn_processor(sdattn.TorchAttnProcessor"
_TRANSFORMER = "transformer.set_attn_processor(sdattn.TorchJointProcessor"


class _Layer(NamedTuple):
    place: Place
    kind: Kind
    heads: int
    before: object  # the processor that it held when the store was attached


class Attachment:
    """The link between a store and the model whose layers call it: hooks before and after its
    forward.

    Nothing of the model is replaced. The hooks go with :meth:`close` or with the store, whichever
    is first; both ends are held weakly.

    Attributes:
        in_pass: True between the two hooks.
        rests: True if the store sits this pass out: other processors replace its own for a while.

    Raises:
        TypeError: a model whose layers' places are not known.
        ValueError: unknown guidance, or guidance that contradicts the store's.
    """

    def __init__(self, target: Pipeline | nn.Module, store: FollowingStore):
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
        self._passes = PassReader(denoiser)
        check_guidance(self._passes, store)
        self.strays = Strays(denoiser.model)
        self._levels = denoiser.levels
        known = {
            la.module: _Layer(la.place, la.kind, la.heads, innermost(la.module.processor))
            for la in layers
        }
        self._layers = weakref.WeakKeyDictionary(known)  # the weights go with their pipeline
        self._places = tuple(dict.fromkeys(layer.place for layer in layers))
        self._kinds = Counter(layer.kind == "self" for layer in layers)
        self._how = _HOW.format(_UNET if is_unet(denoiser.model) else _TRANSFORMER)
        self._store = weakref.ref(store)
        self.in_pass, self.rests, self._is_new_run = False, False, False
        self.forget()
        installed = Installation()
        PassHooks(installed, denoiser.model, self._before_pass, self._after_pass)
        self._prompts = PromptWatch(denoiser, installed)
        installed.undo(self._passes.close)
        self._passes.listen()
        self.close = weakref.finalize(store, installed.remove)

    @property
    def n_layers(self) -> int:
        return len(self._layers)

    def forget(self) -> None:
        self._n_missed, self._n_seen = 0, 0  # passes of this run
        self._n_calls: int | None = None  # in the first pass of the run

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
        return self._passes.shared_spans()

    def begin_call(self, is_cross: bool) -> bool:
        """Count a call; return True if the store must look at it."""
        if not self.in_pass:
            return True
        if not self._calls:
            self._looks = self._begins()
        self._calls[not is_cross] += 1
        return self._looks

    def check_rows(self, store: FollowingStore, rows: int, batch: int | None) -> None:
        """Make the store remember rows that are not its batch times a layer's heads."""
        heads = {layer.heads for layer in self._layers.values()}
        if self.in_pass and (batch is None or rows // batch not in heads):
            store.note(
                f"it was handed {rows} rows for a batch of {store._batch} and {sorted(heads)} "
                "heads. Hand it [batch*heads, N, T]."
            )

    def problem(self, store: FollowingStore) -> str:
        """Describe what the store missed in the last run; empty if it saw all."""
        if not self._n_missed:
            return "" if self._n_seen else str(self.strays)
        which = f"the last {self._n_missed} passes"
        if self._n_seen:
            which = f"{self._n_missed} of {self._n_missed + self._n_seen} passes"
        return (
            f"none of the {self.n_layers} layers called it in {which}. They hold "
            f"{standing(self._layers, store)}. {self._how}"
        )

    def restore(self, store: FollowingStore) -> str:
        """Put back the previous processors; return a warning about layers that keep theirs."""
        n_own = n_held = 0
        for module, layer in self._layers.items():
            held = innermost(module.processor)
            if hasattr(held, "displaced"):
                n_held += 1  # whoever put it there puts back what is under it
            elif holds(layer.before, store):
                n_own += 1
            elif not (isinstance(held, nn.Module) and list(held.parameters())):
                put_innermost(module, layer.before)
        if n_own:
            return (
                f"{n_own} layers keep the processor of this store, which was set before it was "
                "attached, so that what they held before is not known. Set others, or attach "
                "first."
            )
        if n_held:
            return (
                f"{n_held} layers are held by a registered controller and get the store's "
                "processor back when it is taken out. Remove that one first."
            )
        return ""

    def _before_pass(
        self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if in_backward():
            return
        self.in_pass, self.rests, self._looks = True, False, False
        self._calls: Counter[bool] = Counter()  # by "is self-attention"
        self._found: Pass | None = None
        self._error = ""
        try:
            found = self._found = self._passes.read(model, args, kwargs)
        except Exception as error:  # any error: the model must go on
            self._error = f"a pass could not be read ({type(error).__name__}: {error})"
            return
        if found.stray:
            return self.strays.note(found.stray)
        if found.begins_run:
            self.forget()
            self._is_new_run = True
        store, call = self._store(), self._passes.call
        if found.order is None and store is not None and call is not None:
            store.repeats.note(call)

    def _begins(self) -> bool:
        """Begin a pass when its first layer calls: by then, hooks that set processors have run."""
        store, found = self._store(), self._found
        self.rests = is_suspended(self._layers, store)
        if store is None or self.rests:
            return False
        if found is None:
            store.pass_over(self._error)
            return False
        if found.stray:
            return False
        if self._is_new_run:
            missed, self._is_new_run = self._n_missed, False
            store.reset()
            self._n_missed = missed
        if found.of_no_prompt:
            return False
        prompts = self._rows(store, found)
        # if every row is kept, the first may be the negative prompts'
        is_known = store.guidance is not None or prompts == slice(0, found.batch)
        if not store.cur_step:
            store.drawn = self._prompts.drawn() if is_known else None
            try:
                refuse_crop(running_variables(self._passes.pipeline) or {})
            except InvalidValueError as error:
                store.note(str(error))
        store.texts.add(found.text_changed, found.text_by_frame)
        schedule = self._passes.schedule
        store.passes = 1 if schedule is None else len(schedule)
        size = cast(Size, found.latent_size)
        store.begin_pass(found.batch, size, self._levels, prompts, self._places)
        return True

    def _rows(self, store: FollowingStore, found: Pass) -> slice | None:
        """Return the prompts' rows of the batch, or None if no pipeline knows them."""
        try:
            prompts = found.prompts
        except InvalidValueError as error:
            if store.guidance in ("auto", "batch"):  # else the pipeline is not asked
                store.note(str(error))
            return None
        if prompts is None and store.guidance == "auto" and found.batch % 2 == 0:
            store.note(
                f"the model was called with a batch of {found.batch} outside of its pipeline, so "
                "whether its first half is unconditional is not known. Make the store with "
                "guidance=None (every row is an image), 'batch' (it is) or 'passes' (the first of "
                "two passes is)."
            )
        return prompts

    def _after_pass(self) -> None:
        store = self._store()
        if store is None or not self.in_pass or in_backward():
            return
        self.in_pass = False
        if self._found is not None and (self._found.stray or self._found.of_no_prompt):
            return
        if not self._calls:
            # It rests, or had its turn before all layers got another controller.
            rests = is_suspended(self._layers, store)
            self._n_missed += not (rests or (store.cur_step and is_taken(self._layers)))
        elif self._looks:
            self._n_seen += 1
            if self._passes.schedule is None:  # a bare model has no runs, so no pass can be missing
                self._n_missed = 0
            self._check_calls(store)
            store.end_pass(self._calls.total())

    def _check_calls(self, store: FollowingStore) -> None:
        """Make the store remember layers that were skipped, or that ran twice."""
        calls = self._calls.total()
        expected = sum(
            calls_in_a_pass(innermost(module.processor), layer.kind, store)
            for module, layer in self._layers.items()
        )
        first = self._n_calls = calls if self._n_calls is None else self._n_calls
        text, more = self._calls[False], self._calls[True]
        joint = self.n_layers - self._kinds[True]
        if calls < expected:
            store.note(
                f"a pass should have {expected} calls, but {calls} came. Turn off anything that "
                "skips layers (a cache?), or let only the other layers call the store."
            )
        elif text > joint or more > self._kinds[True] + joint:
            store.note(
                f"{calls} calls came in one pass of {self.n_layers} layers: some ran twice. Let "
                "only the others call the store."
            )
        elif calls != first:
            store.note(
                f"{first} calls came in the first pass and {calls} in a later one. The layers hold "
                f"{standing(self._layers, store)}. Set processors before the run. {self._how}"
            )
