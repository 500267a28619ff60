from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from ..attention.controlled import Spans
from ..errors import CaptureError, InvalidTypeError, refuse, warn
from ..follow.installer import in_backward
from ..follow.pass_options import Guidance
from ..follow.passes import CaptureWarning
from ..follow.text_watch import RepeatedCalls
from ..models.pipeline import Pipeline
from .attachment import Attachment
from .step_maps import KINDS
from .store_steps import StoreSteps

# Other projects' arguments, refused with an explanation.
_TAKEN = "pipeline, guidance, max_queries, kinds, keep_steps, save_global_store"
_RESOLUTION = (
    "a resolution, attn_res in diffusers' Attend-and-Excite and SynGen. Choose one where maps are "
    "read, store.aggregate_attention(from_where, res=16), or keep larger maps with max_queries"
)
_LOW_RESOURCE = (
    "low_resource in forks of prompt-to-prompt: guidance='batch' for False, 'passes' for True"
)
_NAMES = dict.fromkeys(("low_resource", "LOW_RESOURCE"), _LOW_RESOURCE)
_NAMES |= dict.fromkeys(("attn_res", "res", "max_resolution"), _RESOLUTION)


class AttentionStore(StoreSteps):
    """Attention maps by place and kind, step by step, as prompt-to-prompt code expects them.

        store = sdattn.AttentionStore(pipeline=pipe)
        pipe.unet.set_attn_processor(sdattn.TorchAttnProcessor(store))
        image = pipe("a cat left of a pizza").images[0]
        store.last_step["down_cross"]  # with mid_cross and up_cross all 16 maps of the last step
        store.heatmaps()[0]["cat"]
        store.remove()  # puts back the processors from before

    Anyone may call it: our processors, a class of your own, code that patches ``forward``. Each
    call, ``store(probs, is_cross=True, place_in_unet="down")``, appends one map ``[images*heads, N,
    T]`` to ``"down_cross"``. Joint attention has the places ``"double"`` and ``"single"``, and the
    kinds ``"cross"`` (image to text) and ``"self"`` (image to image). Entries are views of the live
    tensor: a later edit in place is what ends up stored. To edit, override :meth:`forward`. A step
    ends

    - never, while the store is alone: ``step_store`` fills until :meth:`reset`;
    - with each pass of the model that the store is attached to (``pipeline=``, :meth:`attach`);
    - after ``num_att_layers`` calls, once prompt-to-prompt code has set that number
      (:func:`sdattn.edit.register_attention_control`, or another project's);
    - with a call of ``between_steps()``, by a loop that knows it, for a store that is not attached.

    A store never makes a call of the pipeline fail. What it could not see whole (replaced
    processors, skipped layers) raises :class:`sdattn.CaptureError` when its maps are read.
    :class:`sdattn.control.step_maps.StepMaps` lists its attributes.

    Source: Hertz et al. 2022, google/prompt-to-prompt, for names, order and step counting.

    Args:
        pipeline: pipeline to attach the store to, see :meth:`attach`.
        guidance: where the unconditional rows are, which are not kept. ``"auto"``: an attached
            store asks the pipeline; a registered one takes the first half of an even batch, as
            prompt-to-prompt does; one that is alone keeps every row. ``"batch"``: the first half.
            ``"passes"``: the model runs twice a step, first for the negative prompt ("low
            resource"). None: every row is an image. With ``save_global_store`` set, ``"auto"`` is
            None.
        max_queries, kinds, keep_steps, save_global_store: see :class:`StepMaps`.

    Attributes:
        num_att_layers: calls per pass; -1 for a store that is alone, 0 for one that was detached.
        cur_att_layer: calls in the running step.
        latent_size: (rows, cols) of the latent; None if not known.
        levels: number of the model's resolutions; None if not known.
        images: rows of the batch that are kept; None if not known.
        drawn: prompts of the run; None if not known.
        texts: numbers of the texts that the steps were drawn from.
        curr_step_index: for callers' own count.

    Raises:
        TypeError: a positional argument, or another project's.
        ValueError: an unknown ``guidance`` or ``kinds``.
    """

    def __init__(
        self,
        *given: object,
        pipeline: Pipeline | None = None,
        guidance: Guidance | None = "auto",
        max_queries: int = 32**2,
        kinds: Sequence[str] | None = KINDS,
        keep_steps: bool = False,
        save_global_store: bool | None = None,
        **others: object,
    ):
        _refuse_foreign(type(self).__name__, given, others)
        if guidance not in ("auto", "batch", "passes", None):
            raise refuse("guidance", guidance, ("auto", "batch", "passes", None))
        if guidance == "auto" and save_global_store is not None:
            guidance = None  # Attend-and-Excite runs the prompt alone
        self.guidance = guidance
        self.repeats = RepeatedCalls()
        self.curr_step_index = 0
        self.attachment: Attachment | None = None
        super().__init__(
            max_queries=max_queries,
            kinds=kinds,
            keep_steps=keep_steps,
            save_global_store=save_global_store,
        )
        if pipeline is not None:
            self.attach(pipeline)

    def attach(self, target: Pipeline | nn.Module) -> None:
        """Follow a model, whose passes are the store's steps from now on.

        The model keeps its processors: make them call the store with
        ``set_attn_processor(sdattn.TorchAttnProcessor(store))``, in all layers or in some. A new
        run of the pipeline begins with an empty store. A bare UNet has no runs: call :meth:`reset`
        between them, and pass ``guidance=`` if its batch is even.

        Args:
            target: a pipeline of SD 1.x, 2.x, SDXL, Stable Diffusion 3, FLUX or Qwen-Image, or its
                UNet or transformer (which takes :class:`sdattn.TorchJointProcessor`).

        Raises:
            TypeError: a model whose layers' places are not known.
            ValueError: unknown guidance, or guidance that contradicts ``guidance``.
        """
        attachment = Attachment(target, self)
        self.detach()
        self.attachment = attachment
        self.num_att_layers = attachment.n_layers

    def detach(self) -> None:
        """Detach from the model. The maps stay; later calls are ignored until a reset or the next
        model."""
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None
            self.num_att_layers = 0

    def remove(self) -> None:
        """Put back the processors from before :meth:`attach`, and detach; warn if layers keep the
        store's."""
        if self.attachment is not None:
            self.note(self.attachment.problem(self))
            if left := self.attachment.restore(self):
                warn(left, CaptureWarning)
            self.detach()

    @contextmanager
    def attached(self, target: Pipeline | nn.Module) -> Iterator[AttentionStore]:
        """Attach for the length of a block, then :meth:`remove`, also after an exception."""
        self.attach(target)
        try:
            yield self
        finally:
            self.remove()

    def show(
        self, layer: nn.Module, batch: int, attn: Tensor, is_cross: bool, place: str
    ) -> Tensor:
        """Take a layer's probabilities; an attached store knows its place."""
        self._batch = batch
        known = None if self.attachment is None else self.attachment.place(layer)
        return self(attn, is_cross, place or known or "")

    def joint_spans(self, layer: nn.Module) -> Spans | None:
        """Return the places of image and text in a layer that is about to call, or None if
        unknown."""
        return None if self.attachment is None else self.attachment.joint_spans(layer)

    def __call__(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        """Take one layer's probabilities ``[B*heads, N, T]`` and return the same tensor.

        The result of :meth:`forward` is written into it, in place. The store ignores layers that
        run again for a gradient (checkpointing), passes for the negative prompt alone, and passes
        in which a knockout has replaced processors. Raise RuntimeError for such a call if
        :meth:`forward` may edit.
        """
        attachment = self.attachment
        if self.num_att_layers == 0:
            return attn
        if in_backward():
            self._refuse_edits(
                "the layer runs again for its gradient. Call unet.disable_gradient_checkpointing()."
            )
            return attn
        if attachment is not None and not attachment.begin_call(is_cross):
            if attachment.is_suspended:
                self._refuse_edits(
                    "other layers have lost its processor for a while. Take it out of all of them "
                    "first, unet.set_attn_processor(...)."
                )
            return attn
        if attachment is None:
            self.begin_place(place_in_unet)
        in_pass = attachment is not None and attachment.run.in_call
        n_calls = self.num_att_layers
        n_uncond = self.num_uncond_att_layers
        is_first = not self._is_second_pass if in_pass else self.cur_att_layer < n_uncond
        if not (n_uncond and is_first):
            self._look(attn, is_cross, place_in_unet)
        self.cur_att_layer += 1
        if not in_pass and n_calls > 0 and self.cur_att_layer >= n_calls + n_uncond:
            self._end_step()
        return attn

    def step_callback(self, x_t: Tensor) -> Tensor:
        """Return the latents unchanged; editing loops pass them after each step."""
        return x_t

    def check_whole(self) -> None:
        """Raise CaptureError if the store did not see the whole run; warn if it had to guess."""
        if self.attachment is None:
            problem = self.open_step() or self._problem
        else:
            problem = self._problem or self.attachment.problem(self)
        if problem:
            raise CaptureError(f"This {type(self).__name__} did not see the whole run: {problem}")
        if self.attachment is not None and (strays := self.attachment.run.doubts.take_strays()):
            warn(strays, CaptureWarning)
        repeated = self.repeats.found()
        # Attend-and-Excite runs the prompt again and again, and reads the last step alone
        is_told = self.guidance == "passes" or self._num_uncond > 0
        is_told = is_told or self.save_global_store is not None
        if repeated is not None and not is_told:
            self._guess = (
                f"The model ran twice at timestep {repeated:g} with other text states, perhaps "
                "for the negative prompt, and both count as steps of the same images. If so, "
                f"make the {type(self).__name__} with guidance='passes'."
            )
        if self._guess:
            warn(self._guess, CaptureWarning)
            self._guess = ""


def _refuse_foreign(name: str, given: Sequence[object], others: Mapping[str, object]) -> None:
    """Raise TypeError for positional or unknown arguments; name signatures that may be meant."""
    if given:
        raise InvalidTypeError(
            f"{name}({', '.join(map(repr, given))}): in first place this may be "
            f"{_meant(given[0])}. Pass options by name: {_TAKEN}."
        )
    for option, value in others.items():
        what = f"{_NAMES[option]}." if option in _NAMES else f"pass {_TAKEN}."
        raise InvalidTypeError(f"{name} has no option {option}={value!r}: {what}")


def _meant(value: object) -> str:
    if isinstance(value, bool):
        return f"save_global_store={value} of Attend-and-Excite; or {_LOW_RESOURCE}"
    if isinstance(value, (int, tuple, list)):
        return _RESOLUTION
    if isinstance(value, Mapping):
        return "the dictionary of Dataset-Diffusion's store, whose entries have no names here"
    if any(hasattr(value, part) for part in ("unet", "transformer", "forward")):
        return f"the model, pipeline={type(value).__name__}"
    return "an option"
