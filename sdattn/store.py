"""`AttentionStore`, the store of prompt-to-prompt code: maps by place, summed over steps."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .layers import PLACES

Maps = dict[str, list[Tensor]]
Guidance = Literal["batch", "passes"]
KINDS = ("cross", "self")


class AttentionStore:
    """A controller that keeps the maps it is shown, as prompt-to-prompt code expects them.

    :func:`sdattn.edit.register_attention_control` has a model call it. Each call appends one map,
    ``[rows, N, T]``, to the list of its place and kind. When the last layer of a step has called,
    the maps are added to the running sums. Entries are views of the live tensor, so an edit in
    place that comes later is what ends up stored. To edit, override :meth:`forward`.

    Source: Hertz et al. 2022, "Prompt-to-Prompt Image Editing with Cross Attention Control",
    google/prompt-to-prompt, whose names, order and step counting are kept; ``save_global_store``
    as in Chefer et al. 2023, "Attend-and-Excite", yuval-alaluf/Attend-and-Excite.

    Args:
        save_global_store: None for the ways of prompt-to-prompt: ``attention_store`` sums over
            steps. True or False for those of Attend-and-Excite: ``attention_store`` is the last
            step alone, with its graph; with True ``global_store`` holds the detached sums.
            Attend-and-Excite shows the store batches without a half to leave out: pass
            ``guidance=None`` with it.
        guidance: where the unconditional rows are, which are left out. ``"batch"``: they are the
            first half of every batch. ``"passes"``: the model runs twice a step, for them first
            ("low resource"). None: there are none, every row is kept.
        max_queries: maps with more queries than this stay out of ``step_store`` and
            ``attention_store``. Editing code picks maps by their position after this filter.
        kinds: ``"cross"`` and/or ``"self"``, what is kept at all; all calls are counted.

    Attributes:
        num_att_layers: layers that call in a pass, self and cross together.
            :func:`sdattn.edit.register_attention_control` sets it.
        cur_step: number of finished steps. A step is a pass of the model (two with
            ``guidance="passes"``), so a second-order scheduler has about two a timestep.
        cur_att_layer: layers that have called in the step that is running.
        step_store: ``{"down_cross": [...], ...}``, the maps of the step that is running.
        attention_store: the same for the sums over all finished steps; empty before the first.
        full_step_store, full_attention_store: the same for cross-attention of any size. For SD
            1.x at 512x512 and one image, in order: ``down_cross`` ``[8, 4096, 77]`` x2,
            ``[8, 1024, 77]`` x2, ``[8, 256, 77]`` x2, ``mid_cross`` ``[8, 64, 77]``, ``up_cross``
            ``[8, 256, 77]`` x3, ``[8, 1024, 77]`` x3, ``[8, 4096, 77]`` x3.
        global_store: sums over all finished steps, where ``save_global_store`` is True.
        curr_step_index: for callers that keep their own count, never changed here.
    """

    def __init__(
        self,
        save_global_store: bool | None = None,
        *,
        guidance: Guidance | None = "batch",
        max_queries: int = 32**2,
        kinds: Sequence[str] = KINDS,
    ):
        if guidance not in ("batch", "passes", None):
            raise ValueError(f"guidance={guidance!r}: pass 'batch', 'passes' or None.")
        self.save_global_store = save_global_store
        self.guidance = guidance
        self.max_queries = max_queries
        self.kinds = tuple(kinds)
        self.num_att_layers = -1
        self.curr_step_index = 0
        self.reset()

    @property
    def num_uncond_att_layers(self) -> int:
        """Calls at the start of each step that are of the unconditional pass, and not looked at."""
        return self.num_att_layers if self.guidance == "passes" else 0

    @staticmethod
    def get_empty_store() -> Maps:
        """``{place}_{kind}`` to an empty list, for each place and kind."""
        return {f"{place}_{kind}": [] for kind in KINDS for place in PLACES}

    def reset(self) -> None:
        """Forget all maps and steps."""
        self.cur_step = 0
        self.cur_att_layer = 0
        self.step_store = self.get_empty_store()
        self.full_step_store = self._empty_full_store()
        self.attention_store: Maps = {}
        self.full_attention_store: Maps = {}
        self.global_store: Maps = {}

    def __call__(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        """Take one layer's probabilities ``[B*heads, N, T]``; gives back the same tensor.

        What :meth:`forward` returns is written into it, in place.
        """
        if self.cur_att_layer >= self.num_uncond_att_layers:
            rows = attn[len(attn) // 2 :] if self.guidance == "batch" else attn
            edited = self.forward(rows, is_cross, place_in_unet)
            if edited is not None and edited is not rows:
                rows.copy_(edited)
        self.cur_att_layer += 1
        if self.cur_att_layer == self.num_att_layers + self.num_uncond_att_layers:
            self.cur_att_layer = 0
            self.cur_step += 1
            self.between_steps()
        return attn

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

    def between_steps(self) -> None:
        """Add the finished step to the sums."""
        if self.save_global_store is None:
            self.attention_store = _added(self.attention_store, self.step_store)
            self.full_attention_store = _added(self.full_attention_store, self.full_step_store)
        else:
            self.attention_store = self.step_store
            self.full_attention_store = self.full_step_store
        if self.save_global_store:
            with torch.no_grad():
                step = {key: [m.detach() for m in maps] for key, maps in self.step_store.items()}
                self.global_store = _added(self.global_store, step)
        self.step_store = self.get_empty_store()
        self.full_step_store = self._empty_full_store()

    def step_callback(self, x_t: Tensor) -> Tensor:
        """Called by editing loops with the latents after each step; changes nothing."""
        return x_t

    def get_average_attention(self) -> Maps:
        """The mean of each map over the finished steps; the last step in Attend-and-Excite's way.

        Raises:
            RuntimeError: no step has finished.
        """
        self._check_finished()
        if self.save_global_store is not None:
            return self.attention_store
        return self._averaged(self.attention_store)

    def get_average_full_attention(self) -> Maps:
        """The mean of ``full_attention_store`` over the finished steps, or its last step."""
        self._check_finished()
        if self.save_global_store is not None:
            return self.full_attention_store
        return self._averaged(self.full_attention_store)

    def get_average_global_attention(self) -> Maps:
        """The mean of ``global_store`` over the finished steps.

        Raises:
            RuntimeError: no step has finished, or ``save_global_store`` is not True.
        """
        self._check_finished()
        if not self.save_global_store:
            raise RuntimeError(
                "There is no global store. Make the store with AttentionStore(True), or ask for "
                "get_average_attention()."
            )
        return self._averaged(self.global_store)

    @torch.no_grad()
    def _averaged(self, sums: Maps) -> Maps:
        return {key: [total / self.cur_step for total in maps] for key, maps in sums.items()}

    def _check_finished(self) -> None:
        if not self.cur_step:
            raise RuntimeError(
                f"No step has finished: {self.cur_att_layer} layers have called of "
                f"{self.num_att_layers} (-1: not registered). Run the pipeline with this store "
                "registered: sdattn.edit.register_attention_control(pipe, store)."
            )

    @staticmethod
    def _empty_full_store() -> Maps:
        return {f"{place}_cross": [] for place in PLACES}


def _added(sums: Maps, step: Maps) -> Maps:
    if not sums:
        return step
    return {
        key: [total + new for total, new in zip(maps, step[key], strict=True)]
        for key, maps in sums.items()
    }
