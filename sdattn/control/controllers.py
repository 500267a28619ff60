"""Prompt-to-prompt's controllers: one source prompt and its edits, side by side in one batch.

The batch is ``[source, target, ...]`` with the same noise in each row. With guidance, the same
number of unconditional rows comes first. Edits are in place; run under torch.no_grad().

Source: Hertz et al. 2022, section 3.2; google/prompt-to-prompt and diffusers' community pipeline
for what the paper leaves open.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention.device_copies import DeviceCopies
from ..attention.modes import no_autocast
from ..errors import InvalidTypeError, InvalidValueError, refuse
from ..follow.run_part import RunPart, Span
from ..maps.requirements import columns_of
from ..models.values import checked_whole, number
from ..prompts.tokens import Prompt
from . import alignment
from .attention_store import AttentionStore
from .blend import LocalBlend, checked_read


class EmptyControl:
    """Controller that changes nothing."""

    num_att_layers = -1

    def __call__(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        return attn

    def step_callback(self, x_t: Tensor) -> Tensor:
        return x_t


class AttentionControlEdit(AttentionStore):
    """Common part of the three edits: when they act, and on which rows.

    Args:
        prompts: the source and one or more targets, as :func:`sdattn.read_prompts` reads them.
        num_steps: passes of the model in the run (for most schedulers the number of steps).
        cross_replace_steps: part of the run in which cross-attention is edited: 0.8 for the first
            80 %, ``(0.2, 0.8)``, or per word of the targets ``{"default_": 0.8, "star": (0,
            0.4)}``; without ``"default_"``, all other words have 1.0.
        self_replace_steps: part of the run in which self-attention is the source's.
        local_blend: keeps the image outside some words; applied by :meth:`step_callback`.
        max_self_queries: largest number of queries at which self-attention is edited.
        store_options: options of :class:`sdattn.AttentionStore`; ``guidance`` is ``"batch"`` by
            default.

    Raises:
        ValueError: fewer than two prompts, a part outside [0, 1], an impossible number, prompts
            that cannot be aligned, a ``local_blend`` of other prompts. In a run: it draws other
            prompts, or these in another order.
        KeyError: a word of ``cross_replace_steps`` that is in no target.
        TypeError: texts, or something else than prompts.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        num_steps: int,
        cross_replace_steps: Span | Mapping[str, Span] = 0.8,
        self_replace_steps: Span = 0.4,
        local_blend: LocalBlend | None = None,
        *,
        max_self_queries: int = 16**2,
        **store_options: Any,
    ):
        self.prompts = read = checked_read(prompts, type(self).__name__)
        if len(read) < 2:
            raise InvalidValueError(
                f"{len(read)} prompt(s): pass the source and at least one target."
            )
        if local_blend is not None and not callable(local_blend):
            raise refuse("local_blend", local_blend, "a LocalBlend of these prompts")
        self._check_same("local_blend", local_blend)
        self.num_steps = num_steps = checked_whole("num_steps", num_steps)
        self.local_blend = local_blend
        self.max_self_queries = checked_whole("max_self_queries", max_self_queries, 0)
        self.cross_replace = _cross_schedule(read[1:], num_steps, cross_replace_steps)
        self.self_replace = RunPart.of(self_replace_steps, num_steps).passes(num_steps)
        # A target that is the source has the source's attention already, up to how a batch rounds.
        self.edits = torch.tensor([target.text != read[0].text for target in read[1:]])
        self._copies: dict[int, DeviceCopies] = {}  # by the id of the tensor, which they hold
        super().__init__(**{"guidance": "batch", **store_options})

    def _check_same(self, name: str, part: object) -> None:
        """Refuse a blend or a further controller that was made for other prompts."""
        others = getattr(part, "prompts", None)
        if others is not None and others != self.prompts:
            texts = [getattr(prompt, "text", prompt) for prompt in others]
            raise InvalidValueError(
                f"The `{name}` was made for {texts}, and the {type(self).__name__} for "
                f"{[prompt.text for prompt in self.prompts]}. Make both with the same prompts."
            )

    def reset(self) -> None:
        """Forget all maps and steps, ready for another run."""
        super().reset()
        if self.local_blend is not None:
            self.local_blend.counter = 0

    def forward(self, attn: Tensor, is_cross: bool, place_in_unet: str) -> Tensor:
        """Keep the map, then edit the rows of the targets in place."""
        super().forward(attn, is_cross, place_in_unet)
        if self.cur_step >= self.num_steps:
            raise InvalidValueError(
                f"This {type(self).__name__} was made for {self.num_steps} passes of the model, "
                "and the model ran again. Give it len(scheduler.timesteps), or reset() before a "
                "second run."
            )
        if len(attn) % len(self.prompts):
            raise InvalidValueError(
                f"The {len(attn)} rows of attention do not divide among {len(self.prompts)} "
                "prompts. Run the pipeline on the prompts that the controller was made for."
            )
        # The processor goes on with the tensor as edited in place.
        by_prompt = attn.unflatten(0, (len(self.prompts), -1))  # [prompts, heads, N, T], a view
        source = by_prompt[0]
        targets = by_prompt[1:]
        if is_cross:
            self._check_columns(attn)
            # On the CPU first: if nothing is edited in this step, nobody waits for the device.
            chosen = self.cross_replace[self.cur_step] & self.edits.view(-1, 1, 1, 1)
            if chosen.any():
                edited = self.replace_cross_attention(source, targets)
                schedule = self._on(attn.device, self.cross_replace)[self.cur_step]
                chosen = schedule & self._on(attn.device, self.edits).view(-1, 1, 1, 1)
                targets.copy_(torch.where(chosen, edited, targets))
        elif self.cur_step in self.self_replace and attn.shape[1] <= self.max_self_queries:
            for target, is_edited in zip(targets, self.edits.tolist(), strict=True):
                if is_edited:
                    target.copy_(source)
        return attn

    def _on(self, device: torch.device, own: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self._copies.setdefault(id(own), DeviceCopies(own)).on(device, dtype)

    def replace_cross_attention(self, attn_base: Tensor, attn_replace: Tensor) -> Tensor:
        """Return the edited maps ``[targets, heads, N, T]``, given the source's ``[heads, N, T]``
        and the targets' own."""
        raise NotImplementedError

    def step_callback(self, x_t: Tensor) -> Tensor:
        """Blend latents after a step, ``[prompts, C, rows, cols]`` or packed ``[prompts, N,
        C]``."""
        if self.local_blend is None:
            return x_t
        # Ours picks maps by their resolution, others by their position.
        is_ours = isinstance(self.local_blend, LocalBlend)
        store = self.full_attention_store if is_ours else self.attention_store
        if x_t.ndim == 4:
            return self.local_blend(x_t, store)
        unpacked = x_t.mT.unflatten(2, self.latent_size)  # [prompts, C, rows, cols]
        return self.local_blend(unpacked, store).flatten(2).mT

    def _check_columns(self, attn: Tensor) -> None:
        if attn.shape[-1] != len(self.prompts[0].tokens):
            raise InvalidValueError(
                f"The attention has {attn.shape[-1]} token columns and the prompts were read with "
                f"{len(self.prompts[0].tokens)}. Read them with sdattn.read_prompts(pipe, ...) and "
                "the options of the run that change the columns, such as max_sequence_length."
            )


class AttentionReplace(AttentionControlEdit):
    """Word swap, for prompts with the same number of words: the n-th word of a target attends where
    the n-th word of the source does. Arguments as for :class:`AttentionControlEdit`."""

    def __init__(self, prompts: Sequence[Prompt], num_steps: int, *args: Any, **options: Any):
        super().__init__(prompts, num_steps, *args, **options)
        source, *targets = self.prompts
        self.mapper = torch.stack([alignment.swap(source, target) for target in targets])

    def replace_cross_attention(self, attn_base: Tensor, attn_replace: Tensor) -> Tensor:
        # [targets, T of source, T]
        mapper = self._on(attn_base.device, self.mapper, attn_base.dtype)
        with no_autocast():
            replaced: Tensor = attn_base @ mapper[:, None]
        return replaced


class AttentionRefine(AttentionControlEdit):
    """Added or removed phrase: words that both prompts share attend where the source's do, new
    words keep their own attention. Arguments as for :class:`AttentionControlEdit`."""

    def __init__(self, prompts: Sequence[Prompt], num_steps: int, *args: Any, **options: Any):
        super().__init__(prompts, num_steps, *args, **options)
        source, *targets = self.prompts
        self.mapper = torch.stack([alignment.refine(source, target) for target in targets])

    def replace_cross_attention(self, attn_base: Tensor, attn_replace: Tensor) -> Tensor:
        mapper = self._on(attn_base.device, self.mapper)  # [targets, T]
        taken = attn_base[..., mapper.clamp(min=0)]  # [heads, N, targets, T]
        shared = (mapper >= 0)[:, None, None]
        return torch.where(shared, taken.permute(2, 0, 1, 3), attn_replace)


class AttentionReweight(AttentionControlEdit):
    """Stronger or weaker words: their columns of the source's attention, times a factor.

    Args:
        weights: factor of each word or phrase of the targets, applied to all its occurrences. Below
            0 is allowed; the paper goes from -2 to 2.
        controller: an :class:`AttentionReplace` or :class:`AttentionRefine` of the same prompts,
            whose edit comes first. Without it the targets must be the source's own text.

    Other arguments as for :class:`AttentionControlEdit`. Edited rows no longer sum to 1, as in the
    paper.

    Raises:
        KeyError: a word that is in no target.
        ValueError: a factor that is no finite number; a target of other words without a
            ``controller``; a ``controller`` of other prompts.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        num_steps: int,
        cross_replace_steps: Span | Mapping[str, Span] = 0.8,
        self_replace_steps: Span = 0.4,
        weights: Mapping[str, float] | None = None,
        local_blend: LocalBlend | None = None,
        controller: AttentionControlEdit | None = None,
        **options: Any,
    ):
        super().__init__(
            prompts, num_steps, cross_replace_steps, self_replace_steps, local_blend, **options
        )
        source, *targets = self.prompts
        others = [target.text for target in targets if target.text != source.text]
        if others and controller is None:
            raise InvalidValueError(
                f"Reweighting alone changes no words, and {others[0]!r} is not the source "
                f"{source.text!r}. Pass an AttentionReplace or AttentionRefine as controller."
            )
        if controller is not None and not isinstance(controller, AttentionControlEdit):
            raise refuse("controller", controller, "an AttentionReplace or AttentionRefine")
        self._check_same("controller", controller)
        self.controller = controller
        self.equalizer = _equalizer(self.prompts[1:], checked_weights(weights))  # [targets, T]
        self.edits |= (self.equalizer != 1).any(1)

    def replace_cross_attention(self, attn_base: Tensor, attn_replace: Tensor) -> Tensor:
        edited = attn_base.expand_as(attn_replace)
        if self.controller is not None:
            edited = self.controller.replace_cross_attention(attn_base, attn_replace)
        return edited * self._on(edited.device, self.equalizer, edited.dtype)[:, None, None]


def step_end(controller: Any) -> Callable[..., dict[str, Any]]:
    """Return a ``callback_on_step_end`` for diffusers' pipelines that calls
    ``controller.step_callback(latents)`` after each step of the scheduler; raise TypeError if it
    has none."""
    if not callable(getattr(controller, "step_callback", None)):
        raise InvalidTypeError(
            f"A {type(controller).__name__} has no step_callback(latents). Pass the controller."
        )

    def callback(
        _pipe: object, _step: int, _timestep: object, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        latents: Tensor = controller.step_callback(tensors["latents"])
        return {"latents": latents}

    return callback


def _cross_schedule(
    targets: Sequence[Prompt], num_steps: int, spans: Span | Mapping[str, Span]
) -> Tensor:
    """Return the columns that are edited in each pass: bool ``[num_steps, targets, 1, 1, T]``."""
    by_word = dict(spans) if isinstance(spans, Mapping) else {"default_": spans}
    when = torch.zeros(num_steps, len(targets), 1, 1, len(targets[0].tokens), dtype=torch.bool)
    when[RunPart.of(by_word.pop("default_", 1.0), num_steps).passes(num_steps)] = True
    for word, span in by_word.items():
        steps = RunPart.of(span, num_steps).passes(num_steps)
        for i, columns in _columns_of(targets, word):
            # A word with a span of its own is edited in that span, and in no other.
            when[:, i, ..., columns] = False
            for step in steps:
                when[step, i, ..., columns] = True
    return when


def checked_weights(weights: object) -> dict[str, float]:
    """Return the factors of words; raise ValueError if one is no finite number."""
    if not isinstance(weights, Mapping | None):
        raise refuse("weights", weights, "a factor for each word, {'cat': 2.0}")
    checked = dict[str, float]()
    for word, given in (weights or {}).items():
        factor = number(given)
        if factor is None or not math.isfinite(factor):
            raise InvalidValueError(f"The weight of {word!r} is {given!r}: pass a finite number.")
        checked[word] = factor
    return checked


def _equalizer(targets: Sequence[Prompt], weights: Mapping[str, float]) -> Tensor:
    """Return the factor of each column: float32 ``[targets, T]``."""
    factors = torch.ones(len(targets), len(targets[0].tokens))
    for word, factor in weights.items():
        for i, columns in _columns_of(targets, word):
            factors[i, columns] = factor
    return factors


def _columns_of(prompts: Sequence[Prompt], word: str) -> list[tuple[int, list[int]]]:
    """Return (prompt, columns) for each prompt with the word; raise KeyError if there is none."""
    of_prompts = []
    missing = []
    for i, prompt in enumerate(prompts):
        try:
            of_prompts.append((i, columns_of([word], [prompt])))
        except KeyError as error:
            missing.append(error)
    if not of_prompts:
        raise missing[0]
    return of_prompts
