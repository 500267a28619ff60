"""How near inversions along a flow come back to the image: Euler's steps and RF-Solver's.

    reconstructions(pipe, asked)    a table, a line each solver

Up and down are written out here, with the model called by itself; what sdattn.edit.invert does is
"Euler, refined once".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdattn.edit import psnr
from sdattn.inversion.images import encode
from sdattn.inversion.schedules import Flow
from sdattn.models.demos import demo_settings

from .images import Asked, composed, said

Velocity = Callable[[Tensor, float], Tensor]
Step = Callable[[Velocity, Tensor, float, float], Tensor]  # latents, from sigma, to sigma


def euler(velocity: Velocity, x: Tensor, start: float, end: float) -> Tensor:
    return x + (end - start) * velocity(x, start)


def backwards(refinements: int) -> Step:
    """Euler's step down from ``end`` to ``start``, undone: with the velocity at its own end, which
    is guessed and refined so often."""

    def step(velocity: Velocity, x: Tensor, start: float, end: float) -> Tensor:
        guess = x
        for _ in range(refinements + 1):
            guess = x + (end - start) * velocity(guess, end)
        return guess

    return step


def rf_solver(velocity: Velocity, x: Tensor, start: float, end: float) -> Tensor:
    """Second order by the derivative of the velocity half a step on (Wang et al. 2024,
    arXiv:2411.04746, eq. 8 to 10), up and down alike."""
    half, here = (end - start) / 2, velocity(x, start)
    derivative = (velocity(x + half * here, start + half) - here) / half
    return x + (end - start) * here + (end - start) ** 2 / 2 * derivative


SOLVERS: tuple[tuple[str, int, Step, Step], ...] = (  # steps, up, down
    ("Euler forwards", 20, euler, euler),
    ("Euler backwards", 30, backwards(0), euler),
    ("Euler backwards, refined once", 20, backwards(1), euler),
    ("Euler backwards, refined three times", 20, backwards(3), euler),
    ("RF-Solver", 15, rf_solver, rf_solver),
    ("RF-Solver", 20, rf_solver, rf_solver),
)


@torch.no_grad()
def reconstructions(pipe: Any, asked: Sequence[Asked]) -> str:
    """A table in Markdown: by solver the passes up and down, the PSNR of the images that come
    back, and of their latents against a range of 1, decibels."""
    images, latents = composed(pipe, asked), encode(pipe, composed(pipe, asked))
    prompts, length = said(asked), demo_settings(pipe)["max_sequence_length"]
    text, _, pooled, _ = pipe.encode_prompt(
        prompts, prompts, prompts, do_classifier_free_guidance=False, max_sequence_length=length
    )
    passes = 0

    def velocity(x: Tensor, sigma: float) -> Tensor:
        nonlocal passes
        passes += 1
        times = torch.full((len(x),), sigma * pipe.scheduler.config.num_train_timesteps)
        found: Tensor = pipe.transformer(x, text, pooled, times, return_dict=False)[0]
        return found

    def near(x: Tensor) -> str:
        made = pipe.vae.decode(x / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor)
        drawn = pipe.image_processor.postprocess(made.sample)
        return f"{np.mean([psnr(a, b) for a, b in zip(images, drawn, strict=True)]):.2f}"

    lines = ["| | steps | passes up | down | images | latents |", "|---|---|---|---|---|---|"]
    lines.append(f"| the autoencoder alone | | | | {near(latents)} | |")
    for name, steps, up, down in SOLVERS:
        sigmas, x, passes = _sigmas(pipe, steps), latents, 0
        for start, end in pairwise(sigmas[::-1]):
            x = up(velocity, x, start, end)
        counted = passes
        for start, end in pairwise(sigmas):
            x = down(velocity, x, start, end)
        far = -10 * float(((x - latents) ** 2).mean().log10())
        cells = (name, steps, counted, passes - counted, near(x), f"{far:.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _sigmas(pipe: Any, steps: int) -> list[float]:
    """Of the pipeline's own schedule, from 1 to 0."""
    scheduler = Flow(pipe).down()
    scheduler.set_timesteps(steps)
    return [float(sigma) for sigma in scheduler.sigmas]
