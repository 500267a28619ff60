"""Where explain() should look: the means that are compared are those of explain(), and the solvers
are those of their papers."""

import math

import pytest
import torch

from scripts.evaluation.solvers import SOLVERS, euler, rf_solver

pytestmark = pytest.mark.slow


def falling(x, sigma):
    """dx/dsigma = -x sigma, whose solution is x exp(-sigma^2 / 2)."""
    return -x * sigma


@pytest.mark.parametrize(("step", "order"), [(euler, 1), (rf_solver, 2)])
def test_solvers_have_the_order_that_they_are_said_to_have(step, order):
    errors = []
    for steps in (20, 40):
        x = torch.ones((), dtype=torch.float64)
        for i in range(steps):
            x = step(falling, x, i / steps, (i + 1) / steps)
        errors.append(abs(float(x) - math.exp(-0.5)))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.15)


def test_a_step_backwards_undoes_the_step_down():
    (up,) = [up for name, _, up, _ in SOLVERS if name.endswith("three times")]
    x = torch.tensor(0.7, dtype=torch.float64)
    down = euler(falling, x, 0.5, 0.45)
    assert float(up(falling, down, 0.45, 0.5)) == pytest.approx(0.7, abs=1e-5)
