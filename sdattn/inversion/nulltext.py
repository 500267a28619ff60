"""Null-text optimisation: unconditional text states that lead back to an image under guidance.

Source: Mokady et al. 2022, "Null-text Inversion", section 3.2 and algorithm 1;
google/prompt-to-prompt for the optimiser's settings.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..attention.calls import Rows
from ..errors import OptionError
from ..models.guidance import Branch, branch_order, branch_rows
from ..models.pipeline import Model, Pipeline
from ..models.pipeline_call import named_bar
from .schedules import DDIM
from .stand_ins import Kwargs, in_place

# The paper's code starts here and grows to 1e-3, which stops the last steps short of the image.
ENOUGH = 1e-5

Landing = Callable[[Tensor], Tensor]


def optimise(
    pipe: Pipeline,
    prompt: str,
    trajectory: Tensor,
    options: Kwargs,
    inner_steps: int,
    learning_rate: float,
) -> Tensor:
    """Run algorithm 1 inside one guided run; return float32 ``[steps, T, width]``.

    Before each UNet call the unconditional state is moved until the step lands on the trajectory.
    """
    states: list[Tensor] = []

    def before_pass(unet: Model, args: tuple[Any, ...], kwargs: Kwargs) -> object:
        text = kwargs["encoder_hidden_states"]
        target = trajectory[-2 - len(states)]
        rows = guided_rows(pipe, len(text))
        # Each step starts with the state of the previous one, as in the paper.
        state = states[-1] if states else text[rows["unconditional"]].float()
        done = len(states) / (len(trajectory) - 1)
        rate = learning_rate * (1 - done / 2)  # at 50 steps 1 - i/100, as in the paper's code
        with torch.enable_grad():
            landing = _landing(pipe, unet, args, kwargs, rows)
            states.append(_descend(landing, target.float(), state, inner_steps, rate))
        text = replaced_rows(text, rows["unconditional"], states[-1])
        return args, {**kwargs, "encoder_hidden_states": text}

    with ExitStack() as undo:
        undo.enter_context(named_bar(pipe, "null-text"))
        undo.enter_context(in_place(pipe, DDIM(pipe).down(), before_pass))
        undo.enter_context(frozen(pipe.unet))
        pipe.__call__(prompt, output_type="latent", **options)
    return torch.cat(states)


def _landing(
    pipe: Pipeline, unet: Model, args: tuple[Any, ...], kwargs: Kwargs, rows: dict[Branch, slice]
) -> Landing:
    """Return the landing point of the guided step, float32, as a function of unconditional text."""
    latents, timestep = args

    def predict(branch: Branch, **changed: Tensor) -> Tensor:  # forward() skips the hooks
        mine = {**rows_of(kwargs, rows[branch], len(latents)), **changed}
        return unet.forward(latents[rows[branch]], timestep, **mine)[0].float()

    start = latents[rows["unconditional"]].float()
    conditional = predict("conditional")

    def landing(state: Tensor) -> Tensor:
        output = predict("unconditional", encoder_hidden_states=state.to(latents.dtype))
        output = output + pipe.guidance_scale * (conditional - output)
        return pipe.scheduler.step(output, timestep, start).prev_sample

    return landing


def _descend(landing: Landing, target: Tensor, state: Tensor, steps: int, rate: float) -> Tensor:
    """Return Adam's best state; stop early at a mean squared error below ENOUGH."""
    state = state.clone().requires_grad_()
    adam = torch.optim.Adam([state], lr=rate)
    best = state.detach().clone()
    least = math.inf
    for step in range(steps + 1):
        squares = (landing(state) - target) ** 2
        loss = float(squares.detach().mean())
        if loss < least:
            best = state.detach().clone()
            least = loss
        if loss < ENOUGH or step == steps:
            break
        adam.zero_grad()
        squares.sum().backward()  # Adam is scale-free, and in float16 a mean's gradient is 0
        adam.step()
    return best


def guided_rows(pipe: Pipeline, batch: int) -> dict[Branch, slice]:
    rows = branch_rows(branch_order(pipe), batch)
    if "unconditional" not in rows:
        text = (
            "this run has no unconditional rows for the null-text states. Pass a scale above 1; a "
            "distilled model takes no guidance."
        )
        raise OptionError("guidance_scale", pipe.guidance_scale, text)
    return rows


@contextmanager
def frozen(model: Model) -> Iterator[None]:
    """Take no gradients of a model's weights inside the block, which saves their memory."""
    with ExitStack() as undo:
        for weight in model.parameters():
            undo.callback(weight.requires_grad_, weight.requires_grad)
            weight.requires_grad_(False)
        yield


def rows_of(value: Any, rows: Rows, batch: int) -> Any:
    """Return some rows of each tensor in a call's arguments that has a row for each of its batch;
    dictionaries are looked into, and anything else stays."""
    if isinstance(value, dict):
        return {name: rows_of(held, rows, batch) for name, held in value.items()}
    has_rows = isinstance(value, Tensor) and value.ndim > 0 and len(value) == batch
    return value[rows] if has_rows else value


def replaced_rows(text: Tensor, rows: slice, state: Tensor) -> Tensor:
    text = text.clone()  # [B, T, width]; the other rows stay as they are, bit for bit
    text[rows] = state.to(text)
    return text
