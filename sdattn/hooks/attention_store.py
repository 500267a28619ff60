"""`AttentionStore`, the store of prompt-to-prompt code: maps by place, summed over steps."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import RunError
from ..models.layers import PLACES, checked_kinds
from .drawn import HasHeatmaps
from .keep import MUCH
from .step_controller import Guidance, StepController

Maps = dict[str, list[Tensor]]
KINDS = ("cross", "self")
logger = logging.getLogger(__name__)


class AttentionStore(StepController, HasHeatmaps):
    """A controller that keeps the maps it is shown, as prompt-to-prompt code expects them.

        store = sdattn.AttentionStore(pipeline=pipe)  # or store.attach(pipe)
        pipe.unet.set_attn_processor(sdattn.TorchAttnProcessor(store))
        image = pipe("a red circle left of a blue square").images[0]
        store.last_step["down_cross"]  # with mid_cross and up_cross all 16 maps of the last step
        store.heatmaps()[0]["circle"]

    :func:`sdattn.edit.register_attention_control` has a model call it for the length of a block.
    Each call appends one map, ``[images*heads, N, T]``, to the list of its place and kind,
    ``"down_cross"`` to ``"up_self"``. Joint attention has ``"double_cross"`` and
    ``"single_cross"``, what the picture's queries pay to the text, and ``"double_self"`` and
    ``"single_self"``, what they pay to the picture: :class:`sdattn.TorchJointProcessor`. When the
    last layer of a step has called, the maps are added to the running sums. Entries are views of
    the live tensor, so an edit in place that comes later is what ends up stored. To edit, override
    :meth:`forward`.

    What holds which maps, all of them dictionaries of lists in the order of the calls:

    ============================== =================== ==========================================
    name                           maps                which
    ============================== =================== ==========================================
    ``last_step``                  cross, of any size  the last finished step
    ``steps``                      cross, of any size  a list, one for each finished step, with
                                                       ``keep_steps=True``
    ``step_store``                 <= ``max_queries``  the step that is running
    ``full_step_store``            cross, of any size  the step that is running
    ``attention_store``            <= ``max_queries``  the sums over the finished steps
    ``full_attention_store``       cross, of any size  the sums over the finished steps
    ``get_average_attention()``    <= ``max_queries``  the means over the finished steps
    ``get_average_full_attention()`` cross, of any size  the means over the finished steps
    ============================== =================== ==========================================

    For SD 1.x at 512x512 and one image those of any size are, in order: ``down_cross`` ``[8, 4096,
    77]`` x2, ``[8, 1024, 77]`` x2, ``[8, 256, 77]`` x2; ``mid_cross`` ``[8, 64, 77]``; ``up_cross``
    ``[8, 256, 77]`` x3, ``[8, 1024, 77]`` x3, ``[8, 4096, 77]`` x3: 66 MB in float32. Those of
    ``max_queries`` hold self-attention too and leave out the 4096, since editing code picks maps by
    their position after that filter.

    Source: Hertz et al. 2022, "Prompt-to-Prompt Image Editing with Cross Attention Control",
    google/prompt-to-prompt, whose names, order and step counting are kept; ``save_global_store``
    as in Chefer et al. 2023, "Attend-and-Excite", yuval-alaluf/Attend-and-Excite.

    Args:
        save_global_store: None for the ways of prompt-to-prompt: ``attention_store`` sums over
            steps. True or False for those of Attend-and-Excite: ``attention_store`` is the last
            step alone, with its graph; with True ``global_store`` holds the detached sums.
            Attend-and-Excite shows the store batches without a half to leave out: pass
            ``guidance=None`` with it.
        pipeline: attach the store to it, see :meth:`attach`.
        guidance: where the unconditional rows are, which are left out. ``"auto"``: where the
            attached pipeline has them; of a store that is not attached they are the first half of
            an even batch, as prompt-to-prompt takes it, and an odd batch has none. Where a pipeline
            runs for the negative prompt by itself (FLUX, Qwen-Image), that pass is neither looked
            at nor counted. A bare UNet does not say, so a store that is attached to one refuses an
            even batch unless you say: ``"batch"``: they are the first half. ``"passes"``: the model
            runs twice a step, for them first ("low resource"). None: there are none, every row is
            an image.
        max_queries: maps with more queries than this stay out of ``step_store`` and
            ``attention_store``.
        kinds: ``"cross"`` and/or ``"self"``, what is kept; all calls are counted. None keeps
            nothing, for controllers that only edit.
        keep_steps: keep each step in ``steps``: for SD 1.x at 512x512 66 MB a step and image. What
            a run will hold is logged as a warning where it is more than a gigabyte.

    Attributes:
        num_att_layers: layers that call in a pass, self and cross together. :meth:`attach` and
            :func:`sdattn.edit.register_attention_control` set it.
        cur_step: number of finished steps. A step is a pass of the model (two with
            ``guidance="passes"``), so a second-order scheduler has about two a timestep.
        cur_att_layer: layers that have called in the step that is running.
        latent_size: (rows, cols) of the latent; None before the first pass of a model that the
            store is attached to, or registered in.
        levels: number of the model's resolutions; None likewise.
        images: rows of the batch that are kept; None before the first call.
        drawn: the prompts of the run of the pipeline that the store is attached to; None where they
            are not known.
        global_store: sums over all finished steps, where ``save_global_store`` is True.
        curr_step_index: for callers that keep their own count, never changed here.

    Raises:
        ValueError: an unknown ``guidance``, or ``kinds`` that are not these.

    Raises (when called):
        CaptureError: no layer called an attached store in a pass of its model, or not all that hold
            its processor did, or others did than in the run's first step.
        ValueError: it is attached, no pipeline runs, and which rows of an even batch are
            unconditional was not said.
        RuntimeError: how many layers call in a pass is not known, so no step would ever end; or,
            by :class:`sdattn.TorchAttnProcessor`, which layer calls.
    """

    def __init__(
        self,
        save_global_store: bool | None = None,
        *,
        pipeline: Any = None,
        guidance: Guidance | None = "auto",
        max_queries: int = 32**2,
        kinds: Sequence[str] | None = KINDS,
        keep_steps: bool = False,
    ):
        self.save_global_store = save_global_store
        self.max_queries = max_queries
        self.kinds = () if kinds is None else checked_kinds(kinds, KINDS)
        self.keep_steps = keep_steps
        super().__init__(pipeline, guidance)

    @staticmethod
    def get_empty_store() -> Maps:
        """``{place}_{kind}`` to an empty list, for each place of a UNet and each kind."""
        return {f"{place}_{kind}": [] for kind in KINDS for place in PLACES}

    def reset(self) -> None:
        """Forget all maps and steps."""
        super().reset()
        self._empty_step()
        self.last_step: Maps = {}
        self.steps: list[Maps] = []
        self.attention_store: Maps = {}
        self.full_attention_store: Maps = {}
        self.global_store: Maps = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the maps that are held now, each tensor once."""
        held = [self.step_store, self.full_step_store, self.last_step, *self.steps]
        held += [self.attention_store, self.full_attention_store, self.global_store]
        kept = {id(m): m for store in held for maps in store.values() for m in maps}
        return sum(m.numel() * m.element_size() for m in kept.values())

    def forward(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        """Append ``attn`` itself, the rows that are not left out, to its list.

        An override may edit ``attn`` in place, or return a tensor of its shape.
        """
        kind = "cross" if is_cross else "self"
        if kind in self.kinds:
            key = f"{place_in_unet}_{kind}"
            if attn.shape[1] <= self.max_queries:
                self.step_store[key].append(attn)
            if is_cross:
                self.full_step_store[key].append(attn)
        return attn

    def refuse_edits(self, why: str) -> None:
        """Raise RuntimeError where :meth:`forward` is another one: this one edits nothing."""
        if getattr(self.forward, "__func__", None) is not AttentionStore.forward:
            super().refuse_edits(why)

    def between_steps(self) -> None:
        """Add the finished step to the sums."""
        self.last_step = self.full_step_store
        if self.keep_steps:
            self.steps.append(_detached(self.last_step))
            self._say_bytes()
        # prompt-to-prompt sums over the steps; Attend-and-Excite keeps the last, with its graph.
        if self.save_global_store is None:
            self.attention_store = _added(self.attention_store, self.step_store)
            self.full_attention_store = _added(self.full_attention_store, self.full_step_store)
        else:
            self.attention_store = self.step_store
            self.full_attention_store = self.full_step_store
        if self.save_global_store:
            with torch.no_grad():
                self.global_store = _added(self.global_store, _detached(self.step_store))
        self._empty_step()

    def begin_pass(self, *given: Any, **named: Any) -> None:
        """Take note of a pass of the model, before its layers call."""
        before = self.places
        super().begin_pass(*given, **named)
        if self.places != before and not (self.cur_step or self.cur_att_layer):
            self._empty_step()

    def step_callback(self, x_t: Tensor) -> Tensor:
        """Called by editing loops with the latents after each step; changes nothing."""
        return x_t

    def get_average_attention(self) -> Maps:
        """The mean of each map over the finished steps; the last step in Attend-and-Excite's way.

        Raises:
            RuntimeError: no step has finished.
        """
        return self._average(self.attention_store)

    def get_average_full_attention(self) -> Maps:
        """The mean of ``full_attention_store`` over the finished steps, or its last step."""
        return self._average(self.full_attention_store)

    def get_average_global_attention(self) -> Maps:
        """The mean of ``global_store`` over the finished steps.

        Raises:
            RuntimeError: no step has finished, or ``save_global_store`` is not True.
        """
        self._check_finished()
        if not self.save_global_store:
            raise RunError(
                "There is no global store. Make the store with AttentionStore(True), or ask for "
                "get_average_attention()."
            )
        return self._averaged(self.global_store)

    def _average(self, sums: Maps) -> Maps:
        self._check_finished()
        return sums if self.save_global_store is not None else self._averaged(sums)

    @torch.no_grad()
    def _averaged(self, sums: Maps) -> Maps:
        return {key: [total / self.cur_step for total in maps] for key, maps in sums.items()}

    def _check_finished(self) -> None:
        if not self.cur_step:
            raise RunError(
                f"No step has finished: {self.cur_att_layer} layers have called of "
                f"{self.num_att_layers} (-1: not registered). Run the pipeline with this store "
                f"registered: sdattn.edit.register_attention_control(pipe, store). Or: {self.HOW}"
            )

    def _say_bytes(self) -> None:
        """Warn once a run, after its first step, if its steps will take much memory."""
        passes = 1 if self.attachment is None else self.attachment.passes
        expected = passes * sum(m.nbytes for maps in self.steps[0].values() for m in maps)
        if len(self.steps) == 1 and expected > MUCH:
            logger.warning(
                "keep_steps=True will hold %.1f GB by the end of this run of %d steps.",
                expected / 1e9,
                passes,
            )

    def _empty_step(self) -> None:
        """Begin the dictionaries of a step, by the places of the model that runs."""
        self.step_store: Maps = self.get_empty_store()
        if self.places != PLACES:
            keys = (f"{place}_{kind}" for kind in KINDS for place in self.places)
            self.step_store = {key: [] for key in keys}
        self.full_step_store: Maps = {f"{place}_cross": [] for place in self.places}


def _added(sums: Maps, step: Maps) -> Maps:
    if not sums:
        return step
    return {
        key: [total + new for total, new in zip(maps, step[key], strict=True)]
        for key, maps in sums.items()
    }


def _detached(step: Maps) -> Maps:
    """Copies of the maps of a step: a view would keep the rows that were left out alive."""
    return {key: [m.detach().clone() for m in maps] for key, maps in step.items()}
