"""`StepController`: counts the calls and steps of a controller of prompt-to-prompt; `Attachment`:
the tie between it and the model whose layers call it."""

from __future__ import annotations

import weakref
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import InvalidTypeError, InvalidValueError, RunError
from ..models.denoiser_call import innermost
from ..models.guidance import branch_order, branch_rows, guided_order
from ..models.layers import AttentionLayer, Denoiser, Place, find_denoiser, find_layers, is_unet
from .installer import Installation
from .passes import CaptureError

Guidance = Literal["batch", "passes"]


class StepController:
    """Counts the layers that call and the steps that they make, and leaves out unconditional rows.

    A subclass looks at the others in :meth:`forward`, and at a finished step in
    :meth:`between_steps`.

    Source: Hertz et al. 2022, "Prompt-to-Prompt Image Editing with Cross Attention Control",
    ``AttentionControl`` of google/prompt-to-prompt.

    Args:
        pipeline, guidance: as of :class:`sdattn.AttentionStore`, as are the attributes.
    """

    HOW = (
        "Call store.attach(pipe), once, and "
        "pipe.unet.set_attn_processor(sdattn.TorchAttnProcessor(store)), in either order."
    )

    def __init__(self, pipeline: Any, guidance: Guidance | None):
        if guidance not in ("batch", "passes", None):
            raise InvalidValueError(f"guidance={guidance!r}: pass 'batch', 'passes' or None.")
        self.guidance = guidance
        self.num_att_layers = -1
        self.curr_step_index = 0
        self.attachment: Attachment | None = None
        self.reset()
        if pipeline is not None:
            self.attach(pipeline)

    def forward(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        """Look at the rows that are not left out, ``[images*heads, N, T]``."""
        raise NotImplementedError

    def between_steps(self) -> None:
        """Called when the last layer of a step has called."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all steps."""
        self.cur_step = 0
        self.cur_att_layer = 0
        self.latent_size: tuple[int, int] | None = None
        self.levels: int | None = None
        self.images: int | None = None
        self._batch: int | None = None  # rows of the layer that calls, where it is known
        self._prompts: slice | None = None  # those of them that are the prompts'

    def attach(self, target: Any) -> None:
        """Tell the store whose layers will call it.

        From then on it knows each layer's place by the layer itself, how many call in a pass, the
        size of the latent and, of a pipeline, which rows of the batch are the prompts'. The model
        keeps its processors: have them call the store by
        ``set_attn_processor(sdattn.TorchAttnProcessor(store))``, before or after. Those of some
        layers only are counted as they are found when a pass begins. A new run of an attached
        pipeline begins with an empty store, so that two pictures are never mixed; a bare UNet has
        no runs, so there :meth:`reset` is yours.

        Args:
            target: a pipeline of SD 1.x, 2.x or SDXL, or its UNet. One attached before is let go.

        Raises:
            TypeError: ``target`` is no model of which the places of all layers are known.
            ValueError: how this class of pipeline lays out guidance is not known.
        """
        attachment = Attachment(target, self)
        self.detach()
        self.attachment = attachment
        self.num_att_layers = attachment.n_layers

    def detach(self) -> None:
        """Let go of the model; what was kept stays."""
        if self.attachment is not None:
            self.attachment.remove()
            self.attachment = None

    @property
    def num_uncond_att_layers(self) -> int:
        """Calls at the start of each step that are of the unconditional pass, and not looked at."""
        return self.num_att_layers if self.guidance == "passes" else 0

    def begin_pass(
        self, batch: int, latent_size: tuple[int, int], levels: int, prompts: slice | None = None
    ) -> None:
        """Take note of a pass of the model, before its layers call.

        Args:
            batch: rows of the batch.
            latent_size: (rows, cols) of the latent.
            levels: number of the model's resolutions.
            prompts: the rows of the batch that are the prompts', where a pipeline knows them.

        Raises:
            CaptureError: the size has changed since the finished steps.
        """
        if self.cur_step and self.latent_size not in (None, latent_size):
            raise CaptureError(
                f"The {type(self).__name__} holds maps of a latent of {self.latent_size}; the "
                f"model was now called with {latent_size}. Call store.reset() between runs."
            )
        self.latent_size, self.levels = latent_size, levels
        self._batch, self._prompts = batch, prompts

    def begin_layer(self, layer: nn.Module, batch: int) -> str:
        """Take note of the layer that is about to call, and of its rows of the batch.

        Returns:
            Its place; ``""`` where the store is not attached to the layer's model.
        """
        self._batch = batch
        return "" if self.attachment is None else self.attachment.place(layer) or ""

    def __call__(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        """Take one layer's probabilities ``[B*heads, N, T]``; gives back the same tensor.

        What :meth:`forward` returns is written into it, in place.
        """
        if self.cur_att_layer >= self.num_uncond_att_layers:
            kept = self._kept(len(attn))
            rows = attn if kept == slice(0, len(attn)) else attn[kept]
            edited = self.forward(rows, is_cross, place_in_unet)
            if edited is not None and edited is not rows:
                rows.copy_(edited)
        if self.num_att_layers < 1:
            raise RunError(
                f"This {type(self).__name__} does not know how many layers call in a pass "
                f"(num_att_layers is {self.num_att_layers}), so no step would ever end. {self.HOW}"
            )
        self.cur_att_layer += 1
        if self.cur_att_layer == self.num_att_layers + self.num_uncond_att_layers:
            self.cur_att_layer = 0
            self.cur_step += 1
            self.between_steps()
        return attn

    def _kept(self, rows: int) -> slice:
        """Those of ``rows`` rows, batch times heads, that are not unconditional."""
        batch = self._batch if self._batch and rows % self._batch == 0 else None
        start, stop = 0, batch or rows
        if self.guidance == "batch":
            if self._prompts is not None and batch:
                start, stop = self._prompts.start, self._prompts.stop
            elif not (batch or rows) % 2:  # an odd batch has no halves, and heads are no images
                start = (batch or rows) // 2
        self.images = stop - start if batch else None
        heads = rows // batch if batch else 1
        return slice(start * heads, stop * heads)


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

    def __init__(self, target: Any, store: StepController):
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
            "its UNet, store.attach(pipe.unet): the first half of an even batch is then taken for "
            "unconditional; with AttentionStore(guidance=None) every row is kept."
        ) from None
