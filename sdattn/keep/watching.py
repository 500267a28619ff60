"""`watch_model()`: install the observing processors, watch the model run, restore everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..attention.device_copies import DeviceCopies
from ..errors import InvalidValueError, OptionError, warn
from ..follow.capture_warnings import (
    Stopped,
    may_stop,
    warn_of_image_prompts,
    warn_of_running_eagerly,
)
from ..follow.passes import CaptureError, CaptureWarning, Pass
from ..follow.run import Run, Subscriber, follow
from ..look.joint import Joint
from ..look.joint_checks import check_backends, check_ways
from ..look.other_text import asked_layers, see_other_text
from ..look.refined import Spreading, spreading_layers
from ..look.sources import handed_over, may_hand_over, see
from ..look.text_stream import TextStream
from ..models.denoiser import Denoiser, find_denoiser
from ..models.denoiser_call import unwrapped
from ..models.layers import AttentionLayer, LayerSelection, checked_kinds, select_layers
from ..models.pipeline import Pipeline
from ..models.replaced_calls import bypass
from .budget import check_known
from .forwards import Forwards
from .keep import Keep
from .map_store import CapturedMaps
from .recorders import Recorders, can_record

if TYPE_CHECKING:
    from ..look.observers import ObservingProcessor, See

Store = TypeVar("Store", bound=CapturedMaps)


@contextmanager
def watch_model(
    target: Any,
    store_class: Callable[[Sequence[AttentionLayer], Keep], Store],
    keep: Keep,
) -> Iterator[Store]:
    """Watch a model while it runs and yield the store, see :func:`sdattn.capture`.

    Args:
        target: pipeline or its model.
        store_class: class of the store.
        keep: what to keep of the run.
    """
    # Validate before anything is put into the model.
    denoiser = find_denoiser(target)
    _check(denoiser, keep)
    every = denoiser.layers
    layers_asked = every
    kinds = keep.kinds
    text_states = keep.text_states
    if text_states is not None:
        layers_asked = list(filter(asked_layers(denoiser, text_states, kinds), every))
    keep.queries.check(text_states=text_states is not None)
    if not keep.queries.usual:
        kinds = checked_kinds(kinds, keep.queries.kinds)
    chosen = select_layers(layers_asked, keep.layers, kinds)
    check_backends(chosen)
    check_ways(denoiser, chosen, keep.refine, keep.space)
    store = store_class(spreading_layers(chosen, keep.depth), keep)
    other = denoiser.stands_in
    twins = [] if other is None else other.layers
    run = follow(
        denoiser,
        branch=keep.branch,
        guidance=keep.guidance,
        latent_size=keep.latent_size,
        counts_gradients=keep.grad,
        frames=keep.frames,
        step_call=keep.step_call,
        layers=[*every, *twins],  # a user may replace any of them
        hears_texts=text_states is None,
    )
    with run.installed:
        asked = None if text_states is None else DeviceCopies(text_states)
        watch = Watch(run, store, (keep.layers, kinds), asked)
        run.subscribe(watch)
        if asked is not None and any(layer.kind == "joint" for layer in layers_asked):
            watch.stream = TextStream(denoiser, asked, keep.grad, run.is_open)
            watch.stream.follow(run.installed, layers_asked)
        if keep.refine:
            watch.spreading = Spreading(is_part=len(store.layers) < len(chosen))
            store.watch_text(chosen, watch.spreading)
        with closing(watch):
            watch.begin(denoiser, chosen)
            if other is not None:
                names = {layer.name for layer in chosen}
                watch.begin(other, [twin for twin in twins if twin.name in names])
            # The model runs in the caller's block.
            yield store
            watch.check()
        if store.passes and (missing := store.missing()):
            store.bypass = bypass(unwrapped(denoiser.model), missing)
    guidance_watch = run.reader.watch
    store.has_no_guidance = guidance_watch is not None and guidance_watch.may_never_act
    store.stopped = _stopped(denoiser.pipeline, store) if watch.may_stop else None
    if not (store.passes or store.skipped):
        run.doubts.refuse_strays()
    if store.checks_itself:
        if store.stopped is not None:
            store.stopped.tell()
        store.check()
    run.doubts.tell()


def _stopped(pipeline: Pipeline, store: CapturedMaps) -> Stopped | None:
    """Return where a captured run was stopped, or None if it ran to its end."""
    if getattr(pipeline, "_interrupt", None) is not True:
        return None
    timesteps = getattr(getattr(pipeline, "scheduler", None), "timesteps", ())
    steps = getattr(pipeline, "num_timesteps", None) or len(timesteps)  # fewer from an image
    passes = len(store.passes)
    if not 0 < passes < steps:
        return None
    kept = tuple(store.kept)
    return Stopped(passes, steps, kept[-1:] if store.keep.steps.last else kept)


def _check(denoiser: Denoiser, keep: Keep) -> None:
    """Raise ValueError for parts of a run that this model cannot have."""
    if keep.steps.part is not None and denoiser.pipeline is None:
        raise InvalidValueError(
            f"steps={keep.steps.given}: how many steps a run has is not known of a model without "
            "its pipeline. Pass indices, or the pipeline."
        )
    side = keep.queries.side
    is_chosen = side == "text" or keep.queries.cells is not None
    caches_text = side == "text" and denoiser.family.caches_text
    has_kinds = any(layer.kind in keep.queries.kinds for layer in denoiser.layers)
    if is_chosen and (caches_text or not has_kinds):
        asked: object = side
        if caches_text:
            why = "the text attends to itself alone, in the first step"
        elif side == "text":
            why = "only in joint attention (SD3, FLUX) does the text attend"
        else:
            asked = keep.queries.cells
            why = "neither self- nor joint attention with a softmax"
        kind = type(unwrapped(denoiser.model)).__name__
        text = f"a {kind} has no attention with such queries: {why}. Leave it out."
        raise OptionError("queries", asked, text)
    if keep.grad and getattr(denoiser.model, "is_gradient_checkpointing", False):
        raise OptionError(
            "grad",
            True,
            "with gradient checkpointing, torch runs each layer again in backward(), where its "
            "maps are not recorded. Call disable_gradient_checkpointing() on the model before.",
        )


@dataclass(eq=False)
class Watch(Subscriber):
    """Running capture: the observers that it installs, and the results that they pass to the
    store."""

    run: Run
    store: CapturedMaps
    selection: tuple[LayerSelection, Sequence[str]]
    text_states: DeviceCopies | None
    observers: list[tuple[AttentionLayer, ObservingProcessor]] = field(default_factory=list)
    processors: dict[AttentionLayer, ObservingProcessor] = field(default_factory=dict)  # the last
    forwards: Forwards = field(init=False)
    recorders: Recorders = field(init=False)  # of a model that stays compiled
    stream: TextStream | None = None  # of another text in joint attention
    may_stop: bool = False
    steps: int | None = None  # of the running call; None if it does not say
    spreading: Spreading | None = None  # of joint attention that is refined

    def __post_init__(self) -> None:
        self.recorders = Recorders(self.run.is_followed)
        self.forwards = Forwards(self.run.installed)

    def begin(self, denoiser: Denoiser, layers: Sequence[AttentionLayer]) -> None:
        """Install observers in a model's layers, and warn of anything that users may not expect.

        A second model's layers fill the maps of the first one's, by name.
        """
        model = denoiser.model
        compiled = denoiser.compiled_parts
        if compiled and self.text_states is None and can_record(model, layers, self.store.keep):
            self.recorders.put(self.run.installed, model, layers)
        else:
            if compiled:
                self.run.installed.run_eagerly(compiled)
                warn_of_running_eagerly(model)
            for layer in layers:
                self.install(layer)
        warn_of_image_prompts(layers)
        self.run.watch(model)

    def install(self, layer: AttentionLayer) -> None:
        from ..look.observers import (
            observing,  # torch's compiler comes with it, which takes seconds
        )

        inner = layer.module.processor
        layer_sum = self.store.sum_of(layer)
        source: See = see
        if layer.kind != "joint" and self.text_states is not None:
            source = partial(see_other_text, self.text_states, self.run.reader.frame_rows)
        is_open = self.run.is_open
        observer = observing(inner, layer_sum.take, source, is_open, layer_sum.is_needed)
        self._tell(observer, layer)
        if layer.kind == "joint" and layer not in self.store.text_only:
            layer_sum.view = replace(layer_sum.view, spreading=self.spreading)
        for former, old in self.observers:
            if former is layer:  # it may have been set again since, and come to lie inside
                old.end()
        self.recorders.forget(layer)
        self.observers.append((layer, observer))
        self.processors[layer] = observer
        self.run.installed.put(layer, observer)

    def _tell(self, observer: ObservingProcessor, layer: AttentionLayer) -> None:
        """Tell an observer what the run knows of its layer."""
        observer.stream = self.stream
        observer.is_self = layer.kind == "self"
        if layer.kind == "joint":
            observer.joint = Joint(self.run.reader.spans, self.run.reader.caches_text)

    def _watch_forward(self, layer: AttentionLayer, processor: ObservingProcessor) -> None:
        """Watch a layer's forward that other code replaced, until its processor runs."""
        from ..look.replaced_forward import observing_forward

        layer_sum = self.store.sum_of(layer)
        slot, observer = observing_forward(
            layer, layer_sum.take, self.run.is_open, layer_sum.is_needed, processor
        )
        self._tell(observer, layer)
        self.observers.append((slot, observer))
        self.forwards.put(layer, slot, observer)

    def close(self) -> None:
        """Release everything, so that the maps go with the store and not with the next garbage
        collection."""
        with ExitStack() as ending:  # each, whatever becomes of the others
            ending.callback(self.store.close)
            ending.callback(self.recorders.close)
            for _, observer in self.observers:
                ending.callback(observer.end)  # it would hold this watch, and the watch the store
            self.observers.clear()
            self.processors.clear()
            self.forwards.close()
            self.stream = None
            self.spreading = None

    def check(self) -> None:
        """Raise for problems that users' own processors had after their first call, and warn of
        branches in turn. This is read at the end, so that the device did not wait while the model
        ran."""
        self.recorders.check()
        if missing := self.run.reader.steps_without():
            number = self.store.keep.step_call
            self.store.problem = (
                f"{missing} step(s) had too few calls of the model for one branch, and "
                f"step_call={number} leaves them out. Pass a smaller number."
            )
        for layer, observer in self.observers:
            for problem, times in observer.noted.items():
                if times > 1:
                    raise CaptureError(f"{layer.name}: {problem}")
            for kernel, difference in observer.kernels.items():
                before = self.store.kernels.get(kernel, 0.0)
                self.store.kernels[kernel] = max(before, float(difference))
            if self.store.keep.queries.cells is not None:
                self.store.sums[layer.name].check_owners()

    def begin_run(self, first: Pass) -> None:
        if self.run.reader.runs < 2:
            return
        if getattr(self.run.reader.pipeline, "free_init_enabled", False):
            raise CaptureError(
                "FreeInit runs the whole schedule several times, which would mix the maps of all. "
                "Call pipe.disable_free_init(), or capture(pipe.unet)."
            )
        raise CaptureError(
            "A second run of the pipeline began inside one capture(), which would mix the maps of "
            "two images. Enter capture() once for each run."
        )

    def begin_pass(self, begun: Pass) -> None:
        self.store.drop_pass()  # one that an error broke off
        self._notice_swaps()
        if self.text_states is None:
            for layer in self.forwards.replaced(self.processors):
                self._watch_forward(layer, self.processors[layer])
        if self.stream is not None:
            self.stream.begin(begun.rows or None)
        if begun.again and self.store.keep.step_call is None:
            self.store.problem = self.run.doubts.which_counts()
        if not self.store.passes:
            self._look_at_the_run()
        if begun.again:  # it may have other shapes
            self.recorders.rest()
        if not begun.rows:  # of another branch, in its own call, or another call of the step
            self.store.skipped += 1
            return
        if self.text_states is not None:
            begun.n_text = self.text_states.own.shape[1]
        self._begin_kept(begun)

    def end_pass(self, ended: Pass) -> None:
        if ended.rows:
            self.recorders.end(self.store)
        self.store.end_pass()

    def stray(self, call: Pass) -> None:
        self.store.drop_pass()
        if self.stream is not None:
            self.stream.begin(None)
        self.recorders.rest()

    def _look_at_the_run(self) -> None:
        """Read, in a first pass, the pipeline's facts about the whole run."""
        check_backends(self.store.watched)  # one may have been chosen inside
        self.store.drawn = self.run.drawn
        self.may_stop = may_stop(self.run.reader.pipeline)
        self.run.refuse_crop()
        timesteps = self.run.variables().get("timesteps")  # of the run; a scheduler has more
        self.steps = None if timesteps is None else len(timesteps)

    def _begin_kept(self, begun: Pass) -> None:
        is_first = not self.store.passes
        call = self.run.reader.call
        if is_first:  # resolutions are known only now
            self.store.choose(self.selection, begun.latent_size)
        self.store.begin_pass(begun)
        for layer, observer in self.observers:
            if observer.see in (see, handed_over):
                observer.see = handed_over if may_hand_over(observer, layer.module) else see
        if self.spreading is not None:
            self.spreading.begin_pass()
        if is_first and call is not None:
            self._foresee(begun, begun.n_text + call.n_image)
        if call is not None and call.text is not None:
            self.recorders.begin(self.store.layers, begun, call.text.device)

    def _foresee(self, begun: Pass, columns: int) -> None:
        """Warn of much memory, or refuse more than ``max_bytes``."""
        passes = None
        if begun.schedule is not None:
            passes = self.steps or len(begun.schedule)
        check_known(self.store.keep, begun.latent_size, passes)
        if begun.latent_size is None:
            return  # how many queries a mere sequence has is not known before its layers run
        if self.text_states is not None:
            columns = self.store.n_text or 0
        self.store.foresee(columns, passes or 1).check()

    def _notice_swaps(self) -> None:
        swapped = [pair for pair in self.run.installed.replaced() if pair[0] in self.store.watched]
        for layer, _ in swapped:
            self.install(layer)
        if swapped:
            names = [f"{layer.name} ({type(new).__name__})" for layer, new in swapped]
            warn(
                f"{len(swapped)} attention processors were replaced inside capture(); the new ones "
                "are watched from here on and those from before come back at the end: "
                + ", ".join(names[:3]),
                CaptureWarning,
            )
