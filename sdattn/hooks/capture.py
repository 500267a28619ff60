"""`capture()`: install the observing processors, watch the model run, put everything back."""

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ..models.calls import Call, innermost, read_call
from ..models.compiled import is_compiled, running_eagerly
from ..models.guidance import Branch, GuidanceWatch, Order, branch_rows
from ..models.layers import (
    TEXT_KINDS,
    AttentionLayer,
    Denoiser,
    LayerSelection,
    find_denoiser,
    find_layers,
    is_own,
    joint_spans,
    select_layers,
    unwrapped,
)
from .asking import AskingObserver, check_asked
from .attended import Attended
from .joint import JointObserver, check_backends
from .keep import MUCH, Selection, expected_bytes, is_span
from .map_store import CaptureError, CaptureWarning, MapStore, Pass
from .observers import ObservingProcessor, unknown_use

logger = logging.getLogger(__name__)

BRANCHES = ("conditional", "unconditional", "both")


@contextmanager
def capture(
    target: Any,
    *,
    layers: LayerSelection = None,
    kinds: Sequence[str] = TEXT_KINDS,
    branch: str = "conditional",
    steps: Selection = "mean",
    heads: Selection = "mean",
    tokens: Sequence[int] | None = None,
    among: Sequence[Sequence[int]] | None = None,
    text_states: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
    latent_size: tuple[int, int] | None = None,
) -> Iterator[MapStore]:
    """Watch the attention of a model while it runs; its output stays what it was, bit for bit.

        with sdattn.capture(pipe) as store:
            image = pipe("a red circle left of a blue square").images[0]
        store.maps["mid_block.attentions.0.transformer_blocks.0.attn2"]  # [1, rows, cols, tokens]

    Each layer's own processor goes on making the output. On leaving, by any way, every layer holds
    the very processor it held before. One ``with`` holds one run; captures may be nested. A model
    that is compiled runs eagerly inside, with a warning.

    Args:
        target: a pipeline, or its UNet or transformer. On a bare model no guidance is known, so
            every batch row counts as an image of its own. Also any model of yours whose attention
            is all :class:`sdattn.attention.MultiHeadAttention`.
        layers: names, places, resolutions or a predicate, see
            :func:`sdattn.models.layers.select_layers`.
        kinds: of ``"cross"``, ``"joint"`` and ``"self"``; by default those that see the text. Of
            joint attention (SD3, FLUX, Qwen-Image) the text's columns are kept, which sum to less
            than 1: the rest goes to the picture. Self-attention keeps a column for every cell.
        branch: ``"conditional"`` (the prompt), ``"unconditional"`` (the negative prompt), or
            ``"both"``: first the unconditional images, then the conditional ones. Pipelines that
            run the two in turn (FLUX, Qwen-Image) show one of them to one capture; nest two.
        steps: ``"mean"`` over the calls of the model (a second-order scheduler calls twice a
            step); the mean over a part of the schedule, ``(0.5, 1.0)`` for its second half;
            ``"last"``, the last call alone; ``"all"``, or the indices of the calls to keep one by
            one.
        heads: ``"mean"``, ``"all"``, or the indices of the heads to keep one by one.
        tokens: key columns to keep, None for all. The softmax is over all keys either way.
        among: for each image (or once for all) the key columns that the softmax is taken over, in
            place of all of them. Not of self-attention.
        text_states: ``[1 or images, T, width]``, of another text than the prompt (or the same): the
            maps show what the picture would attend to in it, see
            :class:`sdattn.hooks.asking.AskingObserver`. Cross-attention of UNets only.
        device: where the maps are held, by default where they are computed.
        dtype: of the maps; running sums are float32 at least.
        grad: keep the graph, so that a loss on the maps reaches the latents.
        latent_size: of a model of yours, the (rows, cols) of its queries; without it they are a
            sequence, a single row. Models of diffusers tell it themselves.

    Yields:
        MapStore: see there for ``maps``; with the defaults its size does not grow with the steps.

    Raises:
        TypeError: ``target`` is no model that sdattn knows.
        ValueError: an option that fits nothing; the message lists what there is.
        CaptureError: on leaving, nothing was captured; while running, the batch or the size
            changed, or a second run began.
        RuntimeError: what a layer attends to cannot be seen, or is not what made its output.
    """
    denoiser = find_denoiser(target)
    if is_span(steps) and denoiser.pipeline is None:
        raise ValueError(
            f"steps={steps}: how many steps a run has is not known of a model without its "
            "pipeline. Pass indices, or the pipeline."
        )
    found = find_layers(denoiser.model)
    _check_size(denoiser.model, latent_size)
    if text_states is not None:
        check_asked(denoiser.model, text_states)
        if "cross" not in kinds:
            raise ValueError(f"kinds={kinds!r}: text_states are about cross-attention.")
        kinds = ("cross",)
    chosen = select_layers(found, layers, kinds)
    check_backends(chosen)
    if any(layer.kind == "joint" for layer in chosen):
        joint_spans(denoiser.model, 1, 1)  # refused now where it is not known
    if branch not in BRANCHES or (branch != "conditional" and denoiser.pipeline is None):
        raise ValueError(
            f"branch={branch!r}: pass one of {', '.join(BRANCHES)}; on a model without its "
            "pipeline only 'conditional', which keeps every row."
        )
    store = MapStore(
        chosen,
        levels=denoiser.levels,
        steps=steps,
        heads=heads,
        tokens=tokens,
        among=among,
        device=device,
        dtype=dtype,
        grad=grad,
    )
    with ExitStack() as undo:
        if is_compiled(denoiser.model):
            _say_eager(denoiser.model)
            undo.enter_context(running_eagerly(denoiser.model))
        watch = _Watch(denoiser, store, layers, kinds, branch, text_states, latent_size)
        undo.callback(watch.close)
        for layer in found:  # all of them: a user may replace any inside the block
            undo.callback(watch.uninstall, layer, layer.module.processor)
        for layer in chosen:
            watch.install(layer)
        if any(la.kind == "joint" and _has_image_prompts(la) for la in chosen):
            warnings.warn(
                "Image prompts (IP-Adapter) of joint attention are not captured: the maps have the "
                "columns of the text only.",
                CaptureWarning,
                stacklevel=3,
            )
        before, after = map(torch.compiler.disable, (watch.before_pass, watch.after_pass))
        hook = denoiser.model.register_forward_pre_hook(before, with_kwargs=True)
        undo.callback(hook.remove)
        hook = denoiser.model.register_forward_hook(after)
        undo.callback(hook.remove)
        yield store
        watch.check()
    store.check()


