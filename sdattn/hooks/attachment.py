"""The tie between an `AttentionStore` and the model whose layers call it."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import nn

from ..models.denoiser_call import innermost
from ..models.guidance import branch_order, branch_rows, guided_order
from ..models.layers import AttentionLayer, Denoiser, Place, find_denoiser, find_layers, is_unet
from .installer import Installation


class Counting(Protocol):
    """What an attachment knows of its :class:`sdattn.AttentionStore`."""

    cur_step: int
    cur_att_layer: int
    num_att_layers: int

    def reset(self) -> None: ...

    def begin_pass(
        self, batch: int, latent_size: tuple[int, int], levels: int, prompts: slice | None
    ) -> None: ...


class Attachment:
    """Tells a store, before each pass of a model, what its calls alone do not say.

    Nothing of the model is replaced: it gets one forward pre-hook, which goes with
    :meth:`remove` or with the store, whichever is first.

    Args:
        target: a pipeline of SD 1.x, 2.x or SDXL, or its UNet.
        store: is held weakly.

    Raises:
        TypeError: ``target`` is no model of which the places of all layers are known.
        ValueError: how this class of pipeline lays out guidance is not known.
    """

    def __init__(self, target: Any, store: Counting):
        denoiser, layers = unet_layers(target)
        if denoiser.pipeline is not None:
            _check_layout(denoiser.pipeline)
        self.n_layers, self.levels = len(layers), denoiser.levels
        # the weights go when their pipeline does, not when the last store of theirs goes
        self._places = weakref.WeakKeyDictionary({la.module: la.place for la in layers})
        pipeline = denoiser.pipeline
        self._pipeline: Any = (lambda: None) if pipeline is None else weakref.ref(pipeline)
        self._schedule: Any = None
        self._store = weakref.ref(store)
        installed = Installation()
        installed.watch(denoiser.model, self._before_pass)
        self.remove = weakref.finalize(store, installed.remove)

    def place(self, module: nn.Module) -> Place | None:
        """``"down"``, ``"mid"`` or ``"up"``; None for a layer of another model."""
        return self._places.get(module)

    @property
    def passes(self) -> int:
        """How many steps the pipeline's schedule has; 1 where there is none."""
        schedule = self._timesteps()
        return 1 if schedule is None else len(schedule)

    def _before_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        store = self._store()
        if store is None:
            return
        callers = sum(
            getattr(innermost(module.processor), "controller", None) is store
            for module in self._places
        )
        if not callers:  # its processors are gone, or not there yet
            return
        before, self._schedule = self._schedule, self._timesteps()
        if before is not self._schedule and (store.cur_step or store.cur_att_layer):  # a new run
            store.reset()
        refuse_broken_step(store)
        store.num_att_layers = callers
        sample = args[0] if args else kwargs["sample"]
        store.begin_pass(len(sample), tuple(sample.shape[-2:]), self.levels, self._rows(sample))

    def _rows(self, sample: Any) -> slice | None:
        """The rows of the batch that are the prompts'; None where no pipeline knows them."""
        pipeline = self._pipeline()
        try:
            order = None if pipeline is None else branch_order(pipeline)
        except AttributeError:  # it has not run yet: the model is called by hand
            order = None
        return None if order is None else branch_rows(order, len(sample))["conditional"]

    def _timesteps(self) -> Any:
        return getattr(getattr(self._pipeline(), "scheduler", None), "timesteps", None)


def unet_layers(target: Any) -> tuple[Denoiser, list[AttentionLayer]]:
    """A UNet of self- and cross-attention in down, mid and up blocks, and its layers in order.

    Raises:
        TypeError: ``target`` is no such model.
    """
    denoiser = find_denoiser(target)
    layers = find_layers(denoiser.model)
    strange = sorted({layer.kind for layer in layers} - {"cross", "self"})
    if strange or not is_unet(denoiser.model):
        raise TypeError(
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
        raise RuntimeError(
            f"The {type(controller).__name__} is in the middle of a step: {begun} layers have "
            "called, and the model starts anew. After a run that was broken off, reset() the "
            "controller."
        )


def _check_layout(pipeline: Any) -> None:
    try:
        guided_order(pipeline)
    except ValueError:
        raise ValueError(
            f"How a {type(pipeline).__name__} lays out guidance in its batch is not known. Attach "
            "its UNet, store.attach(pipe.unet): the first half of an even batch is then taken for "
            "unconditional; with AttentionStore(guidance=None) every row is kept."
        ) from None
