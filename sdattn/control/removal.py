"""Run a pipeline with token columns removed from its attention, different ones for each row.

    with Removal(pipe, [(), (3,)], 77):           row 0 keeps all, row 1 loses column 3
        pipe([prompt] * 2, generator=[...])

Removing a column means masking this key out of the softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from itertools import product
from typing import cast

import torch
from torch import Tensor

from ..attention.device_copies import index_on
from ..attention.joint_processor import Queries
from ..errors import InvalidTypeError, InvalidValueError, OptionError, refuse, warn
from ..follow.passes import CaptureError, CaptureWarning, Pass
from ..follow.run import Subscriber, follow
from ..follow.run_part import RunPart, Span
from ..look.unknown_processors import is_plain
from ..models.caches import may_run_prompts_alone
from ..models.denoiser import find_denoiser
from ..models.denoiser_call import DenoiserCall, Size, innermost
from ..models.guidance import Order, guided_order
from ..models.layers import TEXT_KINDS, LayerSelection, select_layers
from ..models.pipeline import Pipeline
from .controlled_layers import check_joint, check_weights
from .registration import ControlHandle

Columns = tuple[int, ...]


def without_columns(probs: Tensor, columns: Columns) -> Tensor:
    """Return probabilities ``[..., T]`` with these keys masked out; rows without a rest are
    zero."""
    # Masking keys out of a softmax removes their shares and divides the rest by its sum.
    kept = probs.float().index_fill(-1, index_on(probs.device, columns), 0.0)
    left = kept.sum(-1, keepdim=True)
    return (kept / left.clamp_min(torch.finfo(kept.dtype).tiny)).to(probs.dtype)


class Removal(Subscriber):
    """One run of a pipeline, in a ``with`` block that restores the processors however it ends.

    The chosen layers get our processors, for all rows of the batch; the others keep their own. Only
    rows that read the prompt are edited, never the negative prompt's. ``layers``, ``steps`` and
    ``queries`` are as for :func:`sdattn.knockout`.

    Args:
        rows: columns to remove for each prompt of the run; the prompts are all the same.
        n_text: token columns of the prompt.

    Attributes:
        grid: (rows, cols) of the latent cells, once the run has begun.

    Raises:
        TypeError: joint attention that :class:`sdattn.TorchJointProcessor` does not know.
        ValueError: unknown guidance; a layer that does not exist; a processor with weights of its
            own; before the first step, an option that does not fit the run.
        CaptureError: the rows start from different noise; a processor was replaced during the run;
            the run ended early.
    """

    def __init__(
        self,
        pipe: Pipeline,
        rows: Sequence[Columns],
        n_text: int,
        layers: LayerSelection = None,
        steps: Span = (0.0, 1.0),
        queries: Queries | None = None,
    ):
        self.pipe = pipe
        self._denoiser = find_denoiser(pipe)
        self.rows = rows
        self.n_text = n_text
        self.layers = layers
        self.steps = check_removal(pipe, layers, steps, queries)
        self.queries: Queries = queries or "all"
        self.grid: Size = (0, 0)
        self._passes = 0
        self._expected = 0
        self._during: list[int] = []
        self._edits: dict[int, Columns] = {}  # row of the batch -> what it loses in this pass
        self._batch = 0

    def __enter__(self) -> Removal:
        # No layer yet: which of them have a resolution is known once the model runs.
        self._run = follow(self._denoiser)
        self._handle = ControlHandle(self._denoiser, [], self, self._run).__enter__()
        self._run.subscribe(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handle.restore()
        if kind is None and self._passes != self._expected:
            raise CaptureError(
                f"This run should call its model {self._expected} times and called it "
                f"{self._passes} times, so columns were removed in fewer steps than asked. Let it "
                "run to its end."
            )
        if kind is None and (strays := self._run.doubts.take_strays()):
            warn(strays, CaptureWarning)

    def __call__(self, probs: Tensor, _is_cross: bool, place: str) -> None:
        """Edit ``[B*heads, N, T]`` in place, in joint attention a part of the softmax."""
        by_row = probs.unflatten(0, (self._batch, -1))  # [B, heads, N, T], a view
        for row, columns in self._edits.items():
            if place in ("double", "single"):
                by_row[row].index_fill_(-1, index_on(probs.device, columns), 0.0)
            else:
                by_row[row] = without_columns(by_row[row], columns)

    def begin_pass(self, begun: Pass) -> None:
        self._batch = begun.batch
        self._edits = {}
        order = begun.order
        if begun.skips_layers:
            text = "skip-layer guidance runs the prompt once more, with the word. Leave it out."
            raise OptionError("skip_guidance_layers", True, text)
        # A pass for the negative prompt alone: the guidance runs its branches in turn.
        if order is None or begun.of_no_prompt:
            return
        if not self._passes:
            self._check_start(cast(DenoiserCall, self._run.reader.call), order)
            # the rest of the schedule if a run starts from an image
            self._expected = getattr(self.pipe, "num_timesteps", len(self.pipe.scheduler.timesteps))
            self._during = self.steps.passes(self._expected)
            if not self._during:
                raise InvalidValueError(
                    f"steps={astuple(self.steps)} is less than one of the {self._expected} passes "
                    f"of this run. One pass is 1 / {self._expected} of it."
                )
            self.grid = cast(Size, begun.latent_size)
            chosen = select_layers(self._denoiser.layers, self.layers, TEXT_KINDS, self.grid)
            self._handle.put(chosen, image=False, queries=self.queries)
        if not begun.again:  # else the same step goes on
            self._passes += 1
        # Asked in each pass, since guidance may end in the middle of a run.
        fits = begun.batch == len(order) * len(self.rows)  # else it is a callback's
        if self._passes - 1 in self._during and (fits or not begun.again):
            self._edits = self._edits_of(order)

    def _edits_of(self, order: Order) -> dict[int, Columns]:
        """Return the columns removed from each row of the batch, PAG's perturbed copy among them:
        it would push the image away from the word if it alone went on seeing it."""
        perturbed = getattr(self.pipe, "do_perturbed_attention_guidance", False)
        edits = {}
        for row, (name, columns) in enumerate(product(order, self.rows)):
            reads_prompt = name == "conditional" or (name is None and perturbed)
            if reads_prompt and columns:
                edits[row] = columns
        return edits

    def _check_start(self, call: DenoiserCall, order: Order) -> None:
        if call.batch != len(order) * len(self.rows):
            raise CaptureError(
                f"The model was called with a batch of {call.batch}; for {len(self.rows)} images "
                f"and guidance {order} it is {len(order) * len(self.rows)}. Run the pipeline on "
                "one prompt for each row, and make one image of each."
            )
        if call.n_text != self.n_text:
            raise InvalidValueError(
                f"The attention has {call.n_text} token columns of text, and the prompt was read "
                f"with {self.n_text}. Pass the options that change them to both."
            )
        # Else the images would differ by more than the word.
        sample = cast(Tensor, call.sample)
        first, *others = sample.chunk(len(order))[order.index("conditional")].float()
        if not all(torch.allclose(first, other, atol=1e-2) for other in others):
            raise CaptureError(
                "The rows of the batch start from different noise or images, so that more than "
                "the removal would change them. Pass one image, or one set of latents, for all."
            )


def check_removal(
    pipe: Pipeline, layers: LayerSelection, steps: Span, queries: Queries | None = None
) -> RunPart:
    """Return the checked part of the run; refuse all that :class:`Removal` refuses before it."""
    guided_order(pipe)
    denoiser = find_denoiser(pipe)
    if may_run_prompts_alone(denoiser.model):
        raise InvalidTypeError(
            f"FasterCache is on in the {type(denoiser.model).__name__}, which leaves the negative "
            "prompt's rows out in some steps, so the rows that lose a word are others there. Turn "
            "it off, disable_cache(). capture() can watch it."
        )
    chosen = select_layers(denoiser.layers, layers, TEXT_KINDS)
    joint = [layer for layer in chosen if layer.kind == "joint"]
    if queries not in ("image", "all", None):
        raise refuse("queries", queries, ("image", "all"))
    if queries is not None and not joint:
        kind = type(pipe).__name__
        text = f"the text has queries in joint attention only. Leave it out for a {kind}."
        raise OptionError("queries", queries, text)
    if joint:
        check_joint(denoiser, joint)
    check_weights(chosen)
    for layer in chosen:
        processor = innermost(layer.module.processor)
        is_diffusers = type(processor).__call__.__module__.startswith("diffusers.")
        if layer.kind == "cross" and is_diffusers and not is_plain(layer.module, processor):
            raise InvalidTypeError(
                f"{layer.name} has a {type(processor).__name__}, which does more than a plain "
                "attention, such as rotary embeddings: without it a knockout would change more "
                "than its word. capture() can watch it."
            )
    return RunPart.of(steps)
