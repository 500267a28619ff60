"""`Attachment`: the tie between a store and the model whose layers call it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ..attention.joint_processor import Spans
from ..errors import InvalidTypeError, InvalidValueError, RunError
from ..models.denoiser_call import DenoiserCall
from ..models.guidance import guided_order
from ..models.layers import (
    AttentionLayer,
    Denoiser,
    Place,
    find_denoiser,
    is_unet,
)
from .callers import Callers
from .controlled_passes import ControlledPass, ControlledPasses, check_joint
from .drawn import PromptWatch
from .installer import Installation


class Attachment:
    """Tells a store, before each pass of a model, what its calls alone do not say.

    Nothing of the model is replaced: it gets a hook before its forward and one behind it, which go
    with :meth:`remove` or with the store, whichever is first.

    Args:
        target: a pipeline of SD 1.x, 2.x, SDXL, Stable Diffusion 3, FLUX or Qwen-Image, or its
            UNet or transformer.
        store: is held weakly.

    Raises:
        TypeError: ``target`` is no model of which the places of all layers are known.
        ValueError: how this class of pipeline lays out guidance is not known, or the store was
            made for another layout.
    """

    def __init__(self, target: Any, store: Any):
        denoiser, layers = controlled_layers(target)
        pipeline = denoiser.pipeline
        if pipeline is not None:
            _check_layout(pipeline)
        self._passes = ControlledPasses(denoiser)
        self._passes.check_guidance(store)
        self.levels, self._family = denoiser.levels, denoiser.family
        self.callers = Callers(layers)
        self._call: DenoiserCall | None = None  # until the first layer of a pass calls
        self._spans: Spans | None = None  # of this pass, in joint attention
        self._store = weakref.ref(store)
        installed = Installation()
        installed.watch(denoiser.model, self._before_pass, self._after_pass)
        self._prompts = PromptWatch(denoiser, installed)
        self._passes.listen(installed)
        self.remove = weakref.finalize(store, installed.remove)

    @property
    def passes(self) -> int:
        """How many steps the schedule of the run has; 1 where there is none."""
        schedule = self._passes.runs.schedule
        return 1 if schedule is None else len(schedule)

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

    @property
    def skips(self) -> bool:
        """Whether this pass is of no prompt: of the negative one alone, or with layers skipped."""
        return self.callers.skips

    def joint_spans(self, layer: nn.Module) -> Spans | None:
        """Where the picture's tokens and the text's are in a layer's call that runs now; no text,
        ``slice(0, 0)``, in self-attention. None for a layer of another model."""
        kind = self.callers.kind(layer)
        return self._spans if kind in (None, "joint") else (slice(0, 0), slice(0, 0))

    def _before_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not in_backward():
            self._call = self._family.read_call(model, args, kwargs)
            self.callers.begin_pass()

    def _begin_pass(self) -> None:
        """Once a pass, when its first layer calls: hooks of the model that set processors have all
        run by then."""
        store, call, self._call = self._store(), self._call, None
        if store is None or call is None:
            return
        found = self._passes.read(call)
        self._spans = found.spans
        callers = self.callers.look(store)
        if not callers:  # the store rests, or is called in another way
            return
        self.callers.skips = found.of_no_prompt
        if found.begins_run and (store.cur_step or store.cur_att_layer):
            store.reset()
        refuse_broken_step(store)
        self.callers.check_run(store)
        if found.of_no_prompt:
            return
        store.num_att_layers = callers
        prompts = self._rows(store, found)
        # where every row is kept, the first may be those of the negative prompts
        is_known = store.guidance is not None or prompts == slice(0, found.batch)
        if not (store.cur_step or store.cur_att_layer):
            store.drawn = self._prompts.drawn() if is_known else None
            store.crop = self._prompts.crop()
        store.begin_pass(found.batch, found.size, self.levels, prompts, self.callers.places)

    def _after_pass(self, *_: Any) -> None:
        store, self._call = self._store(), None
        if store is not None:
            self.callers.end_pass(store)

    def _rows(self, store: Any, found: ControlledPass) -> slice | None:
        """The rows of the batch that are the prompts'; None where no pipeline knows them."""
        batch = found.batch
        if found.order is None and store.guidance == "auto" and batch % 2 == 0:
            raise InvalidValueError(
                f"The model was called with a batch of {batch} outside of its pipeline, so whether "
                f"its first half is unconditional is not known. Make the {type(store).__name__} "
                "with guidance=None (every row is an image), 'batch' (it is) or 'passes' (the "
                "first of two passes is)."
            )
        return found.prompts


def controlled_layers(target: Any) -> tuple[Denoiser, list[AttentionLayer]]:
    """A model whose layers a controller of prompt-to-prompt can be called by, and its layers in the
    order in which they run: a UNet of self- and cross-attention, or a transformer of joint
    attention whose order its family knows.

    Raises:
        TypeError: ``target`` is no such model.
    """
    denoiser = find_denoiser(target)
    layers = denoiser.layers
    kinds = {layer.kind for layer in layers}
    if "joint" in kinds and kinds <= {"joint", "self"}:
        check_joint(denoiser, layers)
    elif not kinds <= {"cross", "self"} or not is_unet(denoiser.model):
        strange = sorted(kinds - {"cross", "self"})
        raise InvalidTypeError(
            f"A {type(denoiser.model).__name__} is no UNet of Stable Diffusion and has no joint "
            f"attention alone, but {' and '.join(strange) or 'other'} attention in other places, "
            "which the controllers of prompt-to-prompt do not know. Pass a pipeline of SD 1.x, "
            "2.x, SDXL, Stable Diffusion 3, FLUX or Qwen-Image, or its UNet or transformer."
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
