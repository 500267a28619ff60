"""Attention of the image to another text than its prompt.

In cross-attention a layer's own projection makes keys of it (`OtherTextLook`). A block of joint
attention carries the text on in its own stream. So once the model has run a block, it is run again
here with the image that came in and the other text in place of the prompt: the text that comes out
goes to the next block, the image is thrown away (`TextStream`).

Sources: Marcos-Manchón et al. 2024, "Open-Vocabulary Attention Maps with Token Optimization for
Semantic Segmentation in Diffusion Models", section 3.2. Helbling et al. 2025, "ConceptAttention"
(arXiv:2502.04320), for a stream of concepts next to the prompt's, each one token without a
sentence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.calls import ALL, Rows, chosen_rows
from ..attention.controlled import unasked
from ..attention.device_copies import DeviceCopies
from ..errors import InvalidTypeError, InvalidValueError, RunError
from ..follow.installer import Installation
from ..models.call_options import call_options, option_of
from ..models.denoiser_call import arguments, innermost, unwrapped
from ..models.layers import AttentionLayer, Denoiser, find_denoiser, is_unet
from .attended import Attended, Columns, softmax_of
from .projections import projected_call
from .sources import Observer

TEXT = "encoder_hidden_states"
_running: ContextVar[TextStream | None] = ContextVar("text stream", default=None)


def running_stream() -> TextStream | None:
    """Return the stream whose block runs again now; None while the model runs."""
    return _running.get()


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


def _asked_kind(denoiser: Denoiser) -> tuple[str, Any]:
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
    given = options or {}
    scale = (given.get("cross_attention_kwargs") or {}).get("scale")
    known = inspect.signature(pipe.encode_prompt).parameters
    length = "max_sequence_length"
    # its own default may be more columns than the pipeline asks for
    if length in known and length in call_options(pipe):
        given = {length: option_of(pipe, given, length), **given}
    named = {**given, "lora_scale": scale}
    chosen = ("clip_skip", "lora_scale", length)
    fixed: dict[str, Any] = {name: named[name] for name in chosen if named.get(name) is not None}
    fixed |= {"num_images_per_prompt": 1, "do_classifier_free_guidance": False}
    fixed |= {"prompt_2": None, "prompt_3": None}  # the same text for every encoder
    fixed = {name: value for name, value in fixed.items() if name in known}
    with torch.no_grad():
        states: Tensor = pipe.encode_prompt(prompt=text, device=pipe._execution_device, **fixed)[0]
    return states


class OtherTextLook:
    """See what the queries of a processor would attend to in another text, ``[1 or images, T,
    width]``.

    The keys are the layer's own projection, so LoRA and whatever else acts on it count. The image
    does not depend on them. Raise RuntimeError, when called, if the processor did not call
    ``to_q``.
    """

    def __init__(self, text_states: DeviceCopies, frame_rows: Callable[[], int] = lambda: 1):
        self.text_states = text_states
        self.frame_rows = frame_rows

    def __call__(
        self, observer: Observer, inner: Any, attn: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Attended]:
        with observer.projected(attn, "to_q") as seen:
            output = observer.inner(attn, *args, **kwargs)
        if "to_q" not in seen:
            raise RunError(
                f"The processor {type(inner).__name__} did not call the layer's own to_q, "
                "so what it would attend to cannot be known. Set another processor before capture, "
                "sdattn.TorchAttnProcessor() for example."
            )
        return output, _OtherText(attn, seen["to_q"], self.text_states, self.frame_rows())


class _OtherText(Attended):
    """A layer's query ``[B, N, heads*d]``, with keys made of another text for the chosen rows."""

    def __init__(self, attn: Any, query: Tensor, text_states: DeviceCopies, frame_rows: int):
        super().__init__(len(query), attn.heads, query.shape[1], text_states.own.shape[1])
        self.attn = attn
        self.query = query
        self.text_states = text_states
        self.frame_rows = frame_rows

    def of(self, rows: Rows) -> Attended:
        query = chosen_rows(self.query, rows)
        states = self.text_states.on(query.device, query.dtype)
        if getattr(self.attn, "norm_cross", None):
            states = self.attn.norm_encoder_hidden_states(states)
        key = self.attn.to_k(states)  # [1 or images, T, heads*d]
        images = len(query) // self.frame_rows
        if len(key) not in (1, images):
            raise InvalidValueError(
                f"text_states hold {len(key)} texts and the run has {images} images. Pass one "
                "for all, or one for each."
            )
        if len(key) > 1:
            key = key.repeat_interleave(self.frame_rows, 0)
        return softmax_of(projected_call(self.attn, query, key.expand(len(query), -1, -1)))

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        return self.of(ALL).probs(heads, columns)


