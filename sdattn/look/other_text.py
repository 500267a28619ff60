"""Attention of the image to another text than its prompt.

In cross-attention a layer's own projection makes keys of it (`see_other_text`); for joint attention
see `text_stream`.

Source: Marcos-Manchón et al. 2024, "Open-Vocabulary Attention Maps with Token Optimization for
Semantic Segmentation in Diffusion Models", section 3.2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention.calls import AttentionCall, LayerCall, Rows, chosen_rows
from ..attention.device_copies import DeviceCopies
from ..errors import InvalidTypeError, InvalidValueError, RunError
from ..models.call_options import call_options, option_of
from ..models.denoiser import Denoiser, find_denoiser
from ..models.denoiser_call import innermost
from ..models.families.unet import is_unet
from ..models.layers import AttentionLayer
from .layer import Layer, Output
from .projections import named, projected_call

if TYPE_CHECKING:
    from .observers import ObservingProcessor as Observer


def asked_layers(
    denoiser: Denoiser, text_states: Tensor, kinds: Sequence[str]
) -> Callable[[AttentionLayer], bool]:
    """Return a check for layers that can be asked about another text: cross-attention that takes
    the text encoder's states as they are, and joint attention in blocks with a stream for text.
    Raise TypeError if there are none, ValueError for states that do not fit."""
    kind, width = _asked_kind(denoiser)
    widths = {width} if isinstance(width, int) else set(width)
    if text_states.ndim != 3 or text_states.shape[-1] not in widths:
        raise InvalidValueError(
            f"text_states are {list(text_states.shape)}; this model takes [1 or images, tokens, "
            f"{' or '.join(map(str, sorted(widths)))}]. Encode the text with its own pipeline."
        )
    if kind not in kinds:
        raise InvalidValueError(f"kinds={kinds!r}: text_states work with {kind} attention.")
    return lambda layer: layer.kind == kind and layer.place != "single"


def _asked_kind(denoiser: Denoiser) -> tuple[str, int | Sequence[int]]:
    """Return the kind of layers that can be asked about another text, and its states' width."""
    model = denoiser.model
    if is_unet(model):
        return "cross", model.config.cross_attention_dim
    if denoiser.family.text_stream is not None:
        return "joint", model.config.joint_attention_dim
    raise InvalidTypeError(
        f"Asked about another text in a {type(model).__name__}, which has layers of its own "
        "between the text encoder and the attention, or pads each prompt in a way of its own. This "
        "works with the UNets of Stable Diffusion 1, 2 and XL, Stable Diffusion 3 and FLUX."
    )


def encode_text(pipe: Any, text: str, options: Mapping[str, Any] | None = None) -> Tensor:
    """Return the model's input for a prompt, ``[1, T, width]``, by the pipeline's ``encode_prompt``
    (TypeError without one) with its options ``clip_skip``, ``max_sequence_length`` and LoRA
    scale."""
    _asked_kind(find_denoiser(pipe))
    if not hasattr(pipe, "encode_prompt"):
        raise InvalidTypeError(
            f"A {type(pipe).__name__} has no encode_prompt, so another text cannot be asked about. "
            "Encode it yourself and use capture(text_states=...)."
        )
    run_options = options or {}
    known = inspect.signature(pipe.encode_prompt).parameters
    length = run_options.get("max_sequence_length")
    # its own default may be more columns than the pipeline asks for
    if length is None and {"max_sequence_length"} <= call_options(pipe).keys() & known.keys():
        length = option_of(pipe, run_options, "max_sequence_length")
    chosen = {
        "clip_skip": run_options.get("clip_skip"),
        "lora_scale": (run_options.get("cross_attention_kwargs") or {}).get("scale"),
        "max_sequence_length": length,
    }
    every: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    every |= {"num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    every |= {"prompt_2": None, "prompt_3": None}  # the same text for every encoder
    every = {name: value for name, value in every.items() if name in known}
    with torch.no_grad():
        states: Tensor = pipe.encode_prompt(prompt=text, device=pipe._execution_device, **every)[0]
    return states


def see_other_text(
    text_states: DeviceCopies,
    frame_rows: Callable[[], int],
    observer: Observer,
    attn: Layer,
    /,
    *args: object,
    **kwargs: object,
) -> tuple[Output, LayerCall | None]:
    """See what the queries of a processor would attend to in another text, ``[1 or images, T,
    width]``; a video has ``frame_rows()`` rows of the batch.

    The keys are the layer's own projection, so LoRA and whatever else acts on it count. The image
    does not depend on them. Raise RuntimeError if the processor did not call ``to_q``.
    """
    with observer.projections.during(named(attn, ("to_q",))) as seen:
        output = observer.inner(attn, *args, **kwargs)
    if "to_q" not in seen:
        raise RunError(
            f"The processor {type(innermost(observer)).__name__} did not call the layer's own "
            "to_q, so what it would attend to cannot be known. Set another processor before "
            "capture, sdattn.TorchAttnProcessor() for example."
        )
    query = seen["to_q"][0]
    states = text_states.on(query.device, query.dtype)
    with torch._C.DisableTorchFunction():  # its product is none of the run's
        if getattr(attn, "norm_cross", None):
            states = attn.norm_encoder_hidden_states(states)
        call = projected_call(attn, query, attn.to_k(states))
    return output, OtherTextCall(call, frame_rows())


class OtherTextCall:
    """A layer's query ``[B, heads, N, d]``, and keys of another text, ``[1 or images, heads, T,
    d]``, for the chosen rows."""

    rows_apart: Mapping[str, Tensor] = {}

    def __init__(self, call: AttentionCall, frame_rows: int):
        self.call = call
        self.frame_rows = frame_rows
        self.batch = len(call.query)

    def of_rows(self, rows: Rows) -> AttentionCall:
        query = chosen_rows(self.call.query, rows)
        key = self.call.key
        images = len(query) // self.frame_rows
        if len(key) not in (1, images):
            raise InvalidValueError(
                f"text_states hold {len(key)} texts and the run has {images} images. Pass one "
                "for all, or one for each."
            )
        if len(key) > 1:
            key = key.repeat_interleave(self.frame_rows, 0)
        return AttentionCall(query, key.expand(len(query), -1, -1, -1))
