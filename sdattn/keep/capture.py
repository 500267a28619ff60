"""`watch_model()`: install the observing processors, watch the model run, restore everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from threading import get_ident
from typing import Any, TypeVar

from ..attention.device_copies import DeviceCopies
from ..errors import InvalidValueError, OptionError
from ..follow.capture_warnings import RunWarnings, Stopped
from ..follow.drawn import PromptWatch
from ..follow.follower import Follower
from ..follow.installer import Installation
from ..follow.pass_reader import PassReader
from ..look.joint_checks import check_backends, check_ways
from ..look.other_text import asked_layers
from ..look.refined import Spreading, spreading_layers
from ..look.text_stream import TextStream
from ..models.layers import (
    AttentionLayer,
    Denoiser,
    checked_kinds,
    find_denoiser,
    select_layers,
    unwrapped,
)
from ..models.pipeline import Pipeline
from .keep import Keep
from .map_store import CapturedMaps
from .watch import Watch

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
    reader = PassReader(
        denoiser,
        keep.branch,
        keep.guidance,
        keep.latent_size,
        counts_gradients=keep.grad,
        frames=keep.frames,
        step_call=keep.step_call,
    )
    other = denoiser.stands_in
    twins = [] if other is None else denoiser.family.find_layers(unwrapped(other))
    # a user may replace any of them
    with Installation([*every, *twins]) as installed:
        follower = Follower(denoiser, reader, installed, thread=get_ident())
        asked = None if text_states is None else DeviceCopies(text_states)
        prompts = PromptWatch(denoiser, installed) if asked is None else None
        warns = RunWarnings(denoiser, keep.branch, follower.strays)
        watch = Watch(follower, installed, store, (keep.layers, kinds), asked, prompts, warns)
        follower.subscribe(watch)
        if asked is not None and any(layer.kind == "joint" for layer in layers_asked):
            watch.stream = TextStream(denoiser, asked, keep.grad)
            watch.stream.follow(installed, layers_asked)
        if keep.refine:
            watch.spreading = Spreading(is_part=len(store.layers) < len(chosen))
            store.watch_text(chosen, watch.spreading)
        with closing(watch):
            watch.begin(denoiser.model, chosen)
            if other is not None:
                names = {layer.name for layer in chosen}
                watch.begin(other, [twin for twin in twins if twin.name in names])
            # The model runs in the caller's block.
            yield store
            watch.check()
    store.has_no_guidance = reader.watch is not None and reader.watch.may_never_act
    store.stopped = _stopped(denoiser.pipeline, store) if watch.may_stop else None
    if not (store.passes or store.skipped):
        watch.warns.refuse_strays()
    if store.checks_itself:
        if store.stopped is not None:
            store.stopped.tell()
        store.check()
    watch.warns.tell()


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
