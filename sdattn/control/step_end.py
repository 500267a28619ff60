"""`StepEnd`: when a step of a store ends."""

from __future__ import annotations

from ..follow.pass_options import Guidance
from ..models.layers import PLACES

HOW = (
    "Call store.attach(pipe), once, and "
    "pipe.unet.set_attn_processor(sdattn.TorchAttnProcessor(store)), in either order; for a "
    "transformer pipe.transformer.set_attn_processor(sdattn.TorchJointProcessor(store))."
)
_PLACES = (*PLACES, "double", "single")  # in the order in which a pass reaches them


class StepEnd:
    """The end of a step: with a pass of the attached model, after ``num_att_layers`` calls, or
    never. A step of two passes, the negative prompt's first, ends with the second.

    Attributes:
        num_att_layers: calls per pass; -1 for a store that is alone, 0 for one that was detached.
        cur_att_layer: calls in the running step.
        is_second_pass: True between the two passes of a step of an attached model.
    """

    def __init__(self, guidance: Guidance | None):
        self.guidance = guidance
        self.num_att_layers = -1
        self._num_uncond = -1
        self.forget()

    def forget(self) -> None:
        """Forget the calls; a store that was detached is alone from now on."""
        self.num_att_layers = self.num_att_layers or -1
        self._place = 0  # of the last call, in the order in which a pass reaches places
        self._calls_in_pass = 0  # of a pass that ended inside a step
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.cur_att_layer = 0
        self.is_second_pass = False

    @property
    def num_uncond_att_layers(self) -> int:
        """Number of calls at the start of each step for the negative prompt, which are not kept."""
        if self._num_uncond >= 0:
            return self._num_uncond
        return max(self.num_att_layers, 0) if self.guidance == "passes" else 0

    @num_uncond_att_layers.setter
    def num_uncond_att_layers(self, calls: int) -> None:
        self._num_uncond = calls

    def reach(self, place: str) -> None:
        """Note the place of the next call, if no model tells where its passes end. A pass reaches
        places in order, so an earlier one is another pass's."""
        if place not in _PLACES:
            return
        number = _PLACES.index(place)
        n_calls = self.cur_att_layer
        n_uncond = self.num_uncond_att_layers
        if n_calls not in (0, n_uncond) and number < self._place and not self._calls_in_pass:
            self._calls_in_pass = n_calls - n_uncond if n_calls > n_uncond else n_calls
        self._place = number

    def skips_call(self, in_pass: bool) -> bool:
        """Check whether the next call is for the negative prompt; ``in_pass`` if a model tells
        where its passes end."""
        n_uncond = self.num_uncond_att_layers
        if in_pass:
            return n_uncond > 0 and not self.is_second_pass
        return self.cur_att_layer < n_uncond

    def ends_with_call(self, in_pass: bool) -> bool:
        """Count a call; return True if the step ends with it."""
        self.cur_att_layer += 1
        if in_pass or self.num_att_layers < 1:
            return False
        return self.cur_att_layer >= self.num_att_layers + self.num_uncond_att_layers

    def ends_with_pass(self, calls: int) -> bool:
        """Count a pass of the attached model; return True if the step ends with it."""
        self.num_att_layers = calls
        if self.num_uncond_att_layers and not self.is_second_pass:
            self.is_second_pass = True
            return False
        return True

    def open_step(self, steps: int) -> str:
        """Describe calls after so many finished ``steps`` that no step holds, or passes that share
        a step; "" if there are none."""
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
            held = steps * n_calls + n_open
            return (
                f"it holds {held} calls for {n_layers} layers, and counted {n_calls} calls as a "
                f"step, so that one step has the maps of several: attach it, or call "
                f"between_steps() after each pass. {HOW}"
            )
        return (
            f"it holds {n_open} calls for {n_calls} layers: its last step did not end. Attach it, "
            "or call between_steps() where the step ends; call reset() after a run that stopped."
        )
