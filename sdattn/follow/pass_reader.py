"""`PassReader` tells which call of a model is running; all that watches or edits attention asks it.

A call is a pass of a run if it came while the pipeline's own call ran. Other calls are strays: from
another pipeline, or a user's loop. They run untouched and are not counted. A step has one pass for
each branch of the guidance; if its model is called once more, by the pipeline or by a callback,
which call counts must be said.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ..attention.joint_processor import Spans
from ..errors import InvalidValueError
from ..models.caches import may_run_prompts_alone
from ..models.denoiser import Denoiser, ordered_spans
from ..models.denoiser_call import DenoiserCall, Size, Timestep, unwrapped
from ..models.guidance import Branch, GuidanceWatch, Order, branch_rows
from ..models.pipeline import Given, Model
from ..models.running_call import Caller, caller_of
from .call_layout import CallLayout
from .doubts import is_own_call
from .pass_options import BRANCHES, TOLD, Guidance, check_options, refuse_both_in_turn
from .passes import Pass, Schedule, Stray
from .text_watch import TextWatch


class PassReader:
    """Reader of each call of a model, once, before its layers run.

    Args:
        denoiser: the model and its pipeline; only the pipeline is held weakly.
        branch: branch whose rows are kept, ``"conditional"``, ``"unconditional"`` or ``"both"``;
            None for a controller, which is shown every row.
        guidance: where the unconditional rows are. ``"auto"``: the pipeline tells, inside its own
            call; ``"batch"``: in the first half; ``"passes"``: in the first of two passes; None:
            nowhere.
        latent_size: (rows, cols) of the queries, for a custom model, or for a model on the meta
            device whose ids would give them.
        counts_gradients: True if calls for a gradient count; a step may have several of them.
        frames: frames of a video that are kept; None for all.
        step_call: call that counts, from 0, where a step has several for one branch; None for the
            first.

    Attributes:
        call: the running call; None if nothing of it is kept.
        caches_text: see :attr:`sdattn.models.Family.caches_text`.
        watch: watch of the pipeline's guidance; None without a pipeline, or if ``guidance`` tells.
        schedule: schedule of the run, or None if unknown.
        runs: number of runs begun.

    Raises:
        ValueError: the pipeline's guidance layout is not known; a ``branch``, ``guidance`` or
            ``latent_size`` that does not fit it; this process has only a part of the model.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        branch: str | None = None,
        guidance: Guidance | None = "auto",
        latent_size: tuple[int, int] | None = None,
        counts_gradients: bool = True,
        frames: Sequence[int] | None = None,
        step_call: int | None = None,
    ):
        pipeline = denoiser.pipeline
        if branch is not None:
            check_options(denoiser, branch, guidance, latent_size, step_call)
        self._told = TOLD.get(guidance)  # None for "auto": the pipeline is asked
        self._pipeline = None if pipeline is None else weakref.ref(pipeline)
        self._family = denoiser.family
        self.caches_text = denoiser.family.caches_text
        self._joined = None
        if any(layer.kind == "joint" for layer in denoiser.layers):
            self._joined = denoiser.family.order_of(unwrapped(denoiser.model))
        asks = pipeline is not None and self._told is None
        self.watch = GuidanceWatch(pipeline) if asks else None
        in_turn = guidance == "passes" if self.watch is None else self.watch.in_turn
        if branch == "both" and in_turn:
            refuse_both_in_turn(denoiser)
        self._branch = branch
        self._latent_size = latent_size
        self._counts_gradients = counts_gradients
        self._frames = frames
        self._step_call = step_call or 0
        self.call: DenoiserCall | None = None
        self._size: Size | None = None  # in the running pass
        self._spans: Sequence[Spans] | None = None  # in that pass, one pair or one per row
        self.schedule: Schedule | None = None
        self.runs = 0
        self._run: tuple[Any, int | None] = (None, None)  # its timesteps, and its call's number
        self._layout = CallLayout()
        self._begin_run()

    @property
    def pipeline(self) -> Any:
        """Pipeline; None for a bare model, and once it is gone."""
        return None if self._pipeline is None else self._pipeline()

    def read(self, model: Model, args: tuple[object, ...], kwargs: Given) -> Pass:
        """Return the pass that begins now; :attr:`Pass.stray` is set if it does not belong to the
        run. Raise ValueError if the branches of its rows are unknown."""
        self.call = None
        pipeline = self.pipeline
        caller = None if pipeline is None else caller_of(pipeline)
        if caller is not None and self._is_beside(model, caller):
            return Pass(0.0, None, 0, None, stray=Stray(caller.name, caller.pipeline))
        call = self._family.read_call(unwrapped(model), args, kwargs)
        begun = Pass(call.timestep, None, call.batch, None, frame_rows=call.frame_rows)
        begun.skips_layers = call.skips_layers
        begun.prompts_alone = may_run_prompts_alone(model)
        is_own = caller is not None and caller.pipeline is not None
        is_for_loss = is_own_call() or is_for_gradient(call)
        is_decorated = caller is not None and caller.is_decorated
        if is_decorated and is_for_loss and not self._counts_gradients:
            name = f"{type(pipeline).__name__}.__call__"
            begun.stray = Stray(f"{name}, for a gradient, which grad=True would count")
            return begun
        # Find its entry in the schedule, which call of its step it is, and its rows.
        begun.begins_run = self._begins(pipeline, caller.call if caller is not None else None)
        begun.schedule = self.schedule
        if self.schedule is not None:
            begun.index = self.schedule.index(call.timestep, pipeline.scheduler)
        step = self._step(model, begun, caller) if is_own and caller is not None else None
        before = self._calls.setdefault(step, [])
        begun.order = self._order(model, caller, len(before))
        is_repeated = is_own and not (self._counts_gradients and is_for_loss)
        is_known = begun.order is not None and any(begun.order) and not begun.skips_layers
        if is_repeated and is_known and step is not None:
            begun.again = before.count(begun.order)
            before.append(begun.order)
        else:
            before.append(None)
        kept = self._kept(begun)
        if kept is not None:
            begun.rows = tuple(row for row, _ in kept)
            begun.branches = tuple(name for _, name in kept[:: call.frame_rows])
        if kept is not None or self._branch is None:
            self._lay_out(begun, call, in_run=pipeline is not None and not begun.begins_run)
        return begun

    def steps_without(self) -> int:
        """Return the number of steps of the kept branch without the call that counts."""
        kept = set(BRANCHES[self._branch or "both"])
        missing = 0
        for calls in self._calls.values():
            for order in set(calls):
                if order is not None and kept & set(order):
                    missing += calls.count(order) <= self._step_call
        return missing

    def listen(self) -> None:
        """Follow the names that the pipeline gives its calls, until :meth:`close`."""
        if self.watch is not None:
            self.watch.listen()

    def close(self) -> None:
        """Stop listening to the pipeline."""
        if self.watch is not None:
            self.watch.close()

    def frame_rows(self) -> int:
        """Return the rows per image in the running pass, see :class:`DenoiserCall`."""
        return 1 if self.call is None else self.call.frame_rows

    def spans(self) -> Sequence[Spans] | None:
        """Return the places of the image's queries and the text's keys in the running pass: one
        pair for all rows, or one per row; None if the pass is not kept."""
        if self.call is None or self._size is None or self._joined is None:
            return None
        if self._spans is None:
            cells = math.prod(self._size)
            self._spans = (ordered_spans(self._joined, cells, self.call.n_text),)
        return self._spans

    def shared_spans(self) -> Spans | None:
        """Return the pair of :meth:`spans` for a model whose rows all have the same places."""
        spans = self.spans()
        return None if spans is None else spans[0]

    def _is_beside(self, model: Model, caller: Caller) -> bool:
        """Check for a call outside the pipeline's, other than a user's loop with known branches."""
        if caller.pipeline is not None:
            return caller.pipeline is not self.pipeline
        is_known = self._branch is None or self._told is not None
        return not is_known and (self.watch is None or self.watch.named(model) is None)

    def _begins(self, pipeline: Any, call: int | None) -> bool:
        """Check whether a pass is the first of a run; ask once per pass.

        Each call of the pipeline is a run, and so is each schedule (FreeInit has several in one
        call).
        """
        timesteps = getattr(getattr(pipeline, "scheduler", None), "timesteps", None)
        before, last = self._run
        begins = timesteps is not before or (call is not None and call != last)
        self._run = timesteps, call or last
        if begins:
            self.schedule = None if timesteps is None else Schedule(timesteps)
            self.runs += 1
            self._begin_run()
        return begins

    def _begin_run(self) -> None:
        # Branches of the run's calls by step; None for calls that are no second ones of a step,
        # and for the steps of loops, which are not known.
        self._calls: dict[object, list[Order | None]] = {}
        self._entered: tuple[object, object] = (None, None)  # last known entry, and its step
        self._texts = TextWatch(self._frames)

    def _step(self, model: Model, begun: Pass, caller: Caller) -> object:
        """Return what stands for the step that a call of the pipeline belongs to, or None.

        It is the schedule's entry that the model got. A callback may call the model at another
        timestep: the step is then the last one, as long as the pipeline counts the same.
        """
        counted = None if self.watch is None else self.watch.step(model, caller.variables or {})
        if self.schedule is not None and isinstance(begun.given, Timestep):
            entry = begun.given.index_in(self.schedule.timesteps)
            if entry is not None:
                self._entered = ("entry", entry), counted
        step, at = self._entered
        if step is not None and at == counted:
            return step
        return begun.index if counted is None else ("counted", counted)

    def _order(self, model: Model, caller: Caller | None, number: int) -> Order | None:
        """Return the chunks of the batch that begins now, call ``number`` of its step, or None if
        unknown."""
        if self._told is not None:
            return self._told[number % len(self._told)]
        if caller is None:  # a bare model, each of whose rows is an image to a capture
            return None if self._branch is None else ("conditional",)
        if self.watch is None:
            return None
        if caller.pipeline is None:
            return self.watch.named(model)
        return self.watch.order(model, number, caller.variables)

    def _kept(self, begun: Pass) -> list[tuple[int, Branch]] | None:
        """Return the kept rows with their branch, or None if the batch has only another one."""
        if self._branch is None or begun.order is None or begun.skips_layers:
            return None
        if begun.again != self._step_call:
            return None
        rows = branch_rows(begun.order, begun.batch)
        every = range(begun.batch)
        branches = BRANCHES[self._branch]
        if not set(branches) <= set(rows):
            return None
        kept: list[tuple[int, Branch]] = []  # a list of this type by name costs far more
        for name in branches:
            kept += [(row, name) for row in every[rows[name]]]
        return kept

    def _lay_out(self, begun: Pass, call: DenoiserCall, in_run: bool) -> None:
        """Find the grid, the text's columns, and whether the text changed since the last pass."""
        self.call = call
        rows = begun.rows or tuple(range(call.batch))
        begun.latent_size = self._size = self._latent_size or self._layout.size(call, in_run)
        self._spans = self._layout.spans(call, self._size, rows)
        begun.n_text = call.n_text
        if self._spans is not None:  # if rows differ, the longest counts
            begun.n_text = max(text.stop - text.start for _, text in self._spans)
        with suppress(InvalidValueError):  # controllers may see batches without chunks
            rows = begun.rows or self._rows_of(begun.prompts)
            if rows:
                verdicts = self._texts.note(call.text, rows, call.frame_rows)
                begun.text_changed, begun.text_by_frame = verdicts

    @staticmethod
    def _rows_of(prompts: slice | None) -> tuple[int, ...]:
        return () if prompts is None else tuple(range(prompts.start, prompts.stop))


def is_for_gradient(call: DenoiserCall) -> bool:
    """Check whether a model is called for a gradient, for a loss on its attention perhaps."""
    return call.sample is not None and call.sample.requires_grad and torch.is_grad_enabled()
