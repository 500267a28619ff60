"""`Attachment`: the tie between a store and the model whose layers call it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ..errors import InvalidTypeError, InvalidValueError, RunError
from ..models.guidance import branch_order, branch_rows, guided_order
from ..models.layers import (
    AttentionLayer,
    Denoiser,
    Place,
    find_denoiser,
    is_unet,
)
from .callers import Callers
from .drawn import PromptWatch
from .installer import Installation
from .run_watch import RunWatch


class Attachment:
    """Tells a store, before each pass of a model, what its calls alone do not say.

    Nothing of the model is replaced: it gets a hook before its forward and one behind it, which go
    with :meth:`remove` or with the store, whichever is first.

    Args:
        target: a pipeline of SD 1.x, 2.x or SDXL, or its UNet.
        store: is held weakly.

    Raises:
        TypeError: ``target`` is no model of which the places of all layers are known.
        ValueError: how this class of pipeline lays out guidance is not known.
    """

    def __init__(self, target: Any, store: Any):
        denoiser, layers = unet_layers(target)
        if denoiser.pipeline is not None:
            _check_layout(denoiser.pipeline)
        self.levels, self._family = denoiser.levels, denoiser.family
        self.callers = Callers(layers)
        pipeline = denoiser.pipeline
        self._pipeline: Any = (lambda: None) if pipeline is None else weakref.ref(pipeline)
        self._runs = RunWatch()
        self._sample: Any = None  # the shape of the latent, until the first layer of a pass calls
        self._store = weakref.ref(store)
        installed = Installation()
        installed.watch(denoiser.model, self._before_pass, self._after_pass)
        self._prompts = PromptWatch(denoiser, installed)
        self.remove = weakref.finalize(store, installed.remove)

    @property
    def passes(self) -> int:
        """How many steps the schedule of the run has; 1 where there is none."""
        return 1 if self._runs.schedule is None else len(self._runs.schedule)

    def begin_layer(self, layer: nn.Module) -> Place | None:
        """Take note of a layer that is about to call.

        Returns:
            Its place; None for a layer of another model.
        """
        if not in_backward():
            self._begin_pass()
            self.callers.note(layer)
        return self.callers.place(layer)

    def begin_call(self) -> bool:
        """Take note of a call.

        Returns:
            Whether the store is to look at it; not in a pass in which it rests, see
            :class:`Callers`.
        """
        self._begin_pass()
        self.callers.calls += 1
        return not self.callers.rests

    def _before_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not in_backward():
            self._sample = self._family.latents(model, args, kwargs).shape
            self.callers.begin_pass()

    def _begin_pass(self) -> None:
        """Once a pass, when its first layer calls: hooks of the model that set processors have all
        run by then."""
        store, sample, self._sample = self._store(), self._sample, None
        if store is None or sample is None:
            return
        callers = self.callers.look(store)
        if not callers:  # the store rests, or is called in another way
            return
        is_new = self._runs.begins(self._pipeline())
        if is_new and (store.cur_step or store.cur_att_layer):
            store.reset()
        refuse_broken_step(store)
        self.callers.check_run(store)
        store.num_att_layers = callers
        prompts = self._rows(store, sample[0])
        # where every row is kept, the first may be those of the negative prompts
        is_known = store.guidance is not None or prompts == slice(0, sample[0])
        if not (store.cur_step or store.cur_att_layer):
            store.drawn = self._prompts.drawn() if is_known else None
        store.begin_pass(sample[0], tuple(sample[-2:]), self.levels, prompts)

    def _after_pass(self, *_: Any) -> None:
        store = self._store()
        if store is not None:
            self.callers.end_pass(store)

    def _rows(self, store: Any, batch: int) -> slice | None:
        """The rows of the batch that are the prompts'; None where no pipeline knows them."""
        pipeline = self._pipeline()
        try:
            order = None if pipeline is None else branch_order(pipeline)
        except AttributeError:  # it has not run yet: the model is called by hand
            order = None
        if order is not None:
            return branch_rows(order, batch)["conditional"]
        if store.guidance == "auto" and batch % 2 == 0:
            raise InvalidValueError(
                f"The model was called with a batch of {batch} outside of its pipeline, so whether "
                f"its first half is unconditional is not known. Make the {type(store).__name__} "
                "with guidance=None (every row is an image), 'batch' (it is) or 'passes' (the "
                "first of two passes is)."
            )
        return None


def unet_layers(target: Any) -> tuple[Denoiser, list[AttentionLayer]]:
    """A UNet of self- and cross-attention in down, mid and up blocks, and its layers in order.

    Raises:
        TypeError: ``target`` is no such model.
    """
    denoiser = find_denoiser(target)
    layers = denoiser.layers
    strange = sorted({layer.kind for layer in layers} - {"cross", "self"})
    if strange or not is_unet(denoiser.model):
        raise InvalidTypeError(
            f"A {type(denoiser.model).__name__} is no UNet of Stable Diffusion, or has "
            f"{' and '.join(strange) or 'other'} attention in other places, which the "
            "controllers of prompt-to-prompt do not know. Pass a UNet of SD 1.x, 2.x or SDXL, or "
            "its pipeline."
        )
    return denoiser, layers


def refuse_broken_step(controller: Any) -> None:
    """Raise RuntimeError where the model begins a pass while a step of ``controller`` is open."""
    begun = getattr(controller, "cur_att_layer", 0)
    if begun not in (0, getattr(controller, "num_uncond_att_layers", 0)):
        raise RunError(
            f"The {type(controller).__name__} is in the middle of a step: {begun} layers have "
            "called, and the model starts anew. After a run that was broken off, reset() the "
            "controller."
        )


def _check_layout(pipeline: Any) -> None:
    try:
        guided_order(pipeline)
    except ValueError:
        raise InvalidValueError(
            f"How a {type(pipeline).__name__} lays out guidance in its batch is not known. Attach "
            "its UNet, store.attach(pipe.unet), and say it: AttentionStore(guidance='batch') where "
            "the first half of the batch is unconditional, guidance=None to keep every row."
        ) from None


def in_backward() -> bool:
    """Whether a backward pass is calling this; it runs checkpointed layers a second time."""
    # torch.utils.checkpoint and torch.utils.module_tracker ask so; there is no public name for it
    return torch._C._current_graph_task_id() != -1
