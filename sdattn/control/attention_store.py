from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import product
from typing import Any, cast, get_args

from torch import Tensor, nn

from ..attention.controlled import LayerController, Spans
from ..errors import CaptureError, RunError, refuse, warn
from ..follow.drawn import DrawnPrompts
from ..follow.installer import in_backward
from ..follow.pass_options import Guidance
from ..follow.passes import CaptureWarning, Pass
from ..follow.text_watch import RepeatedCalls, TextsOfRun
from ..maps.by_place import aggregated
from ..maps.folded import Maps, MeanMaps, StepChoice, StepStore, folded_maps
from ..maps.from_stores import heatmaps
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMaps
from ..maps.presets import Preset, preset_of
from ..models.denoiser_call import Size
from ..models.layers import PLACES, Place
from ..models.pipeline import Pipeline
from .attachment import Attachment
from .foreign_options import refuse_foreign_options
from .step_end import HOW, StepEnd
from .steps import KINDS, Steps, averaged


def _of(part: str, name: str) -> Any:
    """Return a property of the store that reads and sets an attribute of one of its parts."""

    def read(store: AttentionStore) -> Any:
        return getattr(getattr(store, part), name)

    def write(store: AttentionStore, value: object) -> None:
        setattr(getattr(store, part), name, value)

    return property(read, write)


