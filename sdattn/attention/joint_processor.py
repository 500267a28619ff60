"""Joint attention in pure torch, one softmax over text and image.

Source: Esser et al. 2024, "Scaling Rectified Flow Transformers for High-Resolution Image
Synthesis", section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import RunError, refuse
from .calls import AttentionCall
from .controlled import (
    ControlledProcessor,
    Controller,
    LayerController,
    mask_by_head,
    projected_out,
)
from .controlled import Spans as Spans
from .core import attention_probs, fold_heads, merge_heads
from .joining import FUSED_WITH_MLP, Joined, joined, unknown_layer

Queries = Literal["image", "all"]


class TorchJointProcessor(ControlledProcessor):
    """Joint attention in pure torch, open to a controller that reads or edits the probabilities .

        pipe.transformer.set_attn_processor(sdattn.TorchJointProcessor())
        store = sdattn.AttentionStore(pipeline=pipe)
        pipe.transformer.set_attn_processor(sdattn.TorchJointProcessor(store))

    It imports no diffusers and computes the layers of Stable Diffusion 3 and 3.5 (including the
    self-attention of 3.5), FLUX.1, FLUX.2 and Qwen-Image. Its output agrees with diffusers'
    processors up to rounding. It builds the whole matrix ``[B, heads, S, S]`` of text and image.

    The controller gets a block of the softmax over all keys, so rows over the text's keys sum to
    less than 1. After an edit, the row is divided by its new sum:

    - a key set to 0 is masked out of the softmax;
    - multiplying a column by f adds log f to its scores;
    - a share below 0 counts as 0, and a row with nothing left is zero;
    - a row that is not edited keeps its bits.

    Without gradients, the tensor that the controller got holds the final values once the layer has
    run, if it was edited in place or not at all.

    Args:
        controller: called as ``controller(probs, is_cross, place)``; None for plain attention,
            which needs no position of the text. Once per call of the layer with ``is_cross=True``
            and the attention of the image's queries to the text's keys, contiguous ``[B*heads, N,
            T]``, row ``batch * heads + head``. A returned tensor is used; if it returns None,
            ``probs`` is used as it is then, so an edit in place counts.
        place: ``"double"`` or ``"single"``, passed to the controller. An attached
            :class:`sdattn.AttentionStore` finds it from the layer.
        spans: function called at each call of the layer that returns the positions of the image's
            and the text's tokens: ``lambda: (slice(7, 71), slice(0, 7))``; reference images are in
            neither. One-stream layers, which get text and image joined, need it; an attached store
            knows it, and a two-stream layer knows its text.
        image: whether the controller is also called, first, with ``is_cross=False`` and the
            attention among the image's tokens, ``[B*heads, N, N]``. None: if the ``kinds`` of a
            store say so.
        queries: ``"all"`` shows and edits the attention of every token to the text's keys,
            ``[B*heads, S, T]``, in the layer's order (Stable Diffusion 3: the image first; FLUX and
            Qwen-Image: the text first), since the text carries words on.

    Raises:
        ValueError: another ``queries``.
        TypeError: a controller that takes other arguments.

    Raises (when called):
        TypeError: the layer's attention is of another kind.
        RuntimeError: the position of the text is missing or wrong. With an
            :class:`sdattn.AttentionStore`, reading it raises this.
        ValueError: the controller returned another shape; a mask that does not fit.
    """

    def __init__(
        self,
        controller: Controller | None = None,
        place: str = "",
        *,
        spans: Callable[[], Spans | None] | None = None,
        image: bool | None = None,
        queries: Queries = "image",
    ):
        super().__init__(controller, place)
        if queries not in ("image", "all"):
            raise refuse("queries", queries, ("image", "all"))
        self.spans = spans
        self.image = image
        self.queries = queries

    @property
    def shows_image(self) -> bool:
        """True if the controller gets the attention among the image's tokens."""
        if self.image is None:
            return "self" in (getattr(self.controller, "kinds", None) or ())
        return self.image

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        encoder_hidden_states_mask: Tensor | None = None,
        # Named so that diffusers passes them and they can be refused.
        ip_hidden_states: object = None,
        kv_cache_mode: object = None,
        freqs_cis: object = None,
        **_: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend; return the shape of ``hidden_states`` and, if given, of the text states."""
        refused = {
            "an IP-Adapter's images": ip_hidden_states,
            "a cache of keys": kv_cache_mode,
            "freqs_cis": freqs_cis,
        }
        for name, value in refused.items():
            if value is not None:
                raise unknown_layer(attn, f"is given {name}")
        text_states = encoder_hidden_states
        mask = attention_mask
        rotary = image_rotary_emb
        if hasattr(attn, FUSED_WITH_MLP):  # it passes (mask, rotary) where others pass (text, mask)
            given = (text_states, mask, rotary)
            text_states = None
            mask = next((part for part in given if isinstance(part, Tensor)), None)
            rotary = next((part for part in given if isinstance(part, tuple)), None)
        parts = joined(attn, hidden_states, text_states, rotary)
        mask = _joint_mask(attn, parts, mask, encoder_hidden_states_mask, rotary)

        probs = attention_probs(parts.query, parts.key, mask)  # [B, heads, S, S]
        probs = self._open(attn, probs, parts.text)
        output = probs @ parts.value  # [B, heads, S, d]
        inputs = parts.query, parts.key, parts.value, mask
        self._show(
            attn, lambda: AttentionCall(*inputs, probs=probs, output=output, text=parts.text)
        )
        return _split(attn, parts, merge_heads(output))

    def _open(self, attn: Any, probs: Tensor, own: slice | None) -> Tensor:
        """Return ``[B, heads, S, S]`` as the controller leaves them; ``own`` is the text's
        place."""
        if self.controller is None or not self.asks:
            return probs
        where = self._where(attn, probs.shape[-1], own)
        if where is None:
            return probs
        image, text = where
        if text.start == text.stop:  # self-attention next to the joint one
            folded = fold_heads(probs).contiguous()
            return self._controlled(attn, folded, len(probs), False).view_as(probs)
        return self._edited_blocks(attn, probs, image, text)

    def _where(self, attn: Any, length: int, own: slice | None) -> Spans | None:
        """Return the spans of image and text, as told or as the layer has them; None if unknown."""
        told = None if self.spans is None else self.spans()
        controller = self.controller
        if told is None and isinstance(controller, LayerController):
            told = controller.joint_spans(attn)
        if told is None and own is not None:
            rest = slice(own.stop, length) if own.start == 0 else slice(0, own.start)
            told = rest, own
        why = ""
        if told is None:
            why = (
                f"A {type(attn).__name__} gets text and image joined, and the controller "
                f"{type(controller).__name__} needs to know where they are. Pass "
                "TorchJointProcessor(controller, spans=lambda: (image, text)) with the slices of "
                "both, use an attached AttentionStore, store.attach(pipe), or "
                "sdattn.edit.register_attention_control(pipe, controller)."
            )
        elif own not in (None, told[1]) or max(told[0].stop, told[1].stop) > length:
            image, text = told
            why = (
                f"spans= puts the image at {image.start} to {image.stop} and the text at "
                f"{text.start} to {text.stop} of the {length} tokens of a {type(attn).__name__}"
                + (f", which has its text at {own.start} to {own.stop}" if own else "")
                + ". Pass the spans of this very call."
            )
        if not why:
            return told
        if not isinstance(controller, LayerController):
            raise RunError(why)
        controller.pass_over(why)
        return None

    def _edited_blocks(self, attn: Any, probs: Tensor, image: slice, text: slice) -> Tensor:
        """Show each block, and divide the rows by the new sums of what was edited."""
        may_edit = getattr(self.controller, "may_edit", True)
        if may_edit and probs.requires_grad:
            probs = probs.clone()  # the softmax needs its own for the gradient
        rows = probs if self.queries == "all" else probs[:, :, image]  # views
        blocks = [(rows[..., text], True)]  # [B, heads, N, T]
        if self.shows_image:
            blocks.insert(0, (probs[:, :, image, image], False))
        if not may_edit:
            for block, is_cross in blocks:
                self._edited(attn, fold_heads(block), len(block), is_cross)
            return probs
        before = rows.sum(-1, keepdim=True, dtype=torch.float32)  # [B, heads, N, 1]
        shown = [self._edited_block(attn, block, is_cross) for block, is_cross in blocks]
        # Both are sums of the same kernel in the same order, so the ratio for a row that was not
        # edited is exactly 1.0, and rows with little left lose no digits, as they would in
        # 1 + (the sum of what was added).
        after = rows.sum(-1, keepdim=True, dtype=torch.float32)
        rows.mul_(before / after.clamp_min(torch.finfo(torch.float32).tiny))
        for given, (block, _) in zip(shown, blocks, strict=True):
            if given is not None:
                given.copy_(fold_heads(block))
        return probs

    def _edited_block(self, attn: Any, block: Tensor, is_cross: bool) -> Tensor | None:
        """Edit a block in place; return the tensor that will hold the final values, or None."""
        shown = fold_heads(block).clone(memory_format=torch.contiguous_format)  # [B*heads, N, T]
        edited = self._edited(attn, shown, len(block), is_cross)
        block.copy_(edited.clamp_min(0).view_as(block))
        return None if edited is not shown or edited.requires_grad else shown


def _joint_mask(
    attn: Any, parts: Joined, mask: Tensor | None, text_mask: Tensor | None, rotary: Any
) -> Tensor | None:
    """Return the mask over all tokens, ``[B, 1 or heads, 1 or S, S]``."""
    batch, heads, length, _ = parts.query.shape
    text = parts.text
    if text_mask is not None:
        if mask is not None or text is None or text_mask.dtype != torch.bool:
            raise unknown_layer(attn, "is given a mask of the text next to another, or not boolean")
        cells = text_mask.new_ones(batch, length - text_mask.shape[1])
        both = (text_mask, cells) if text.start == 0 else (cells, text_mask)
        mask = torch.cat(both, dim=1)  # [B, S]
    if mask is None:
        return None
    if text is not None and rotary is None and text_mask is None:
        raise unknown_layer(attn, "is given a mask over text and image in an unknown order")
    if mask.ndim == 2:
        mask = mask[:, None]  # [B, 1, S]
    return mask_by_head(mask, batch, heads, length)


def _split(attn: Any, parts: Joined, output: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Apply the output projections to ``[B, S, heads*d]``, separately for image and text."""
    if parts.mlp is not None:
        whole = torch.cat([output, attn.mlp_act_fn(parts.mlp)], dim=-1)
        return projected_out(attn.to_out, whole)
    text = parts.text
    if text is None:
        to_out = getattr(attn, "to_out", None)
        return output if to_out is None else projected_out(to_out, output)
    words = output[:, text]
    cells = output[:, text.stop :] if text.start == 0 else output[:, : text.start]
    to_add_out = getattr(attn, "to_add_out", None)  # the last block has no use for its text
    if to_add_out is not None:
        words = to_add_out(words)
    return projected_out(attn.to_out, cells), words
