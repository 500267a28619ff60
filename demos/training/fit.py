"""The training loop: one or more processes, or a GPU; checkpoints, running means of the weights."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .graphs import Graphs

# The part of each stage's steps before the learning rate falls
FLAT = {"decoder": 0.3, "text": 0.3, "unet": 0.78, "refine": 0.3, "mmdit": 0.5, "motion": 0.6}
CHECKPOINT_SECONDS = 180  # the most that an interruption can cost
CPU = torch.device("cpu")
TOGETHER = (
    8  # steps whose samples another process hands over at once; each handing over has a price
)


class Shown(Dataset[Any]):
    """What each step is shown, made where a loader asks for it."""

    def __init__(self, sample: Callable[[int], tuple[Any, ...]]) -> None:
        self.sample = sample

    def __getitem__(self, step: int) -> tuple[Any, ...]:
        return self.sample(step)


def the_step(step: int) -> tuple[int]:
    """Return what a step is shown whose loss draws its own sample."""
    return (step,)


@dataclass
class Fit:
    """One stage: what is trained, on which loss, for how long.

    ``loss`` is given what ``sample`` returns for the step. On a GPU that is made ahead by other
    processes and has to be tensors, whose shapes change at multiples of ``TOGETHER`` alone: a step
    is then a CUDA graph.

    ``flat`` is the part of the steps before the learning rate falls to nothing; ``lr`` has one
    rate for each of ``modules``. ``average`` holds running means of the weights of modules of the
    same name; ``memory`` is how much of them a step keeps.
    """

    name: str
    modules: dict[str, nn.Module]
    lr: tuple[float, ...]
    loss: Callable[..., Tensor]
    steps: int
    flat: float
    average: dict[str, nn.Module]
    watch: Callable[[int], None]
    memory: float = 0.999
    sample: Callable[[int], tuple[Any, ...]] = the_step
    device: torch.device = CPU

    def run(self, work: Path) -> None:
        """Train, or go on from the checkpoint in ``work``."""
        on_gpu = self.device.type == "cuda"
        groups = [
            {"params": list(module.parameters()), "lr": lr, "peak": lr}
            for module, lr in zip(self.modules.values(), self.lr, strict=True)
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        kept = work / f"{self.name}.pt"
        start, before = self.restore(kept, optimizer) if kept.exists() else (0, 0.0)
        for group in optimizer.param_groups:
            group["capturable"] = on_gpu
            group["lr"] = torch.tensor(group["peak"], device=self.device)
        share_weights([*self.modules.values(), *self.average.values()])
        step_of: Callable[..., Tensor] = partial(self.learn, optimizer)
        learn = Graphs(step_of) if on_gpu else step_of
        began = saved = time.time()
        losses: list[Tensor] = []
        for step, shown in enumerate(self.each_shown(start), start):
            for group in optimizer.param_groups:
                group["lr"].fill_(group["peak"] * rate(step, self.steps, self.flat))
            losses.append(learn(*shown))
            self.follow(step)
            done, now = step + 1, time.time()
            if done % 100 == 0:
                pace, loss = (now - began) / (done - start), torch.stack(losses[-100:]).mean()
                note(work, self.name, done, loss=loss.item(), seconds_a_step=pace)
            ended = done % self.every == 0 or done == self.steps
            if ended or now - saved > CHECKPOINT_SECONDS:
                self.keep(kept, done, before + now - began, optimizer)
                saved = now
            if ended:
                self.watch(done)

    @property
    def every(self) -> int:
        """Steps from one look at the model to the next."""
        return max(500, self.steps // 8)

    def each_shown(self, start: int) -> Iterator[Sequence[Any]]:
        """Yield what the steps from ``start`` on are shown, in their order."""
        if self.device.type == "cpu":
            yield from map(self.sample, range(start, self.steps))
            return
        firsts = range(start - start % TOGETHER, self.steps, TOGETHER)
        blocks = [range(max(a, start), min(a + TOGETHER, self.steps)) for a in firsts]
        loader = DataLoader(
            Shown(self.sample),
            batch_sampler=blocks,
            num_workers=max(1, (os.cpu_count() or 1) - 2),
            multiprocessing_context="fork",
        )
        for block in loader:
            yield from zip(*(one.to(self.device) for one in block), strict=True)

    def learn(self, optimizer: torch.optim.Optimizer, *shown: Any) -> Tensor:
        """One step of all processes together; returns this one's loss."""
        loss = self.loss(*shown)
        optimizer.zero_grad()
        loss.backward()
        share_gradients(self.modules)
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        optimizer.step()
        return loss.detach()

    @cached_property
    def followed(self) -> tuple[list[Tensor], list[Tensor]]:
        """The running means and the weights that they follow."""
        slow = [weight for mean in self.average.values() for weight in mean.parameters()]
        return slow, [w for name in self.average for w in self.modules[name].parameters()]

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move the running means of the weights; they forget faster in the beginning."""
        slow, fast = self.followed
        if slow:
            torch._foreach_lerp_(slow, fast, 1 - min(self.memory, (1 + step) / (10 + step)))

    def keep(self, path: Path, step: int, seconds: float, optimizer: torch.optim.Optimizer) -> None:
        """Write the checkpoint, whole or not at all."""
        if rank() == 0:
            state = {name: module.state_dict() for name, module in self.modules.items()}
            mean = {name: module.state_dict() for name, module in self.average.items()}
            done = {"step": step, "seconds": seconds, "state": state, "mean": mean}
            torch.save({**done, "optimizer": optimizer.state_dict()}, f"{path}.new")
            os.replace(f"{path}.new", path)

    def restore(self, path: Path, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
        """Load a checkpoint; returns the steps and the seconds that it has behind it."""
        kept = torch.load(path, map_location="cpu")  # it may come from a machine with a GPU
        for name, module in self.modules.items():
            module.load_state_dict(kept["state"][name])
        for name, module in self.average.items():
            module.load_state_dict(kept["mean"][name])
        peaks = [group["peak"] for group in optimizer.param_groups]
        optimizer.load_state_dict(kept["optimizer"])
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["peak"] = peak
        return kept["step"], kept["seconds"]


def rate(step: int, steps: int, flat: float) -> float:
    """Learning rate as a part of its peak: a short rise, flat, then a cosine down to 0."""
    left = (step / steps - flat) / (1 - flat)
    fall = 0.5 + 0.5 * math.cos(math.pi * min(max(left, 0.0), 1.0))
    return min(1.0, (step + 1) / 200) * fall


def rank() -> int:
    """Which of the training processes this is."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many training processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def note(work: Path, stage: str, step: int, **figures: float) -> None:
    """Print figures of a step, and add them to ``curve.jsonl`` in ``work``."""
    if rank() == 0:
        row = {"stage": stage, "step": step}
        row |= {name: float(f"{value:.5g}") for name, value in figures.items()}
        with (work / "curve.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    said = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
    say(f"{stage:8}{step:6}  {said}")


def say(text: str) -> None:
    """Print once, whatever the number of processes."""
    if rank() == 0:
        print(text, flush=True)


def share_weights(modules: list[nn.Module]) -> None:
    """Give all processes the weights of the first: gradients are shared, which means nothing
    between networks that began apart."""
    if world() > 1:
        for module in modules:
            for value in module.state_dict().values():
                dist.broadcast(value, 0)


def share_gradients(modules: dict[str, nn.Module]) -> None:
    """Average the gradients over the processes.

    One process with one thread a core beats one process with many threads: a miniature's
    operations are too small to be worth splitting.
    """
    if world() > 1:
        params = [p for module in modules.values() for p in module.parameters()]
        grads = [p.grad for p in params if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= world()
        parts = flat.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


def pick(step: int, seed: int, samples: Tensor, batch: int) -> tuple[np.random.Generator, Tensor]:
    """A step's own source of chance, and which of ``samples`` this process takes."""
    rng = np.random.default_rng((seed, step, rank()))
    torch.manual_seed(int(rng.integers(2**62)))
    return rng, samples[torch.from_numpy(rng.integers(len(samples), size=batch // world()))]
