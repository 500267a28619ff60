"""`capture()`: install the observing processors, watch the model run, put everything back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..attention.device_copies import DeviceCopies
from ..errors import InvalidValueError
from ..models.denoiser_call import is_compiled
from ..models.layers import (
    TEXT_KINDS,
    AttentionLayer,
    LayerSelection,
    find_denoiser,
    select_layers,
    unwrapped,
)
from .capture_warnings import RunWarnings, warn_of_image_prompts, warn_of_running_eagerly
from .drawn import PromptWatch, running_crop
from .gramcol import check_frames
from .installer import Installation
from .joint import JointLook
from .joint_checks import check_backends, check_ways
from .keep import Heads, Keep, Selection, Space, Steps
from .map_store import MapStore
from .other_text import OtherTextLook, asked_layers
from .pass_hooks import PassHooks
from .pass_reader import Guidance, PassReader
from .passes import CaptureError, CaptureWarning, Pass
from .recorders import Recorders, can_record
from .refined import Spreading
from .stopping import may_stop, stopped_of
from .text_stream import TextStream

if TYPE_CHECKING:
    from .observers import Look, ObservingProcessor


@contextmanager
def capture(
    target: Any,
    *,
    layers: LayerSelection = None,
    kinds: Sequence[str] = TEXT_KINDS,
    branch: str = "conditional",
    guidance: Guidance | None = "auto",
    steps: Selection | Steps = "mean",
    heads: Selection | Heads = "mean",
    tokens: Sequence[int] | None = None,
    among: Sequence[Sequence[int]] | None = None,
    text_states: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
    latent_size: tuple[int, int] | None = None,
    refine: Literal["self"] | None = None,
    space: Space = "attention",
    frames: Sequence[int] | None = None,
) -> Iterator[MapStore]:
    """Watch the attention of a model while it runs; its output stays what it was, bit for bit.

        with sdattn.capture(pipe) as store:
            image = pipe("a red circle left of a blue square").images[0]
        store.maps["mid_block.attentions.0.transformer_blocks.0.attn2"]  # [1, rows, cols, tokens]

    Each layer's own processor goes on making the output. On leaving, by any way, every layer holds
    the very processor it held before. One ``with`` holds one run; captures may be nested. A UNet
    that is compiled stays so where means over heads are kept; else it runs eagerly inside, with a
    warning.

    Args:
        target: a pipeline, or its UNet or transformer. On a bare model no guidance is known, so
            every batch row counts as an image of its own. Also any model of yours whose attention
            is all :class:`sdattn.attention.MultiHeadAttention`. Calls of a pipeline's model that
            are no passes of its run (a callback's, a reference pass's, another pipeline's) run
            untouched, are not counted, and are named in a warning.
        layers: names, places, resolutions or a predicate, see
            :func:`sdattn.models.layers.select_layers`.
        kinds: of ``"cross"``, ``"joint"`` and ``"self"``; by default those that see the text. Of
            joint attention (SD3, FLUX, Qwen-Image) the text's columns are kept, which sum to less
            than 1: the rest goes to the picture. Self-attention keeps a column for every cell.
        branch: ``"conditional"`` (the prompt), ``"unconditional"`` (the negative prompt), or
            ``"both"``: first the unconditional images, then the conditional ones. Pipelines that
            run the two in turn (FLUX, Qwen-Image) show one of them to one capture; nest two.
        guidance: where the unconditional rows of a batch are. ``"auto"``: the pipeline says it,
            inside its own call; around a loop of your own say it yourself: ``"batch"``, in the
            first half; ``"passes"``, in the first of two calls; None, nowhere.
        steps: ``"mean"`` over the calls of the model (a second-order scheduler calls twice a step);
            the mean over a part of the schedule, ``(0.5, 1.0)`` for its second half; ``"last"``,
            the last call alone; ``"all"``, or a list of the calls to keep one by one.
        heads: ``"mean"``, ``"all"``, or the indices of the heads to keep one by one.
        tokens: key columns to keep, None for all. The softmax is over all keys either way.
        among: for each image (or once for all) the key columns that the softmax, or the z-score of
            ``space``, is taken over, in place of all of them. Not of self-attention.
        text_states: ``[1 or images, T, width]``, of another text than the prompt (or the same): the
            maps show what the picture would attend to in it. Of UNets' cross-attention, see
            :class:`sdattn.hooks.other_text.OtherTextLook`, and of the joint attention of SD3 and
            FLUX, each of whose blocks then runs twice, see :mod:`sdattn.hooks.text_stream`.
        device: where the maps are held, by default where they are computed.
        dtype: of the maps; running sums are float32 at least.
        grad: keep the graph, so that a loss on the maps reaches the latents.
        latent_size: of a model of yours, the (rows, cols) of its queries; without it they are a
            sequence, a single row. Models of diffusers know it, but for those on torch's meta
            device whose grid is in the values of ids (FLUX).
        refine: of joint attention, ``"self"``: maps are spread twice along the picture's own
            self-attention while the model runs, see :mod:`sdattn.hooks.refined`. A UNet's maps are
            spread afterwards: capture ``kinds=("cross", "self")``.
        space: of joint attention, ``"output"``: not what a cell pays to a token but how alike what
            they both get is, the product of their outputs before the output projection, a feature's
            mean, of any sign, see :mod:`sdattn.hooks.output_space`. ``"gramcol"``: how like a cell
            is to the cell of its frame that a token is looked for by, as z-scores over the columns
            of ``among``, of any sign; ``"imap"``: the same of the five heads of each layer that
            tell a film's frames apart best, see :mod:`sdattn.hooks.gramcol`.
        frames: of a film, those of its latent to keep, counted from 0; None for all. A latent frame
            may stand for several of the film, see :meth:`sdattn.Heatmap.of_frames`.

    Yields:
        MapStore: see there for ``maps``; with the defaults its size does not grow with the steps.

    Raises:
        TypeError: ``target`` is no model that sdattn knows.
        ValueError: an option that fits nothing; the message lists what there is.
        CaptureError: on leaving, nothing was captured; while running, the batch or the size
            changed, or a second run began.
        RuntimeError: what a layer attends to cannot be seen, or is not what made its output.
    """
    # All that cannot be is refused here, before anything is put into the model.
    denoiser = find_denoiser(target)
    keep = Keep.of(steps, heads, tokens, among, device, dtype, grad, refine, space, frames)
    if keep.steps.part is not None and denoiser.pipeline is None:
        raise InvalidValueError(
            f"steps={keep.steps.given}: how many steps a run has is not known of a model without "
            "its pipeline. Pass indices, or the pipeline."
        )
    found = every = denoiser.layers
    if text_states is not None:
        found = list(filter(asked_layers(denoiser, text_states, kinds), every))
    chosen = select_layers(found, layers, kinds)
    check_backends(chosen)
    check_ways(denoiser, chosen, refine, space)
    store = MapStore(chosen, keep)
    reader = PassReader(denoiser, branch, guidance, latent_size, grad, keep.frames)
    other = denoiser.stands_in
    twins = [] if other is None else denoiser.family.find_layers(unwrapped(other))
    # a user may replace any of them
    with closing(reader), Installation([*every, *twins]) as installed:
        reader.listen()
        asked = None if text_states is None else DeviceCopies(text_states)
        prompts = PromptWatch(denoiser, installed) if asked is None else None
        warns = RunWarnings(denoiser, branch)
        watch = _Watch(reader, installed, store, (layers, kinds), asked, prompts, warns)
        if asked is not None and any(layer.kind == "joint" for layer in found):
            watch.stream = TextStream(denoiser, asked, grad)
            watch.stream.follow(installed, found)
        watch.spreading = Spreading() if refine else None
        with closing(watch):
            watch.begin(denoiser.model, store.layers)
            if other is not None:
                names = {layer.name for layer in chosen}
                watch.begin(other, [twin for twin in twins if twin.name in names])
            # The model runs in the caller's block.
            yield store
            watch.check()
    store.has_no_guidance = reader.watch is not None and reader.watch.may_never_act
    store.stopped = stopped_of(denoiser.pipeline, store) if watch.may_stop else None
    if store.checks_itself:
        if store.stopped is not None:
            store.stopped.tell(stacklevel=3)
        watch.warns.refuse_strays(store)
        store.check()
        watch.warns.tell(stacklevel=3)


@dataclass(eq=False)
class _Watch:
    """One capture at work: the observers that it installs, and what they hand to the store."""

    passes: PassReader
    installed: Installation
    store: MapStore
    selection: tuple[LayerSelection, Sequence[str]]
    text_states: DeviceCopies | None
    prompts: PromptWatch | None  # None where the maps are of another text
    warns: RunWarnings
    observers: list[tuple[AttentionLayer, ObservingProcessor]] = field(default_factory=list)
    thread: int = field(default_factory=get_ident)
    recorders: Recorders = field(default_factory=Recorders)  # of a model that stays compiled
    stream: TextStream | None = None  # of another text in joint attention
    may_stop: bool = False
    spreading: Spreading | None = None  # of joint attention that is refined

    def begin(self, model: Any, layers: Sequence[AttentionLayer]) -> None:
        """Install the observers of a model's layers, and warn of what is not as a user may expect.

        A second model's layers fill the maps of the first one's, by their names."""
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
            passes, space = self.passes, self.store.keep.space
            look = JointLook(passes.spans, self.spreading, space, passes.frames)
        elif self.text_states is not None:
            look = OtherTextLook(self.text_states, self.passes.frame_rows)
        observer = observing(inner, held.take, look, held.wanted)
        observer.stream = self.stream
        for former, old in self.observers:
            if former is layer:  # it may have been set again since, and come to lie inside
                old.end()
        self.recorders.forget(layer)
        self.observers.append((layer, observer))
        self.installed.put(layer, observer)

    def close(self) -> None:
        """Let go of all, so that the maps go with the store and not when garbage is collected."""
        for _, observer in self.observers:
            observer.end()  # it would hold this watch, and the watch the store
        self.observers.clear()
        self.recorders.close()

    def check(self) -> None:
        """Refuse what processors of a user's own did after their first call, and warn of branches
        in turn: read now, so that the device did not wait for it while the model ran."""
        self.recorders.check()
        for layer, observer in self.observers:
            for problem, found in observer.noted.items():
                if found > 1:
                    raise CaptureError(f"{layer.name}: {problem}")

    def before_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook of the model: know the pass before its layers run.

        A capture belongs to the thread that entered it: calls of other threads are not looked at.
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
        """Read, in a first pass, what its pipeline says of the whole run."""
        check_backends(self.store.layers)  # one may have been chosen inside
        if self.prompts is not None:
            self.store.drawn = self.prompts.drawn()
        pipeline = self.passes.pipeline
        self.store.crop, self.may_stop = running_crop(pipeline), may_stop(pipeline)

    def _begin_pass(self, found: Pass) -> None:
        check_frames(self.store.keep.space, found.latent_size)
        is_first, call = not self.store.passes, self.passes.call
        if is_first:  # resolutions are known only now
            self.store.layers = select_layers(self.store.layers, *self.selection, found.latent_size)
        self.store.begin_pass(found)
        if self.spreading is not None:
            self.spreading.begin_pass()
        # how many queries a mere sequence has is not known before its layers run
        if is_first and call is not None and found.latent_size is not None:
            own = self.text_states is None
            columns = found.n_text + call.n_image if own else self.store.n_text
            scheduled = 1 if found.schedule is None else len(found.schedule)
            self.store.foresee(columns or 0, scheduled)
        if call is not None and call.text is not None:
            self.recorders.begin(self.store.layers, found, call.text.device)

    def after_pass(self, *_: Any) -> None:
        """Layers that run after this are rerun for a gradient (checkpointing) and are ignored."""
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
        found = [pair for pair in self.installed.replaced() if pair[0] in self.store.layers]
        for layer, _ in found:
            self.install(layer)
        if found:
            names = [f"{layer.name} ({type(new).__name__})" for layer, new in found]
            warnings.warn(
                f"{len(found)} attention processors were replaced inside capture(); the new ones "
                "are watched from here on and those from before come back at the end: "
                + ", ".join(names[:3]),
                CaptureWarning,
                stacklevel=2,
            )