def _check_size(model: Any, latent_size: tuple[int, int] | None) -> None:
    if latent_size is not None and not is_own(unwrapped(model)):
        raise ValueError(
            f"latent_size={latent_size}: a {type(model).__name__} tells its own. Leave it out."
        )


def _has_image_prompts(layer: AttentionLayer) -> bool:
    return hasattr(innermost(layer.module.processor), "to_k_ip")


def _say_eager(model: Any) -> None:
    warnings.warn(
        f"The {type(unwrapped(model)).__name__} is compiled. Inside capture() it runs eagerly, so "
        "the picture can differ from the compiled model's in its last bits. To keep it compiled, "
        "enter capture() first and compile inside: each watched layer is then a graph break.",
        CaptureWarning,
        stacklevel=4,
    )


def _nothing(_attended: Attended) -> None:
    """What an observer does whose capture has ended."""


class _Watch:
    """One capture at work: what is installed, and which pass is running."""

    def __init__(
        self,
        denoiser: Denoiser,
        store: MapStore,
        selection: LayerSelection,
        kinds: Sequence[str],
        branch: str,
        text_states: torch.Tensor | None,
        latent_size: tuple[int, int] | None,
    ):
        self.denoiser, self.store, self.text_states = denoiser, store, text_states
        self.latent_size = latent_size
        self.selection, self.kinds, self.branch = selection, kinds, branch
        self.guidance = None if denoiser.pipeline is None else GuidanceWatch(denoiser.pipeline)
        if self.guidance is not None and self.guidance.in_turn and branch == "both":
            raise ValueError(
                f"branch='both': a {type(denoiser.pipeline).__name__} runs the prompt and the "
                "negative prompt in turn. Nest two captures, one with branch='unconditional'."
            )
        self.call: Call | None = None  # the pass that runs now, None if it is not kept
        self.observers: dict[str, ObservingProcessor] = {}
        self.installed: list[tuple[str, ObservingProcessor]] = []  # those swapped since as well
        self.thread = get_ident()
        self.schedule: Any = None
        self.last: Call | None = None
        self.said_branches = False

    def install(self, layer: AttentionLayer) -> None:
        inner, observe = layer.module.processor, partial(self.observe, layer)
        observer: ObservingProcessor
        if self.text_states is not None:
            observer = AskingObserver(inner, observe, self.text_states)
        elif layer.kind == "joint":
            observer = JointObserver(inner, observe, self.spans)
        else:
            observer = ObservingProcessor(inner, observe)
        self.observers[layer.name] = observer
        self.installed.append((layer.name, observer))
        layer.module.set_processor(observer)

    def close(self) -> None:
        """Let go of all, so that the maps go with the store and not when garbage is collected."""
        if self.guidance is not None:
            self.guidance.close()
        for _, observer in self.installed:
            observer.observe = _nothing  # it would hold this watch, and the watch the store
        self.observers.clear()
        self.installed.clear()

    def check(self) -> None:
        """Refuse what processors of a user's own did after their first call: read now, so that the
        device did not wait for it while the model ran."""
        for name, observer in self.installed:
            if observer.misfit is not None and observer.misfit > 1:
                raise CaptureError(f"{name}: {unknown_use(innermost(observer))}")

    def uninstall(self, layer: AttentionLayer, before: Any) -> None:
        """Put back what was there; where another capture has wrapped ours since, only step out."""
        ours = self.observers.get(layer.name)
        if ours is not None:  # the capture around this one may have left by now
            before = next(one for name, one in self.installed if name == layer.name).inner
        outer = layer.module.processor
        while isinstance(outer, ObservingProcessor) and outer is not ours:
            if ours is None:
                return  # not ours to undo
            if outer.inner is ours:
                del outer.inner  # a module may not be overwritten by a plain object
                outer.inner = before
                return
            outer = outer.inner
        if layer.module.processor is not before:
            layer.module.set_processor(before)

    def before_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook of the model: know the pass before its layers run.

        A capture belongs to the thread that entered it: calls of other threads are not looked at.
        """
        if get_ident() != self.thread:
            return
        call = read_call(model, args, kwargs)
        if self.latent_size is not None:
            call = replace(call, latent_size=self.latent_size)
        self._refuse_second_run()
        self._notice_swaps()
        if not self.store.passes:  # it may have been chosen inside
            check_backends(self.store.layers)
        self._notice_branches(call)
        order: Order = ("conditional",) if self.guidance is None else self.guidance.order()
        one = None if call.skips_layers else self._describe_pass(call, order)
        self.call = None if one is None else call
        if one is None:
            self.store.skipped += 1
            return
        self.store.begin_pass(one)
        if len(self.store.passes) == 1:  # resolutions and sizes can be told only now
            self.store.layers = select_layers(
                self.store.layers, self.selection, self.kinds, one.latent_size
            )
            self._say_bytes(call)

    def after_pass(self, *_: Any) -> None:
        """Layers that run now are run again for a gradient (checkpointing): no news."""
        if get_ident() == self.thread:
            self.call = None

    def _describe_pass(self, call: Call, order: Order) -> Pass | None:
        """What is kept of a call; None where it is of another branch only."""
        rows = branch_rows(order, call.batch)
        wanted: tuple[Branch, ...] = ("unconditional", "conditional")
        if self.branch != "both":
            wanted = tuple(name for name in wanted if name == self.branch)
        if missing := [name for name in wanted if name not in rows]:
            if self.guidance is not None and self.guidance.in_turn:
                return None
            raise CaptureError(
                f"Asked for branch={self.branch!r}, but this run has no {missing[0]} rows: it runs "
                "without guidance. Set guidance_scale above 1."
            )
        kept = [(row, name) for name in wanted for row in range(call.batch)[rows[name]]]
        asked = self.text_states
        return Pass(
            timestep=call.timestep,
            latent_size=call.latent_size,
            batch=call.batch,
            layout=order,
            rows=torch.tensor([row for row, _ in kept]),
            branches=tuple(name for _, name in kept),
            n_text=call.n_text if asked is None else asked.shape[1],
            position=self._position(call.timestep),
        )

    def _position(self, timestep: float) -> float | None:
        """Where in the schedule a timestep is. Image to image begins in the middle of one."""
        if self.schedule is None:
            return None
        distances = (torch.as_tensor(self.schedule).float() - timestep).abs()
        return (int(distances.argmin()) + 0.5) / len(distances)

    def spans(self) -> tuple[slice, slice] | None:
        """Of the pass that runs now: the picture's queries and the text's keys in joint attention;
        None if it is not kept."""
        call = self.call
        if call is None or call.latent_size is None:
            return None
        return joint_spans(self.denoiser.model, math.prod(call.latent_size), call.n_text)

    def _say_bytes(self, call: Call) -> None:
        """Work out, before anything is held, how much will be; say it if it is much."""
        store = self.store
        if store.latent_size is None:
            return  # how many queries a sequence has is not known before its layers run
        every = call.n_text + call.n_image if self.text_states is None else store.n_text
        keys = (every or 0) if store.tokens is None else len(store.tokens)
        passes = 1 if self.schedule is None else len(self.schedule)
        store.expected_nbytes = expected_bytes(
            store.layers,
            store.latent_size,
            keys,
            images=store.images,
            passes=passes,
            steps=store.steps,
            heads=store.heads,
            dtype=store.dtype,
        )
        if store.expected_nbytes > MUCH:
            logger.warning(
                "Capture will hold up to %.1f GB by the end of this run of %d model calls. Choose "
                "layers, tokens, steps or heads to hold less.",
                store.expected_nbytes / 1e9,
                passes,
            )

    def _refuse_second_run(self) -> None:
        scheduler = getattr(self.denoiser.pipeline, "scheduler", None)
        schedule = getattr(scheduler, "timesteps", None)
        again = (self.store.passes or self.store.skipped) and schedule is not self.schedule
        if again and getattr(self.denoiser.pipeline, "free_init_enabled", False):
            raise CaptureError(
                "FreeInit runs the whole schedule several times, which would mix the maps of all. "
                "Call pipe.disable_free_init(), or capture(pipe.unet)."
            )
        if again:
            raise CaptureError(
                "A second run of the pipeline began inside one capture(), which would mix the maps "
                "of two pictures. Enter capture() once for each run."
            )
        self.schedule = schedule

    def _notice_branches(self, call: Call) -> None:
        """On a model without its pipeline: say if it seems to run two branches in turn."""
        before, self.last = self.last, call
        if self.guidance is not None or before is None or self.said_branches:
            return
        if before.timestep == call.timestep and before.text is not call.text:
            self.said_branches = True
            warnings.warn(
                f"The model ran twice at timestep {call.timestep:g} with other text states, of the "
                "negative prompt perhaps. Both count as steps of the same images. Capture the "
                "pipeline to tell them apart, or steps='all' and choose.",
                CaptureWarning,
                stacklevel=2,
            )

    def _notice_swaps(self) -> None:
        swapped = []
        for layer in self.store.layers:
            processor = layer.module.processor
            while isinstance(processor, ObservingProcessor):
                if processor is self.observers[layer.name]:
                    break
                processor = processor.inner
            else:
                swapped.append(f"{layer.name} ({type(layer.module.processor).__name__})")
                self.install(layer)
        if swapped:
            warnings.warn(
                f"{len(swapped)} attention processors were replaced inside capture(); the new ones "
                "are watched from here on and those from before come back at the end: "
                + ", ".join(swapped[:3]),
                CaptureWarning,
                stacklevel=2,
            )

    def observe(self, layer: AttentionLayer, attended: Attended) -> None:
        if self.call is None or not self.store.wants(layer):
            return
        one = self.store.passes[-1]
        if attended.batch != one.batch:
            raise CaptureError(
                f"{layer.name} ran on {attended.batch} rows in a pass of {one.batch}, so which "
                "image each row belongs to is not known. Leave this layer out (layers=…)."
            )
        with torch.set_grad_enabled(self.store.grad and torch.is_grad_enabled()):
            self.store.add(layer, attended, one.rows)