class AttentionStore(StepStore, LayerController):
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

    Maps are dictionaries of lists in call order:

    ============================ ==================== ==============================================
    ``step_store``               <= ``max_queries``   the running step; after a pass of an attached
                                                      model ``last_step``
    ``attention_store``          <= ``max_queries``   the sum over the finished steps
    ``full_attention_store``     cross, of any size   the same
    ``last_step``                cross, of any size   the last finished step
    ``steps``                    cross, of any size   each finished step, with ``keep_steps=True``
    ============================ ==================== ==============================================

    For SD 1.x at 512x512 and one image, the maps of any size are ``[8, n, 77]``, with n in
    ``down_cross`` 4096 x2, 1024 x2, 256 x2, in ``mid_cross`` 64, in ``up_cross`` 256 x3, 1024 x3,
    4096 x3: 66 MB in float32. The others leave out the 4096: editing code picks maps by position
    after that.

    A store never makes a call of the pipeline fail. What it could not see whole (replaced
    processors, skipped layers) raises :class:`sdattn.CaptureError` when its maps are read.

    Source: Hertz et al. 2022, google/prompt-to-prompt, for names, order and step counting.

    Args:
        pipeline: pipeline to attach the store to, see :meth:`attach`.
        guidance: where the unconditional rows are, which are not kept. ``"auto"``: an attached
            store asks the pipeline; a registered one takes the first half of an even batch, as
            prompt-to-prompt does; one that is alone keeps every row. ``"batch"``: the first half.
            ``"passes"``: the model runs twice a step, first for the negative prompt ("low
            resource"). None: every row is an image. With ``save_global_store`` set, ``"auto"`` is
            None.
        max_queries: limit of ``step_store`` and ``attention_store``; none while a store is alone.
        kinds: ``"cross"`` and/or ``"self"``; None for controllers that only edit.
        keep_steps: keep each step in ``steps``; a run that will hold more than 1 GB logs a warning.
        save_global_store: None sums over steps. True or False, as in Chefer et al. 2023,
            yuval-alaluf/Attend-and-Excite: ``attention_store`` is the last step alone, with its
            graph; with True ``global_store`` holds the detached sums.

    Attributes:
        cur_step: number of finished steps; one per pass of the model (one per two with
            ``guidance="passes"``), so a second-order scheduler has about two per timestep.
        num_att_layers: calls per pass; -1 for a store that is alone, 0 for one that was detached.
        cur_att_layer: calls in the running step.
        num_uncond_att_layers: calls at the start of each step for the negative prompt, which are
            not kept.
        latent_size: (rows, cols) of the latent; None if not known.
        levels: number of the model's resolutions; None if not known.
        images: rows of the batch that are kept; None if not known.
        drawn: prompts of the run; None if not known.
        texts: numbers of the texts that the steps were drawn from.
        passes: steps in the run, if known, else 1.
        repeats: passes outside of a pipeline's call.
        curr_step_index: for callers' own count.

    Raises:
        TypeError: a positional argument, or another project's.
        ValueError: an unknown ``guidance`` or ``kinds``.
    """

    cur_step: int = _of("_steps", "cur_step")
    step_store: Maps = _of("_steps", "step_store")
    attention_store: Maps = _of("_steps", "attention_store")
    full_attention_store: Maps = _of("_steps", "full_attention_store")
    global_store: Maps = _of("_steps", "global_store")
    kinds: tuple[str, ...] = _of("_steps", "kinds")
    max_queries: int = _of("_steps", "max_queries")
    keep_steps: bool = _of("_steps", "keep_steps")
    save_global_store: bool | None = _of("_steps", "save_global_store")
    num_att_layers: int = _of("_step_end", "num_att_layers")
    cur_att_layer: int = _of("_step_end", "cur_att_layer")
    num_uncond_att_layers: int = _of("_step_end", "num_uncond_att_layers")
    guidance: Guidance | None = _of("_step_end", "guidance")

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
        refuse_foreign_options(type(self).__name__, given, others)
        if guidance not in ("auto", "batch", "passes", None):
            raise refuse("guidance", guidance, ("auto", "batch", "passes", None))
        if guidance == "auto" and save_global_store is not None:
            guidance = None  # Attend-and-Excite runs the prompt alone
        self._step_end = StepEnd(guidance)
        self._steps = Steps(
            max_queries=max_queries,
            kinds=kinds,
            keep_steps=keep_steps,
            save_global_store=save_global_store,
        )
        self.passes = 1
        self.repeats = RepeatedCalls()
        self.curr_step_index = 0
        self.attachment: Attachment | None = None
        self.reset()
        if pipeline is not None:
            self.attach(pipeline)

    @staticmethod
    def get_empty_store() -> Maps:
        """Return an empty list for each ``{place}_{kind}`` of a UNet."""
        return {f"{place}_{kind}": [] for kind, place in product(KINDS, PLACES)}

    def reset(self) -> None:
        """Forget all maps and steps."""
        self._steps.forget()
        self._step_end.forget()
        self.latent_size: tuple[int, int] | None = None
        self.levels: int | None = None
        self.places: tuple[Place, ...] = PLACES
        self.images: int | None = None
        self.drawn: DrawnPrompts | None = None
        self.texts = TextsOfRun()
        self._batch: int | None = None  # rows of the pass
        self._prompts: slice | None = None  # the prompts' among them
        self._is_shown_part = False  # of a larger tensor, which a view would keep alive
        self._problem = ""  # why the maps are not whole
        self._guess: str | None = None  # warning still to be given
        if self.attachment is not None:
            self.attachment.forget()
        self._steps.begin(self.get_empty_store(), self.places)

    def __copy__(self) -> AttentionStore:
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self), _steps=copy(self._steps), _step_end=copy(self._step_end))
        return twin

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

    def begin_run(self) -> None:
        """Note that a run begins, for a registered store: two are told when their mean is read."""
        if self.cur_step and self.save_global_store is None:
            self._guess = (
                f"This {type(self).__name__} holds several runs, and what is read is their mean. "
                "Call reset() between them, or use a new store for each."
            )

    def begin_pass(
        self, begun: Pass, *, levels: int, places: Sequence[Place], prompts: slice | None
    ) -> None:
        """Begin a pass of the model before its layers call; ``prompts`` are the prompts' rows, if a
        pipeline knows them."""
        before = self.latent_size
        rows, cols = cast(Size, begun.latent_size)
        size = (rows, cols)
        if self.cur_step and before not in (None, size):
            self.reset()
            self.note(
                f"the latent was {before} at first and {size} later. Call store.reset() "
                "between runs."
            )
        self.latent_size = size
        self.levels = levels
        self.places = tuple(places)
        self.texts.add(begun.text_changed, begun.text_by_frame)
        self._batch = begun.batch
        self._prompts = prompts
        if not self._step_end.is_second_pass:
            if self.attachment is not None:
                self.cur_att_layer = 0  # an earlier pass may have broken off
            self._steps.begin(self.get_empty_store(), self.places)

    def end_pass(self, calls: int) -> None:
        """End a pass of the attached model, and the step of which it is the last."""
        if self._step_end.ends_with_pass(calls):
            self._end_step()
            self.step_store.update(self._steps.last)  # as in a store that is alone

    def _end_step(self) -> None:
        self._step_end.begin()
        self.cur_step += 1
        self.between_steps()
        self._steps.begin(self.get_empty_store(), self.places)

    def between_steps(self) -> None:
        """Add the running step to the sums. A loop that knows where steps end may call this; the
        calls up to here are then a step, whatever their number."""
        if self.cur_att_layer:
            self._end_step()
            return
        self._steps.add(self.passes)
        if self._steps.has_mixed_shapes:
            self.note("its steps have maps of different shapes. Call store.reset() between runs.")

    def note(self, problem: str) -> None:
        """Remember why maps are missing; the first reason is the one reported."""
        self._problem = self._problem or problem

    def pass_over(self, why: str) -> None:
        """Remember a call that cannot be looked at; raise RuntimeError if :meth:`forward` may
        edit."""
        self.note(why)
        self._refuse_edits(why)

    @property
    def may_edit(self) -> bool:  # type: ignore[override]
        """True if an override may edit what it is handed."""
        kind = type(self)
        is_ours = kind.__call__ is AttentionStore.__call__ and kind.show is AttentionStore.show
        forward = getattr(self.forward, "__func__", None)
        return not is_ours or forward is not AttentionStore.forward

    def _refuse_edits(self, why: str) -> None:
        if self.may_edit:
            raise RunError(f"A {type(self).__name__} may edit attention, but cannot here: {why}")

    def show(
        self, layer: nn.Module, batch: int, attn: Tensor, is_cross: bool, place: str
    ) -> Tensor:
        """Take a layer's probabilities; an attached store knows its place."""
        self._batch = batch
        known = None if self.attachment is None else self.attachment.place(layer)
        self._is_shown_part = not attn.is_contiguous()
        try:
            return self(attn, is_cross, place or known or "")
        finally:
            self._is_shown_part = False

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
            self._step_end.reach(place_in_unet)
        in_pass = attachment is not None and attachment.run.in_call
        if not self._step_end.skips_call(in_pass):
            self._look(attn, is_cross, place_in_unet)
        if self._step_end.ends_with_call(in_pass):
            self._end_step()
        return attn

    def forward(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        """Append ``attn``, the kept rows, to its list; an override may edit or replace it."""
        is_alone = self.num_att_layers < 1
        copies = self._is_shown_part
        self._steps.append(attn, is_cross, place_in_unet, of_any_size=is_alone, copies=copies)
        return attn

    def _look(self, attn: Tensor, is_cross: bool, place: str) -> None:
        """Call :meth:`forward` with the kept rows, and write its result back."""
        if place not in get_args(Place):
            self.note(f"a layer called it from place {place!r}, not {get_args(Place)}. {HOW}")
        chosen = self._kept_rows(len(attn))
        rows = attn if chosen == slice(0, len(attn)) else attn[chosen]
        # The kept rows are a view, so an edit reaches the whole tensor; a new tensor is written
        # into it.
        edited = self.forward(rows, is_cross, place)
        if edited is not None and edited is not rows:
            rows.copy_(edited)

    def _kept_rows(self, rows: int) -> slice:
        """Return the rows, batch times heads, that are not unconditional."""
        batch = self._batch if self._batch and rows % self._batch == 0 else None
        start = 0
        stop = batch or rows
        is_registered = self.attachment is None and self.num_att_layers > 0
        if self.guidance in ("auto", "batch") and self._prompts is not None and batch:
            start = self._prompts.start
            stop = self._prompts.stop
        # An odd batch has no halves, and heads are no images.
        elif stop % 2 == 0 and (
            self.guidance == "batch" or (self.guidance == "auto" and is_registered)
        ):
            start = stop // 2
            if self.guidance == "auto" and self._guess is None:
                self._guess = (
                    f"The {type(self).__name__} took the first half of {stop} rows for "
                    "unconditional, which it guessed. Say it: guidance='batch', or guidance=None "
                    "to keep every row."
                )
        self.images = stop - start if batch else None
        heads = rows // batch if batch else 1
        if self.attachment is not None:
            self.attachment.check_rows(self, rows, self._batch)
        return slice(start * heads, stop * heads)

    def step_callback(self, x_t: Tensor) -> Tensor:
        """Return the latents unchanged; editing loops pass them after each step."""
        return x_t

    def check_whole(self) -> None:
        """Raise CaptureError if the store did not see the whole run; warn if it had to guess."""
        if self.attachment is None:
            problem = self._step_end.open_step(self.cur_step) or self._problem
        else:
            problem = self._problem or self.attachment.problem(self)
        if problem:
            raise CaptureError(f"This {type(self).__name__} did not see the whole run: {problem}")
        if self.attachment is not None and (strays := self.attachment.run.doubts.take_strays()):
            warn(strays, CaptureWarning)
        repeated = self.repeats.found()
        # Attend-and-Excite runs the prompt again and again, and reads the last step alone
        is_told = self.guidance == "passes" or self.num_uncond_att_layers > 0
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

    def check_finished(self) -> None:
        """Raise RuntimeError if no step has finished, CaptureError as :meth:`check_whole`."""
        self.check_whole()
        if not self.cur_step:
            raise RunError(f"No step has finished in this {type(self).__name__}. {HOW}")

    @property
    def last_step(self) -> Maps:
        """Cross-attention maps of the last finished step."""
        self.check_whole()
        return self._steps.last

    @property
    def steps(self) -> list[Maps]:
        """Cross-attention maps of each finished step, if ``keep_steps`` is set."""
        self.check_whole()
        return self._steps.each

    @property
    def nbytes(self) -> int:
        """Bytes of all maps held now, each tensor counted once."""
        return self._steps.nbytes

    def step_maps(self, steps: StepChoice) -> MeanMaps:
        """Return mean maps of ``"mean"``, ``"last"``, a step or a part of the run."""
        self.check_finished()
        return self._steps.chosen(steps)

    def get_average_attention(self) -> Maps:
        """Return the mean of each map over the finished steps, or with ``save_global_store`` the
        last step.

        Raises:
            CaptureError: the store did not see the whole run.
            RuntimeError: no step has finished.
        """
        self.check_finished()
        return self._steps.mean(self.attention_store)

    def get_average_full_attention(self) -> Maps:
        """Return the same for ``full_attention_store``."""
        self.check_finished()
        return self._steps.mean(self.full_attention_store)

    def get_average_global_attention(self) -> Maps:
        """Return the mean of ``global_store``; raise RuntimeError if there is none."""
        self.check_finished()
        if not self.save_global_store:
            raise RunError(
                "There is no global store. Make the store with save_global_store=True, or ask for "
                "get_average_attention()."
            )
        return averaged(self.global_store, self.cur_step)

    def aggregate_attention(
        self,
        from_where: Sequence[str] = PLACES,
        res: int | tuple[int, int] | None = None,
        is_cross: bool = True,
        select: int = 0,
        prompts: int | str | Sequence[str] | None = None,
    ) -> Tensor:
        """Return :func:`sdattn.aggregate_attention` on the maps' device, with their graph; ``res``
        is a quarter of the latent's sides by default."""
        rows, cols = self.latent_size or (64, 64)
        if prompts is None and self.images is None and self.save_global_store is not None:
            prompts = 1
        if res is None:
            res = -(-rows // 4), -(-cols // 4)
        return aggregated(self, res, from_where, is_cross, select, prompts)

    def heatmaps(self, tokenizer: Any = None, prompt: Any = None, **options: Any) -> list[Heatmaps]:
        """Return the heatmaps of each image, see :func:`sdattn.heatmaps`."""
        return heatmaps(self, tokenizer, prompt, **options)

    def layer_maps(
        self,
        preset: str | Preset = "default",
        *,
        steps: StepChoice | None = None,
        latent_size: tuple[int, int] | None = None,
        images: int | None = None,
    ) -> LayerMaps:
        """Return the map of each layer that sees the text; arguments and errors as for
        :func:`sdattn.heatmaps`."""
        preset = preset_of(preset)
        folded = folded_maps(self, preset, latent_size, steps)
        return folded.of_images(images).layer_maps(preset)
