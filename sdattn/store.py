"""`AttentionStore`, the store of prompt-to-prompt code: maps by place, summed over steps."""

import torch
from torch import Tensor

from .layers import KINDS, PLACES


class AttentionStore:
    """A controller for :class:`sdattn.TorchAttnProcessor` that keeps every map it is shown.

    Each call appends one map, ``[rows, N, T]``, to the list of its place and kind. When the last
    layer of a step has called, the maps are added to the running sums. Entries are views of the
    live tensor, so an edit in place that comes later is what ends up stored.

    Source: Hertz et al. 2022, "Prompt-to-Prompt Image Editing with Cross Attention Control",
    google/prompt-to-prompt, whose names, order and step counting are kept.

    Args:
        guidance: with True, the first half of the rows is the unconditional half of a guided
            batch and is left out. With False every row is kept: one pass of SD 1.x at 512x512 and
            one image then gives, in order, ``down_cross`` ``[8, 4096, 77]`` x2, ``[8, 1024, 77]``
            x2, ``[8, 256, 77]`` x2, ``mid_cross`` ``[8, 64, 77]``, ``up_cross`` ``[8, 256, 77]``
            x3, ``[8, 1024, 77]`` x3, ``[8, 4096, 77]`` x3.
        max_queries: maps with more queries than this are left out (prompt-to-prompt code uses
            ``32**2``); None keeps all.

    Attributes:
        num_att_layers: layers that call in a step, self and cross together.
            :func:`sdattn.torch_attn_processors` sets it.
        cur_step: number of finished steps.
        cur_att_layer: layers that have called in the step that is running.
        step_store: ``{"down_cross": [...], ...}``, the maps of the step that is running.
        attention_store: the same for the sums over all finished steps; empty before the first.
    """

    def __init__(self, guidance: bool = True, max_queries: int | None = None):
        self.guidance = guidance
        self.max_queries = max_queries
        self.num_att_layers = -1
        self.reset()

    @staticmethod
    def get_empty_store() -> dict[str, list[Tensor]]:
        """``{place}_{kind}`` to an empty list, for each place and kind."""
        return {f"{place}_{kind}": [] for kind in KINDS for place in PLACES}

    def reset(self) -> None:
        """Forget all maps and steps."""
        self.cur_step = 0
        self.cur_att_layer = 0
        self.step_store = self.get_empty_store()
        self.attention_store: dict[str, list[Tensor]] = {}

    def __call__(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        """Take one layer's probabilities ``[B*heads, N, T]``; gives back the same tensor."""
        self.forward(attn[len(attn) // 2 :] if self.guidance else attn, is_cross, place_in_unet)
        self.cur_att_layer += 1
        if self.cur_att_layer == self.num_att_layers:
            self.cur_att_layer = 0
            self.cur_step += 1
            self.between_steps()
        return attn

    def forward(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        """Append ``attn`` itself to its list."""
        if self.max_queries is None or attn.shape[1] <= self.max_queries:
            self.step_store[f"{place_in_unet}_{'cross' if is_cross else 'self'}"].append(attn)
        return attn

    def between_steps(self) -> None:
        """Add the finished step to the sums."""
        if not self.attention_store:
            self.attention_store = self.step_store
        else:
            for key, sums in self.attention_store.items():
                self.attention_store[key] = [
                    total + new for total, new in zip(sums, self.step_store[key], strict=True)
                ]
        self.step_store = self.get_empty_store()

    def step_callback(self, x_t: Tensor) -> Tensor:
        """Called by editing loops with the latents after each step; changes nothing."""
        return x_t

    @torch.no_grad()
    def get_average_attention(self) -> dict[str, list[Tensor]]:
        """The mean of each map over the finished steps."""
        return {
            key: [total / self.cur_step for total in sums]
            for key, sums in self.attention_store.items()
        }
