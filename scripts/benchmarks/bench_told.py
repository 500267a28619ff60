"""The price of two facts: a capture by text= and grid= beside one by the family, and a dry run.

Each model runs as a family's and as one that no family claims: the demo's UNet, and joint
transformers in FLUX's manner of three sizes. All ways run in turn, round by round, in one process
and one thread; the ratios are of a run's second call.

    OMP_NUM_THREADS=1 python -m scripts.benchmarks.bench_told
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import sdattn
from sdattn.models import Family, register

from .machine import machine_name

# Of the joint models: width, heads, blocks, cells a side, tokens of the text
SIZES = ((192, 3, 24, 12, 78), (256, 4, 8, 24, 128), (384, 6, 4, 32, 256))


class Unclaimed(nn.Module):
    """A UNet in a module of no family."""

    def __init__(self, unet: Any):
        super().__init__()
        self.unet = unet

    def forward(self, latents: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        output: Tensor = self.unet(latents, timestep, context, return_dict=False)[0]
        return output


class JointProcessor:
    """Joins text and image, attends, and splits them again."""

    def __call__(self, attn: Any, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        parts = zip(attn.of_text(text).chunk(3, -1), attn.of_image(image).chunk(3, -1), strict=True)
        joined = [torch.cat(pair, dim=1).unflatten(-1, (attn.heads, -1)) for pair in parts]
        q, k, v = (states.transpose(1, 2) for states in joined)
        made = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return made[:, text.shape[1] :], made[:, : text.shape[1]]


class JointAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.processor = heads, JointProcessor()
        self.of_image, self.of_text = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def set_processor(self, processor: Any) -> None:
        self.processor = processor

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.processor(self, image, text)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attn = JointAttention(width, heads)
        self.of_image, self.of_text = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        more, words = self.attn(image, text)
        image, text = image + more, text + words
        return image + self.of_image(image), text + self.of_text(text)


class Joint(nn.Module):
    def __init__(self, width: int, heads: int, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor
    ) -> Tensor:
        image, text = hidden_states.flatten(2).mT, encoder_hidden_states
        for block in self.blocks:
            image, text = block(image, text)
        return image


class Claimed(Joint):
    """The same, of a family."""


FAMILY = Family(
    name="Joint",
    denoisers=(Claimed,),
    layers={"blocks.*.attn": ("double", "joint")},
    joined="text first",
    grid=lambda _model, given: given["hidden_states"].shape[-2:],
    patch=1,
)


def second_call(watch: Callable[[], Any], call: Callable[[], object]) -> float:
    """Return the CPU time of a run's second call, in seconds."""
    with watch():
        call()
        begun = process_time()
        call()
        return process_time() - begun


def once(call: Callable[[], object]) -> float:
    begun = process_time()
    call()
    return process_time() - begun


def demo() -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return a family's model, the one that no family claims, a call, and what is told."""
    unet = sdattn.load_pipeline("demo").unet
    side = unet.config.sample_size
    latents = torch.randn(2, unet.config.in_channels, side, side)
    call = latents, torch.tensor(500), torch.randn(2, 77, unet.config.cross_attention_dim)
    return unet, Unclaimed(unet), call, {"text": "context", "grid": (side, side)}


def joint(width: int, heads: int, blocks: int, side: int, length: int) -> tuple[Any, ...]:
    """Return the same of a joint model."""
    claimed, model = Claimed(width, heads, blocks).eval(), Joint(width, heads, blocks).eval()
    model.load_state_dict(claimed.state_dict())
    call = torch.randn(1, width, side, side), torch.tensor(1), torch.randn(1, length, width)
    return claimed, model, call, {"text": slice(0, length), "grid": (side, side)}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    register(FAMILY)
    print(f"torch {torch.__version__}, {machine_name('cpu')}, {rounds} rounds")
    measure("2 rows of the demo", *demo(), rounds)
    for size in SIZES:
        measure(
            "width {}, {} heads, {} blocks, side {}, text {}".format(*size), *joint(*size), rounds
        )


def measure(
    name: str, claimed: Any, model: Any, args: Any, told: dict[str, Any], rounds: int
) -> None:
    """Print what each way takes of a plain call, and two facts of what a family takes."""
    ways: dict[str, Callable[[], float]] = {
        "plain": lambda: second_call(nullcontext, lambda: model(*args)),
        "by family": lambda: second_call(lambda: sdattn.capture(claimed), lambda: run(*args)),
        "by two facts": lambda: second_call(
            lambda: sdattn.capture(model, **told), lambda: model(*args)
        ),
        "inspect_attention()": lambda: once(lambda: sdattn.inspect_attention(model, *args)),
    }
    run = claimed if isinstance(claimed, Claimed) else model
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        turn = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for way in turn:
            seconds = ways[way]()
            if number:
                times[way].append(seconds)
    print(f"{name}: plain {statistics.median(times['plain']) * 1000:.0f} ms")
    pairs = [(way, "plain") for way in list(ways)[1:]] + [("by two facts", "by family")]
    for mine, other in pairs:
        ratios = [one / two for one, two in zip(times[mine], times[other], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"  {mine}: {middle:.3f} of {other} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