class TextStream:
    """The stream of another text through the blocks of a model.

    Args:
        denoiser: model of a family that says how text enters its stream.
        text_states: ``[1 or images, T, width]``; T must equal the run's, for the rotary embeddings.

    Raises (when the model runs):
        ValueError: the number of columns or texts differs from the run's.
        RuntimeError: a block runs in a way in which it cannot be run again.
    """

    def __init__(self, denoiser: Denoiser, text_states: DeviceCopies, grad: bool):
        self.model = unwrapped(denoiser.model)
        self.enter = denoiser.family.text_stream
        self.text_states = text_states
        self.grad = grad
        self.thread = get_ident()
        self.rows: tuple[int, ...] | None = None  # watched rows of the batch; None for no pass
        self.now: Tensor | None = None  # what goes into the next block

    def follow(self, installed: Installation, layers: list[AttentionLayer]) -> None:
        """Run each block of these layers again after itself; raise RuntimeError for hooks of
        diffusers that keep state in a block."""
        for layer in layers:
            block = self.model.get_submodule(layer.name.rpartition(".")[0])
            if held := getattr(getattr(block, "_diffusers_hook", None), "hooks", None):
                raise RunError(
                    f"Asked about another text, for which each block runs twice, and {layer.name} "
                    f"has hooks of diffusers that would count both ({', '.join(held)}). Take out "
                    "caching and group offloading first, model.disable_cache()."
                )
            installed.follow(block, self.run_again)

    def begin(self, rows: tuple[int, ...] | None) -> None:
        """Begin a pass in which these rows are watched, None for none."""
        self.rows = rows
        self.now = None

    def run_again(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], _made: Any
    ) -> None:
        """Run a block again with the other text; the forward hook of that block."""
        if self.rows is None or running_stream() is not None or get_ident() != self.thread:
            return
        given = arguments(block, args, kwargs)
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            text = self._entered(given[TEXT]) if self.now is None else self.now
            token = _running.set(self)
            try:
                # the columns of the prompt, which a controller edits, are another text's here
                with unasked(_processors(block)):
                    made = block.forward(**{**given, TEXT: text})
            finally:
                _running.reset(token)
        if not isinstance(made, tuple) or len(made) != 2:
            raise RunError(
                f"A {type(block).__name__} gave no pair of text and image, so where the other "
                "text is in it cannot be known."
            )
        self.now = made[0]
        if self.now is None:  # the last block has no use for the text that it made
            self.rows = None

    def _entered(self, prompt: Tensor) -> Tensor:
        """Return the other text in place of the prompt ``[B, T, features]`` of the first block."""
        assert self.rows is not None and self.enter is not None
        states = self.text_states.on(prompt.device, prompt.dtype)
        if states.shape[1] != prompt.shape[1] or len(states) not in (1, len(self.rows)):
            raise InvalidValueError(
                f"text_states hold {len(states)} text(s) of {states.shape[1]} columns, and the "
                f"run has {len(self.rows)} image(s) and {prompt.shape[1]} columns. Encode the text "
                "as the pipeline does the prompt, one for all images or one for each."
            )
        entered = self.enter(self.model, states)
        whole = entered[:1].repeat(len(prompt), 1, 1)
        return whole.index_copy(
            0,
            torch.tensor(self.rows, device=whole.device),
            entered.expand(len(self.rows), -1, -1),
        )


def _processors(block: nn.Module) -> list[Any]:
    held = (getattr(part, "processor", None) for part in block.modules())
    return [innermost(one) for one in held if one is not None]
