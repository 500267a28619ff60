"""How a controller counts calls and steps, and which rows it looks at."""

import pytest
import torch

from sdattn.hooks.step_controller import StepController


class Doubling(StepController):
    """It doubles the rows that it looks at, and notes the steps that ended."""

    def __init__(self, guidance, layers):
        self.ended = []
        super().__init__(None, guidance)
        self.num_att_layers = layers

    def forward(self, attn, is_cross, place_in_unet):
        return 2 * attn

    def between_steps(self):
        self.ended.append(self.cur_step)


@pytest.mark.parametrize(
    ("guidance", "calls"), [("batch", [3, 3]), (None, [3, 3]), ("passes", [6, 6])]
)
def test_a_step_ends_with_its_last_layer(guidance, calls):
    controller = Doubling(guidance, layers=3)
    for step, number in enumerate(calls):
        for _ in range(number):
            assert controller.ended == list(range(1, step + 1))
            controller(torch.ones(4, 2, 5), True, "up")
    assert (controller.ended, controller.cur_step, controller.cur_att_layer) == ([1, 2], 2, 0)


@pytest.mark.parametrize(
    ("guidance", "expected"),
    [("batch", [1, 1, 2, 2]), (None, [2, 2, 2, 2]), ("passes", [1, 1, 1, 1])],
)
def test_what_forward_returns_replaces_the_rows_that_it_was_shown(guidance, expected):
    probs = torch.ones(4, 2, 5)
    assert Doubling(guidance, layers=3)(probs, True, "up") is probs
    assert torch.equal(probs, torch.tensor(expected).float()[:, None, None].expand(4, 2, 5))


def test_a_controller_that_does_not_know_its_layers_is_refused():
    with pytest.raises(RuntimeError, match="does not know how many layers call"):
        Doubling("batch", layers=-1)(torch.ones(4, 2, 5), True, "up")
