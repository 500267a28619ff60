"""Null-text optimisation against algorithm 1 of its paper."""

import copy

import pytest
import torch
from helpers.inversion_runs import (  # noqa: F401
    PROMPT,
    descend,
    inverted_image,
    strong_pipe,
    without_null_text,
)
from helpers.small_images import new_image

from sdattn.inversion.invert import invert
from sdattn.inversion.nulltext import _descend


def algorithm_1(pipe, inversion, inner_steps, learning_rate):
    """Mokady et al. 2022, algorithm 1, in float64: states, and (tried, their distances) a step."""
    unet = copy.deepcopy(pipe.unet).double().requires_grad_(False)
    text, null = (one.detach().double() for one in pipe.encode_prompt(PROMPT, "cpu", 1, True))
    betas = torch.linspace(1e-4**0.5, 0.02**0.5, 1000, dtype=torch.float64) ** 2
    alphas, n = (1 - betas).cumprod(0), inversion.num_inference_steps
    pivots = inversion.trajectory.double().flip(0)
    x, states, distances = pivots[:1], [], []
    for i in range(n):
        t = 1 + 1000 // n * (n - 1 - i)
        after = alphas[t - 1000 // n] if i < n - 1 else torch.tensor(1.0).double()
        with_text = unet(x, t, text).sample

        def land(state, x=x, t=t, after=after, with_text=with_text):
            eps = unet(x, t, state).sample
            eps = eps + inversion.guidance_scale * (with_text - eps)
            clean = (x - (1 - alphas[t]).sqrt() * eps) / alphas[t].sqrt()
            return after.sqrt() * clean + (1 - after).sqrt() * eps

        state, tried, far = null.clone().requires_grad_(), [], []
        adam = torch.optim.Adam([state], lr=learning_rate * (1 - i / (2 * n)))
        for _ in range(inner_steps + 1):
            loss = (land(state) - pivots[i + 1]).square().mean()
            tried, far = [*tried, state.detach().clone()], [*far, loss.item()]
            adam.zero_grad()
            loss.backward()
            adam.step()
        null = tried[far.index(min(far))]
        x = land(null)
        states.append(null)
        distances.append(far)
    return torch.cat(states), distances


@pytest.mark.slow
def test_null_text_stays_as_close_to_the_trajectory_as_algorithm_1(pipe, found):
    pivots = found.trajectory.flip(0)[1:]
    with_null, _ = descend(pipe, found)
    plain, _ = descend(pipe, without_null_text(found))
    near = (with_null[1:, 0] - pivots).square().mean((1, 2, 3))
    far = (plain[1:, 0] - pivots).square().mean((1, 2, 3))
    assert (near < far).all()
    assert near[-1] < 0.7 * far[-1]
    _, distances = algorithm_1(pipe, found, inner_steps=10, learning_rate=1e-2)
    assert near.tolist() == pytest.approx([min(one) for one in distances], rel=2e-3)
    assert found.null_states.shape == (4, 77, 32)
    assert found.null_states.dtype == torch.float32


@pytest.mark.slow
def test_each_step_starts_where_the_last_ended_at_a_lower_rate_and_keeps_its_best(pipe):
    """At a rate so large that Adam goes past the best state of the first step."""
    options = {"inner_steps": 5, "learning_rate": 5e-2}
    inversion = invert(pipe, new_image(), PROMPT, num_inference_steps=3, **options)
    states, (first, *_) = algorithm_1(pipe, inversion, **options)
    assert 0 < first.index(min(first)) < 5
    assert min(first) < 0.95 * first[-1]
    # Adam takes a whole step where a gradient is mere rounding: few values here, most in the last.
    apart = (inversion.null_states - states).abs().mean((1, 2))
    assert (apart[:2] < 1e-4).all()


def test_one_step_of_adam_moves_each_text_as_algorithm_1_does(pipe):
    options = {"inner_steps": 1, "learning_rate": 1e-2}
    inversion = invert(pipe, new_image(), PROMPT, num_inference_steps=2, **options)
    states, distances = algorithm_1(pipe, inversion, **options)
    assert all(after < before for before, after in distances)  # so the moved text is kept
    apart = (inversion.null_states - states).abs().mean((1, 2))
    # Of moves of 1e-2. Where a gradient is mere rounding, Adam takes a whole step: few values.
    assert (apart < 3e-4).all()


@pytest.mark.parametrize(
    ("rate", "steps", "nearest"),
    [(1.0, 3, 0.1), (0.09, 3, 0.01), (0.01, 0, 0.1), (0.01, 1, 0.09)],
)
def test_the_best_state_is_kept_be_it_the_first_or_the_last(rate, steps, nearest):
    """Adam's first step is as long as its rate; it goes past the target, far or near. Steps that
    only come nearer count to the last."""
    state = torch.full((1, 2, 3), 0.1)
    found = _descend(lambda one: one, torch.zeros(1, 2, 3), state, steps, rate)
    torch.testing.assert_close(found, torch.full((1, 2, 3), nearest), atol=1e-4, rtol=0)
    assert not found.requires_grad
