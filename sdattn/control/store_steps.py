"""`StoreSteps`: passes of a model as steps of a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

from torch import Tensor

from ..attention.controlled import LayerController
from ..errors import RunError
from ..follow.drawn import DrawnPrompts
from ..follow.pass_options import Guidance
from ..follow.passes import Pass
from ..follow.text_watch import RepeatedCalls, TextsOfRun
from ..models.denoiser_call import Size
from ..models.layers import PLACES, Place
from .step_maps import HOW, StepMaps

_PLACES = (*PLACES, "double", "single")  # in the order in which a pass reaches them


class StoreSteps(StepMaps, LayerController):
    """Maps by step, told by whoever follows the model where runs, passes and steps begin and end.

    :class:`sdattn.AttentionStore` lists its attributes.
    """

    attachment: Any = None  # to the model that it follows, if it was attached to one
    guidance: Guidance | None
    repeats: RepeatedCalls  # passes outside of a pipeline's call
    num_att_layers = -1
    _num_uncond = -1

    def reset(self) -> None:
        """Forget all maps and steps."""
        super().reset()
        self.cur_att_layer = 0
        self.num_att_layers = self.num_att_layers or -1
        self.levels: int | None = None
        self.images: int | None = None
        self.drawn: DrawnPrompts | None = None
        self.texts = TextsOfRun()
        self._batch: int | None = None  # rows of the pass
        self._prompts: slice | None = None  # the prompts' among them
        self._guess: str | None = None  # warning still to be given
        self._is_second_pass = False
        self._place = 0  # of the last call, in the order in which a pass reaches places
        self._calls_in_pass = 0  # of a pass that ended inside a step
        if self.attachment is not None:
            self.attachment.forget()

    @property
    def num_uncond_att_layers(self) -> int:
        """Number of calls at the start of each step for the negative prompt, which are not kept."""
        if self._num_uncond >= 0:
            return self._num_uncond
        return max(self.num_att_layers, 0) if self.guidance == "passes" else 0

    @num_uncond_att_layers.setter
    def num_uncond_att_layers(self, calls: int) -> None:
        self._num_uncond = calls

    def begin_run(self) -> None:
        """Note that a run begins, for a registered store: two are told when their mean is read."""
        if self.cur_step and self.save_global_store is None:
            self._guess = (
                f"This {type(self).__name__} holds several runs, and what is read is their mean. "
                "Call reset() between them, or use a new store for each."
            )

    def begin_pass(
        self, begun: Pass, *, levels: int, places: Sequence[Place], prompts: slice | None
    ) -> None:
        """Begin a pass of the model before its layers call; ``prompts`` are the prompts' rows, if a
        pipeline knows them."""
        before = self.latent_size
        rows, cols = cast(Size, begun.latent_size)
        size = (rows, cols)
        if self.cur_step and before not in (None, size):
            self.reset()
            self.note(
                f"the latent was {before} at first and {size} later. Call store.reset() "
                "between runs."
            )
        self.latent_size = size
        self.levels = levels
        self.places = tuple(places)
        self.texts.add(begun.text_changed, begun.text_by_frame)
        self._batch = begun.batch
        self._prompts = prompts
        if not self._is_second_pass:
            if self.attachment is not None:
                self.cur_att_layer = 0  # an earlier pass may have broken off
            self.empty_step()

    def end_pass(self, calls: int) -> None:
        """End a pass of the attached model, and the step of which it is the last."""
        self.num_att_layers = calls
        if self.num_uncond_att_layers and not self._is_second_pass:
            self._is_second_pass = True
            return
        self._end_step()
        self.step_store.update(self._last_step)  # as in a store that is alone

    def between_steps(self) -> None:
        """Add the running step to the sums. A loop that knows where steps end may call this; the
        calls up to here are then a step, whatever their number."""
        if self.cur_att_layer:
            self._end_step()
        else:
            super().between_steps()

    def begin_place(self, place: str) -> None:
        """Note a call's place in a store that counts calls, or is alone. A pass reaches places in
        order, so an earlier one is another pass's."""
        if place not in _PLACES:
            return
        number = _PLACES.index(place)
        n_calls = self.cur_att_layer
        n_uncond = self.num_uncond_att_layers
        if n_calls not in (0, n_uncond) and number < self._place and not self._calls_in_pass:
            self._calls_in_pass = n_calls - n_uncond if n_calls > n_uncond else n_calls
        self._place = number

    def open_step(self) -> str:
        """Describe calls that no step holds, or passes that share a step; "" if there are none."""
        n_calls = self.num_att_layers + self.num_uncond_att_layers
        n_layers = self._calls_in_pass
        n_open = self.cur_att_layer
        if not self.num_att_layers or not (n_open or n_layers):
            return ""  # detached, or whole
        if self.num_att_layers < 0:
            many = f"{n_open} calls for {n_layers} layers" if n_layers else f"{n_open} calls"
            return (
                f"it holds {many}, and was attached to no model, so it does not know where a step "
                f"ends: attach it, or call between_steps() after each step. {HOW}"
            )
        if n_layers:
            held = self.cur_step * n_calls + n_open
            return (
                f"it holds {held} calls for {n_layers} layers, and counted {n_calls} calls as a "
                f"step, so that one step has the maps of several: attach it, or call "
                f"between_steps() after each pass. {HOW}"
            )
        return (
            f"it holds {n_open} calls for {n_calls} layers: its last step did not end. Attach it, "
            "or call between_steps() where the step ends; call reset() after a run that stopped."
        )

    def pass_over(self, why: str) -> None:
        """Remember a call that cannot be looked at; raise RuntimeError if :meth:`forward` may
        edit."""
        self.note(why)
        self._refuse_edits(why)

    def _refuse_edits(self, why: str) -> None:
        if getattr(self.forward, "__func__", None) is not StepMaps.forward:
            raise RunError(f"A {type(self).__name__} may edit attention, but cannot here: {why}")

    def _end_step(self) -> None:
        self.cur_att_layer = 0
        self._is_second_pass = False
        self.cur_step += 1
        self.between_steps()
        self.empty_step()

    def _look(self, attn: Tensor, is_cross: bool, place: str) -> None:
        """Call :meth:`forward` with the kept rows, and write its result back."""
        if place not in get_args(Place):
            self.note(f"a layer called it from place {place!r}, not {get_args(Place)}. {HOW}")
        chosen = self._kept_rows(len(attn))
        rows = attn if chosen == slice(0, len(attn)) else attn[chosen]
        # The kept rows are a view, so an edit reaches the whole tensor; a new tensor is written
        # into it.
        edited = self.forward(rows, is_cross, place)
        if edited is not None and edited is not rows:
            rows.copy_(edited)

    def _kept_rows(self, rows: int) -> slice:
        """Return the rows, batch times heads, that are not unconditional."""
        batch = self._batch if self._batch and rows % self._batch == 0 else None
        start = 0
        stop = batch or rows
        is_registered = self.attachment is None and self.num_att_layers > 0
        if self.guidance in ("auto", "batch") and self._prompts is not None and batch:
            start = self._prompts.start
            stop = self._prompts.stop
        # An odd batch has no halves, and heads are no images.
        elif stop % 2 == 0 and (
            self.guidance == "batch" or (self.guidance == "auto" and is_registered)
        ):
            start = stop // 2
            if self.guidance == "auto" and self._guess is None:
                self._guess = (
                    f"The {type(self).__name__} took the first half of {stop} rows for "
                    "unconditional, which it guessed. Say it: guidance='batch', or guidance=None "
                    "to keep every row."
                )
        self.images = stop - start if batch else None
        heads = rows // batch if batch else 1
        if self.attachment is not None:
            self.attachment.check_rows(self, rows, batch)
        return slice(start * heads, stop * heads)
