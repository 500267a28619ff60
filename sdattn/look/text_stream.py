"""The stream of another text through a model's joint attention.

A block of joint attention carries the text on in its own stream. So once the model has run a block,
it is run again here with the image that came in and the other text in place of the prompt: the text
that comes out goes to the next block, the image is thrown away.

Source: Helbling et al. 2025, "ConceptAttention" (arXiv:2502.04320), for a stream of concepts next
to the prompt's, each one token without a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from ..attention.controlled import unasked
from ..attention.device_copies import DeviceCopies
from ..errors import InvalidValueError, RunError
from ..follow.installer import Installation
from ..models.denoiser import Denoiser
from ..models.denoiser_call import arguments, innermost, unwrapped
from ..models.layers import AttentionLayer
from .layer import IsOpen

TEXT = "encoder_hidden_states"
# The stream whose block runs again now; None while the model runs.
RUNNING: ContextVar[TextStream | None] = ContextVar("text stream", default=None)


class TextStream:
    """The stream of another text through the blocks of a model.

    Args:
        denoiser: model of a family that says how text enters its stream.
        text_states: ``[1 or images, T, width]``; T must equal the run's, for the rotary embeddings.
        grad: False computes the other text without a gradient.
        is_open: function that tells whether a pass of the followed run is open in this thread.

    Raises (when the model runs):
        ValueError: the number of columns or texts differs from the run's.
        RuntimeError: a block runs in a way in which it cannot be run again.
    """

    def __init__(self, denoiser: Denoiser, text_states: DeviceCopies, grad: bool, is_open: IsOpen):
        self.model = unwrapped(denoiser.model)
        self.enter = denoiser.family.text_stream
        self.text_states = text_states
        self.grad = grad
        self.is_open = is_open
        self.rows: tuple[int, ...] | None = None  # watched rows of the batch; None for no pass
        self.now: Tensor | None = None  # what goes into the next block

    def follow(self, installed: Installation, layers: list[AttentionLayer]) -> None:
        """Run each block of these layers again after itself; raise RuntimeError for hooks of
        diffusers that keep state in a block."""
        for layer in layers:
            block = self.model.get_submodule(layer.name.rpartition(".")[0])
            hooks = getattr(getattr(block, "_diffusers_hook", None), "hooks", None)
            if hooks:
                raise RunError(
                    f"Asked about another text, for which each block runs twice, and {layer.name} "
                    f"has hooks of diffusers that would count both ({', '.join(hooks)}). Take out "
                    "caching and group offloading first, model.disable_cache()."
                )
            installed.follow(block, self.run_again)

    def begin(self, rows: tuple[int, ...] | None) -> None:
        """Begin a pass in which these rows are watched, None for none."""
        self.rows = rows
        self.now = None

    def run_again(
        self,
        block: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        _made: object,
    ) -> None:
        """Run a block again with the other text; the forward hook of that block."""
        if self.rows is None or RUNNING.get() is not None or not self.is_open():
            return
        inputs = arguments(block, args, kwargs)
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            text = self._entered(inputs[TEXT]) if self.now is None else self.now
            token = RUNNING.set(self)
            try:
                # the columns of the prompt, which a controller edits, are another text's here
                with unasked(_processors(block)):
                    made = block.forward(**{**inputs, TEXT: text})
            finally:
                RUNNING.reset(token)
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


def _processors(block: nn.Module) -> list[object]:
    found = []
    for module in block.modules():
        processor = getattr(module, "processor", None)
        if processor is not None:
            found.append(innermost(processor))
    return found
