"""`StepController`: counts the calls and steps of a controller of prompt-to-prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from ..attention.joint_processor import Spans
from ..errors import InvalidValueError, RunError
from ..models.crops import Crop
from ..models.layers import PLACES, Place
from .attachment import Attachment, in_backward
from .drawn import DrawnPrompts
from .passes import CaptureError

Guidance = Literal["auto", "batch", "passes"]


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
        "pipe.unet.set_attn_processor(sdattn.TorchAttnProcessor(store)), in either order; of a "
        "transformer pipe.transformer.set_attn_processor(sdattn.TorchJointProcessor(store))."
    )

    def __init__(self, pipeline: Any, guidance: Guidance | None):
        if guidance not in ("auto", "batch", "passes", None):
            raise InvalidValueError(
                f"guidance={guidance!r}: pass 'auto', 'batch', 'passes' or None."
            )
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
        self.places: tuple[Place, ...] = PLACES
        self.images: int | None = None
        self.drawn: DrawnPrompts | None = None
        self.crop: Crop | None = None
        self._batch: int | None = None  # rows of the layer that calls, where it is known
        self._prompts: slice | None = None  # those of them that are the prompts'

    def attach(self, target: Any) -> None:
        """Tell the store whose layers will call it.

        From then on it knows each layer's place by the layer itself, how many call in a pass, the
        size of the latent and, of a pipeline, which rows of the batch are the prompts'. The model
        keeps its processors: have them call the store by
        ``set_attn_processor(sdattn.TorchAttnProcessor(store))``, before or after. Those of some
        layers only are counted as they are found in the first pass of a run. Until :meth:`detach` a
        pass that the store does not see whole is an error, so that it is never empty without a
        word. A new run of an attached pipeline begins with an empty store, so that two pictures are
        never mixed; a bare UNet has no runs, so there :meth:`reset` is yours, and so is
        ``guidance`` where the batch is even.

        Args:
            target: a pipeline of SD 1.x, 2.x, SDXL, Stable Diffusion 3, FLUX or Qwen-Image, or its
                UNet or transformer. One attached before is let go. Transformers take
                :class:`sdattn.TorchJointProcessor`.

        Raises:
            TypeError: ``target`` is no model of which the places of all layers are known.
            ValueError: how this class of pipeline lays out guidance is not known, or otherwise
                than ``guidance`` says.
        """
        attachment = Attachment(target, self)
        self.detach()
        self.attachment = attachment
        self.num_att_layers = len(attachment.callers)

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
        self,
        batch: int,
        latent_size: tuple[int, int],
        levels: int,
        prompts: slice | None = None,
        places: Sequence[Place] = PLACES,
    ) -> None:
        """Take note of a pass of the model, before its layers call.

        Args:
            batch: rows of the batch.
            latent_size: (rows, cols) of the latent.
            levels: number of the model's resolutions.
            prompts: the rows of the batch that are the prompts', where a pipeline knows them.
            places: those of the model's layers.

        Raises:
            CaptureError: the size has changed since the finished steps.
        """
        if self.cur_step and self.latent_size not in (None, latent_size):
            raise CaptureError(
                f"The {type(self).__name__} holds maps of a latent of {self.latent_size}; the "
                f"model was now called with {latent_size}. Call store.reset() between runs."
            )
        self.latent_size, self.levels, self.places = latent_size, levels, tuple(places)
        self._batch, self._prompts = batch, prompts

    def begin_layer(self, layer: nn.Module, batch: int) -> str:
        """Take note of the layer that is about to call, and of its rows of the batch.

        Returns:
            Its place; ``""`` where the store is not attached to the layer's model.
        """
        place = None if self.attachment is None else self.attachment.begin_layer(layer)
        self._batch = batch
        return place or ""

    def joint_spans(self, layer: nn.Module) -> Spans | None:
        """Where the picture's tokens and the text's are in a layer of joint attention that is
        about to call; None where the store is not attached to its model."""
        return None if self.attachment is None else self.attachment.joint_spans(layer)

    def __call__(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        """Take one layer's probabilities ``[B*heads, N, T]``; gives back the same tensor.

        What :meth:`forward` returns is written into it, in place. Not looked at are layers that run
        again for a gradient (checkpointing), a pass for the negative prompt alone, nor a pass in
        which other layers have lost the processors of this controller for a while (a knockout).

        Raises:
            CaptureError, ValueError: of an attached store, see :class:`sdattn.AttentionStore`.
            RuntimeError: a call that is not looked at, of a controller that may edit; how many
                layers call in a pass is not known.
        """
        if in_backward():
            self.refuse_edits(
                "the layer runs again for its gradient. Call unet.disable_gradient_checkpointing()."
            )
            return attn
        if self.attachment is not None and not self.attachment.begin_call():
            self.refuse_edits(
                "other layers have lost its processor for a while. Take it out of all of them "
                "first, unet.set_attn_processor(...)."
            )
            return attn
        if self.attachment is not None and self.attachment.skips:
            return attn
        # Of two passes a step the first is the negative prompt's: it is counted and not looked at.
        if self.cur_att_layer >= self.num_uncond_att_layers:
            kept = self._kept(len(attn))
            rows = attn if kept == slice(0, len(attn)) else attn[kept]
            # The kept rows are a view, so an edit reaches the whole tensor; a new tensor is written
            # into it.
            edited = self.forward(rows, is_cross, place_in_unet)
            if edited is not None and edited is not rows:
                rows.copy_(edited)
        if self.num_att_layers < 1:
            raise RunError(
                f"This {type(self).__name__} does not know how many layers call in a pass "
                f"(num_att_layers is {self.num_att_layers}), so no step would ever end. {self.HOW}"
            )
        # A step has ended when every layer has called.
        self.cur_att_layer += 1
        if self.cur_att_layer == self.num_att_layers + self.num_uncond_att_layers:
            self.cur_att_layer = 0
            self.cur_step += 1
            self.between_steps()
        return attn

    def refuse_edits(self, why: str) -> None:
        """Of a call that is not looked at: raise RuntimeError if :meth:`forward` may edit."""
        raise RunError(f"A {type(self).__name__} may edit attention, and cannot here: {why}")

    def _kept(self, rows: int) -> slice:
        """Those of ``rows`` rows, batch times heads, that are not unconditional."""
        batch = self._batch if self._batch and rows % self._batch == 0 else None
        start, stop = 0, batch or rows
        if self.guidance in ("auto", "batch"):
            if self._prompts is not None and batch:
                start, stop = self._prompts.start, self._prompts.stop
            elif not (batch or rows) % 2:  # an odd batch has no halves, and heads are no images
                start = (batch or rows) // 2
        self.images = stop - start if batch else None
        heads = rows // batch if batch else 1
        return slice(start * heads, stop * heads)
