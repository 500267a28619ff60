"""`watch_model()`: install the observing processors, watch the model run, restore everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..attention.device_copies import DeviceCopies
from ..errors import InvalidValueError, OptionError, warn
from ..models.denoiser_call import is_compiled
from ..models.layers import (
    AttentionLayer,
    Denoiser,
    LayerSelection,
    checked_kinds,
    find_denoiser,
    select_layers,
    unwrapped,
)
from .budget import Budget, warn_of_much
from .capture_warnings import (
    RunWarnings,
    may_stop,
    stopped_of,
    warn_of_image_prompts,
    warn_of_running_eagerly,
)
from .drawn import PromptWatch, running_crop
from .expected import Expected
from .installer import Installation, PassHooks
from .joint import JointLook
from .joint_checks import check_backends, check_ways
from .keep import Keep
from .map_store import CapturedMaps
from .other_text import OtherTextLook, TextStream, asked_layers
from .output_space import check_frames
from .pass_options import Guidance
from .pass_reader import PassReader
from .passes import CaptureError, CaptureWarning, Pass
from .recorders import Recorders, can_record
from .refined import Spreading, spreading_layers

if TYPE_CHECKING:
    from .observers import Look, ObservingProcessor

Store = TypeVar("Store", bound=CapturedMaps)


@contextmanager
def watch_model(
    target: Any,
    store_class: Callable[[Sequence[AttentionLayer], Keep], Store],
    keep: Keep,
    *,
    layers: LayerSelection,
    kinds: Sequence[str],
    branch: str,
    guidance: Guidance | None,
    text_states: torch.Tensor | None,
    latent_size: tuple[int, int] | None,
    max_bytes: int | Budget | None = None,
) -> Iterator[Store]:
    """Watch a model while it runs and yield the store, see :func:`sdattn.capture`.

    Args:
        target: pipeline or its model.
        store_class: class of the store.
        keep: steps, heads, columns and frames to keep.
        layers, kinds, branch, guidance, text_states, latent_size: as for :func:`sdattn.capture`.
        max_bytes: likewise, or a budget that several captures share.
    """
    # All that cannot be is refused here, before anything is put into the model.
    denoiser, budget = find_denoiser(target), Budget.of(max_bytes)
    _check(denoiser, keep)
    found = every = denoiser.layers
    if text_states is not None:
        found = list(filter(asked_layers(denoiser, text_states, kinds), every))
    keep.queries.check(text_states=text_states is not None)
    if not keep.queries.usual:
        kinds = checked_kinds(kinds, keep.queries.kinds)
    chosen = select_layers(found, layers, kinds)
    check_backends(chosen)
    check_ways(denoiser, chosen, "self" if keep.refine else None, keep.space)
    store = store_class(spreading_layers(chosen, keep.depth), keep)
    reader = PassReader(denoiser, branch, guidance, latent_size, keep.grad, keep.frames)
    other = denoiser.stands_in
    twins = [] if other is None else denoiser.family.find_layers(unwrapped(other))
    # a user may replace any of them
    with closing(reader), Installation([*every, *twins]) as installed:
        reader.listen()
        asked = None if text_states is None else DeviceCopies(text_states)
        prompts = PromptWatch(denoiser, installed) if asked is None else None
        warns = RunWarnings(denoiser, branch)
        watch = _Watch(reader, installed, store, (layers, kinds), asked, prompts, warns, budget)
        if asked is not None and any(layer.kind == "joint" for layer in found):
            watch.stream = TextStream(denoiser, asked, keep.grad)
            watch.stream.follow(installed, found)
        if keep.refine:
            watch.spreading = Spreading(is_part=len(store.layers) < len(chosen))
            store.watch_text(chosen, watch.spreading)
        if budget is not None:
            budget.stores.append(watch.expected)
        with closing(watch):
            watch.begin(denoiser.model, chosen)
            if other is not None:
                names = {layer.name for layer in chosen}
                watch.begin(other, [twin for twin in twins if twin.name in names])
            # The model runs in the caller's block.
            yield store
            watch.check()
    store.has_no_guidance = reader.watch is not None and reader.watch.may_never_act
    store.stopped = stopped_of(denoiser.pipeline, store) if watch.may_stop else None
    watch.warns.refuse_strays(store)
    if store.checks_itself:
        if store.stopped is not None:
            store.stopped.tell()
        store.check()
    watch.warns.tell()


def _check(denoiser: Denoiser, keep: Keep) -> None:
    """Raise ValueError for parts of a run that this model cannot have."""
    if keep.steps.part is not None and denoiser.pipeline is None:
        raise InvalidValueError(
            f"steps={keep.steps.given}: how many steps a run has is not known of a model without "
            "its pipeline. Pass indices, or the pipeline."
        )
    if keep.grad and getattr(denoiser.model, "is_gradient_checkpointing", False):
        raise OptionError(
            "grad",
            True,
            "with gradient checkpointing, torch runs each layer again in backward(), where its "
            "maps are not recorded. Call disable_gradient_checkpointing() on the model before.",
        )


@dataclass(eq=False)
class _Watch:
    """Running capture: the observers that it installs, and the results that they pass to the
    store."""

    passes: PassReader
    installed: Installation
    store: CapturedMaps
    selection: tuple[LayerSelection, Sequence[str]]
    text_states: DeviceCopies | None
    prompts: PromptWatch | None  # None where the maps are of another text
    warns: RunWarnings
    budget: Budget | None
    observers: list[tuple[AttentionLayer, ObservingProcessor]] = field(default_factory=list)
    thread: int = field(default_factory=get_ident)
    recorders: Recorders = field(default_factory=Recorders)  # of a model that stays compiled
    stream: TextStream | None = None  # of another text in joint attention
    may_stop: bool = False
    spreading: Spreading | None = None  # of joint attention that is refined

    def begin(self, model: Any, layers: Sequence[AttentionLayer]) -> None:
        """Install observers in a model's layers, and warn of anything that users may not expect.

        A second model's layers fill the maps of the first one's, by name.
        """
        compiled = is_compiled(model)
        if compiled and self.text_states is None and can_record(model, layers, self.store.keep):
            self.recorders.put(self.installed, layers)
        else:
            if self.installed.run_eagerly(model):
                warn_of_running_eagerly(model)
            for layer in layers:
                self.install(layer)
        warn_of_image_prompts(layers)
        PassHooks(self.installed, model, self.before_pass, self.after_pass)

    def install(self, layer: AttentionLayer) -> None:
        from .observers import observing  # torch's compiler comes with it, which takes seconds

        inner, held = layer.module.processor, self.store.sums[layer.name]
        look: Look | None = None
        if layer.kind == "joint":
            passes, keep = self.passes, self.store.keep
            spreading = None if layer in self.store.text_only else self.spreading
            look = JointLook(passes.spans, spreading, keep, passes.frames)
        elif self.text_states is not None:
            look = OtherTextLook(self.text_states, self.passes.frame_rows)
        observer = observing(inner, held.take, look, held.wanted)
        observer.stream = self.stream
        observer.is_self = layer.kind == "self"
        for former, old in self.observers:
            if former is layer:  # it may have been set again since, and come to lie inside
                old.end()
        self.recorders.forget(layer)
        self.observers.append((layer, observer))
        self.installed.put(layer, observer)

    def close(self) -> None:
        """Release everything, so that the maps go with the store and not with the next garbage
        collection."""
        for _, observer in self.observers:
            observer.end()  # it would hold this watch, and the watch the store
        self.observers.clear()
        self.recorders.close()
        if self.budget is not None:
            self.budget.stores.clear()  # which hold watches

    def check(self) -> None:
        """Raise for problems that users' own processors had after their first call, and warn of
        branches in turn. This is read at the end, so that the device did not wait while the model
        ran."""
        self.recorders.check()
        for layer, observer in self.observers:
            for problem, found in observer.noted.items():
                if found > 1:
                    raise CaptureError(f"{layer.name}: {problem}")
            if self.store.keep.queries.cells is not None:
                self.store.sums[layer.name].check_owners()

    def before_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Identify the pass before the layers run; the model's forward pre-hook.

        A capture belongs to the thread that entered it: calls from other threads are ignored.
        """
        if get_ident() != self.thread:
            return self.recorders.disturb()
        self.store.end_pass()
        self._notice_swaps()
        found = self.passes.read(model, args, kwargs)
        if self.stream is not None:
            self.stream.begin(found.rows or None)
        if found.stray is not None:
            self.recorders.rest()
            return self.warns.strays.note(found.stray)
        self._refuse_second_run(found)
        self.warns.note(found, self.passes)
        if not self.store.passes:
            self._look_at_the_run()
        if not found.rows:  # of the other branch of a guidance that runs in turn
            self.store.skipped += 1
            return
        if self.text_states is not None:
            found.n_text = self.text_states.own.shape[1]
        self._begin_pass(found)

    def _look_at_the_run(self) -> None:
        """Read, in a first pass, the pipeline's facts about the whole run."""
        check_backends(self.store.watched)  # one may have been chosen inside
        if self.prompts is not None:
            self.store.drawn = self.prompts.drawn()
        pipeline = self.passes.pipeline
        self.store.crop, self.may_stop = running_crop(pipeline), may_stop(pipeline)

    def _begin_pass(self, found: Pass) -> None:
        check_frames(self.store.keep.space, found.latent_size)
        is_first, call = not self.store.passes, self.passes.call
        if is_first:  # resolutions are known only now
            self.store.choose(self.selection, found.latent_size)
        self.store.begin_pass(found)
        if self.spreading is not None:
            self.spreading.begin_pass()
        if is_first and call is not None:
            self._foresee(found, found.n_text + call.n_image)
        if call is not None and call.text is not None:
            self.recorders.begin(self.store.layers, found, call.text.device)

    def _foresee(self, found: Pass, columns: int) -> None:
        """Warn of much memory, or refuse more than the budget allows."""
        passes = None if found.schedule is None else len(found.schedule)
        if self.budget is not None:
            self.budget.check_known(self.store.keep, found.latent_size, passes)
        if found.latent_size is None:
            return  # how many queries a mere sequence has is not known before its layers run
        own = self.text_states is None
        expected = self.store.foresee(columns if own else self.store.n_text or 0, passes or 1)
        if self.budget is None:
            warn_of_much(expected)
        else:
            self.budget.check([store(expected) for store in self.budget.stores])

    def expected(self, run: Expected) -> Expected:
        """Return what the store will hold in a run of which another store knows what it will."""
        store, own, part = self.store, self.text_states, self.budget.part if self.budget else ""
        columns = run.columns if own is None else own.own.shape[1]
        layers = select_layers(store.layers, *self.selection, run.latent_size)
        return replace(run, keep=store.keep, layers=layers, columns=columns, part=part)

    def after_pass(self, *_: Any) -> None:
        """End the pass. Layers that run later are rerun for a gradient (checkpointing), and
        ignored."""
        if get_ident() == self.thread:
            if self.passes.call is not None:
                self.recorders.end(self.store)
            self.passes.call = None
            self.store.end_pass()

    def _refuse_second_run(self, found: Pass) -> None:
        if not found.begins_run or self.passes.runs < 2:
            return
        if getattr(self.passes.pipeline, "free_init_enabled", False):
            raise CaptureError(
                "FreeInit runs the whole schedule several times, which would mix the maps of all. "
                "Call pipe.disable_free_init(), or capture(pipe.unet)."
            )
        raise CaptureError(
            "A second run of the pipeline began inside one capture(), which would mix the maps of "
            "two images. Enter capture() once for each run."
        )

    def _notice_swaps(self) -> None:
        found = [pair for pair in self.installed.replaced() if pair[0] in self.store.watched]
        for layer, _ in found:
            self.install(layer)
        if found:
            names = [f"{layer.name} ({type(new).__name__})" for layer, new in found]
            warn(
                f"{len(found)} attention processors were replaced inside capture(); the new ones "
                "are watched from here on and those from before come back at the end: "
                + ", ".join(names[:3]),
                CaptureWarning,
            )
