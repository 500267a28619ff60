"""`Watch`: the observers that a running capture installs, and what they pass to its store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..attention.device_copies import DeviceCopies
from ..errors import warn
from ..follow.capture_warnings import (
    RunWarnings,
    may_stop,
    warn_of_image_prompts,
    warn_of_running_eagerly,
)
from ..follow.drawn import PromptWatch
from ..follow.follower import Follower, Subscriber
from ..follow.installer import Installation
from ..follow.pass_reader import PassReader
from ..follow.passes import CaptureError, CaptureWarning, Pass
from ..look.joint import JointLook
from ..look.joint_checks import check_backends
from ..look.other_text import see_other_text
from ..look.refined import Spreading
from ..look.sources import handed_over, may_hand_over, see
from ..look.text_stream import TextStream
from ..models.denoiser_call import is_compiled
from ..models.layers import (
    AttentionLayer,
    LayerSelection,
)
from ..models.running_call import running_variables
from ..models.values import refuse_crop
from .budget import check_known
from .map_store import CapturedMaps
from .recorders import Recorders, can_record

if TYPE_CHECKING:
    from ..look.observers import Look, ObservingProcessor


@dataclass(eq=False)
class Watch(Subscriber):
    """Running capture: the observers that it installs, and the results that they pass to the
    store."""

    follower: Follower
    installed: Installation
    store: CapturedMaps
    selection: tuple[LayerSelection, Sequence[str]]
    text_states: DeviceCopies | None
    prompts: PromptWatch | None  # None where the maps are of another text
    warns: RunWarnings
    observers: list[tuple[AttentionLayer, ObservingProcessor]] = field(default_factory=list)
    recorders: Recorders = field(default_factory=Recorders)  # of a model that stays compiled
    stream: TextStream | None = None  # of another text in joint attention
    may_stop: bool = False
    steps: int | None = None  # of the running call; None if it does not say
    spreading: Spreading | None = None  # of joint attention that is refined

    @property
    def passes(self) -> PassReader:
        return self.follower.passes

    def begin(self, model: Any, layers: Sequence[AttentionLayer]) -> None:
        """Install observers in a model's layers, and warn of anything that users may not expect.

        A second model's layers fill the maps of the first one's, by name.
        """
        compiled = is_compiled(model)
        if compiled and self.text_states is None and can_record(model, layers, self.store.keep):
            self.recorders.put(self.installed, model, layers)
        else:
            if self.installed.run_eagerly(model):
                warn_of_running_eagerly(model)
            for layer in layers:
                self.install(layer)
        warn_of_image_prompts(layers)
        self.follower.follow(model)

    def install(self, layer: AttentionLayer) -> None:
        from ..look.observers import (
            observing,  # torch's compiler comes with it, which takes seconds
        )

        inner = layer.module.processor
        layer_sum = self.store.sum_of(layer)
        look: Look = see
        if layer.kind == "joint":
            passes = self.passes
            keep = self.store.keep
            spreading = None if layer in self.store.text_only else self.spreading
            look = JointLook(
                passes.spans,
                spreading,
                space=keep.space,
                queries=keep.queries,
                caches_text=passes.caches_text,
            )
        elif self.text_states is not None:
            look = partial(see_other_text, self.text_states, self.passes.frame_rows)
        observer = observing(inner, layer_sum.take, look, layer_sum.wanted)
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
        self.store.drop_pass()
        for _, observer in self.observers:
            observer.end()  # it would hold this watch, and the watch the store
        self.observers.clear()
        self.recorders.close()

    def check(self) -> None:
        """Raise for problems that users' own processors had after their first call, and warn of
        branches in turn. This is read at the end, so that the device did not wait while the model
        ran."""
        self.recorders.check()
        if missing := self.passes.steps_without():
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
        if self.passes.runs < 2:
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

    def begin_pass(self, begun: Pass) -> None:
        self.store.drop_pass()  # one that an error broke off
        self._notice_swaps()
        if self.stream is not None:
            self.stream.begin(begun.rows or None)
        self.warns.note(begun, self.passes)
        if begun.again and self.store.keep.step_call is None:
            self.store.problem = (
                f"{self.follower.step_calls} Say which counts, from 0: capture(pipe, step_call=0)."
            )
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
        if self.passes.call is not None:
            self.recorders.end(self.store)
        # Layers that run later are rerun for a gradient (checkpointing), and ignored.
        self.passes.call = None
        self.store.end_pass()

    def stray(self, call: Pass) -> None:
        self.store.drop_pass()
        if self.stream is not None:
            self.stream.begin(None)
        self.recorders.rest()

    def _look_at_the_run(self) -> None:
        """Read, in a first pass, the pipeline's facts about the whole run."""
        check_backends(self.store.watched)  # one may have been chosen inside
        if self.prompts is not None:
            self.store.drawn = self.prompts.drawn()
        pipeline = self.passes.pipeline
        self.may_stop = may_stop(pipeline)
        variables = running_variables(pipeline) or {}
        refuse_crop(variables)
        timesteps = variables.get("timesteps")  # those of the run, which a scheduler has more of
        self.steps = None if timesteps is None else len(timesteps)

    def _begin_kept(self, begun: Pass) -> None:
        is_first = not self.store.passes
        call = self.passes.call
        if is_first:  # resolutions are known only now
            self.store.choose(self.selection, begun.latent_size)
        self.store.begin_pass(begun)
        for layer, observer in self.observers:
            if observer.look in (see, handed_over):
                observer.look = handed_over if may_hand_over(observer, layer.module) else see
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
        swapped = [pair for pair in self.installed.replaced() if pair[0] in self.store.watched]
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
