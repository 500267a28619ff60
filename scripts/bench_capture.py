"""Time and memory of capture against no capture, on an SD 1.5-shaped UNet with random weights.

All variants run in turn, round by round, in one process, so that their ratios hold on a machine
whose speed drifts. "seeds' way" is what hand-written stores do: attention by bmm and softmax, and
every map of every step copied to the CPU.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

import sdattn
from sdattn.layers import find_layers


class Keep:
    """A controller that keeps every cross-attention map, as the seeds do."""

    def __init__(self) -> None:
        self.maps: list[torch.Tensor] = []

    def __call__(self, probs: torch.Tensor, is_cross: bool, place: str) -> None:
        if is_cross:
            self.maps.append(probs[len(probs) // 2 :].to("cpu", copy=True))

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.maps)


@contextmanager
def seeds_way(pipe: StableDiffusionPipeline):
    """Replace the processors of the cross-attention layers by ones that compute and keep."""
    keep = Keep()
    layers = [layer for layer in find_layers(pipe.unet) if layer.kind == "cross"]
    before = [layer.module.processor for layer in layers]
    for layer in layers:
        layer.module.set_processor(sdattn.TorchAttnProcessor(keep, layer.place))
    try:
        yield keep
    finally:
        for layer, processor in zip(layers, before, strict=True):
            layer.module.set_processor(processor)


@contextmanager
def nothing(pipe: StableDiffusionPipeline):
    yield None


VARIANTS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "none": nothing,
    "default": sdattn.capture,
    "three words": lambda pipe: sdattn.capture(pipe, tokens=[2, 3, 7]),
    "full detail": lambda pipe: sdattn.capture(pipe, steps="all", heads="all"),
    "seeds' way": seeds_way,
}
GROWING = ("full detail", "seeds' way")  # what they hold grows with the steps


def make_pipeline(device: str) -> StableDiffusionPipeline:
    """A pipeline in the middle of a guided run, as far as capture asks it: its UNet is called."""
    torch.manual_seed(0)
    parts = ("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    pipe = StableDiffusionPipeline(
        unet=UNet2DConditionModel(sample_size=64, cross_attention_dim=768).eval().to(device),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        **dict.fromkeys(parts),
        requires_safety_checker=False,
    )
    pipe._guidance_scale = 7.5
    pipe.scheduler.set_timesteps(50)
    return pipe


def record_layers(unet, inputs) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    """(layer, hidden states, text states) of each cross-attention layer in one call."""
    seen: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def keep(module, args, kwargs):
        seen.append((module, args[0].clone(), kwargs["encoder_hidden_states"]))

    layers = [layer.module for layer in find_layers(unet) if layer.kind == "cross"]
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    unet(*inputs)
    for hook in hooks:
        hook.remove()
    return seen


def clock(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(pipe, inputs, rounds: int, steps: int, repeats: int) -> dict[str, dict[str, Any]]:
    unet = pipe.unet
    calls = record_layers(unet, inputs)
    times = {name: {"unet": [], "layers": []} for name in VARIANTS}
    held = dict.fromkeys(VARIANTS, 0)

    def run_layers() -> None:
        for layer, hidden, text in calls:
            layer(hidden, encoder_hidden_states=text)

    for round_number in range(rounds + 1):
        names = list(VARIANTS)
        order = names[round_number % len(names) :] + names[: round_number % len(names)]
        for name in order:
            with VARIANTS[name](pipe) as store:
                whole = [clock(lambda: unet(*inputs)) for _ in range(steps)]
                if store is not None:
                    held[name] = store.nbytes // (steps if name in GROWING else 1)
                alone = [clock(run_layers) for _ in range(repeats)]
            if round_number:  # the first round warms up
                times[name]["unet"] += whole
                times[name]["layers"] += alone
    return {name: {**summary(times, name), "held": held[name]} for name in VARIANTS}


def summary(times: dict[str, dict[str, list[float]]], name: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for what in ("unet", "layers"):
        ratios = [a / b for a, b in zip(times[name][what], times["none"][what], strict=True)]
        out[what] = statistics.median(times[name][what])
        out[f"{what}_ratio"] = statistics.median(ratios)
        out[f"{what}_spread"] = [min(ratios), max(ratios)]
    return out


def processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    rounds, steps, repeats = (2, 1, 4) if options.quick else (8, 2, 12)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = make_pipeline(device)
    inputs = (
        torch.randn(2, 4, 64, 64, device=device),
        500,
        torch.randn(2, 77, 768, device=device),
    )
    found = measure(pipe, inputs, rounds, steps, repeats)
    machine = torch.cuda.get_device_name() if device == "cuda" else processor_name()
    print(f"SD 1.5 shape, 512x512, batch 2 (guided), float32, torch {torch.__version__}, {machine}")
    print("median seconds; ratio to none, pair by pair, with its range\n")
    print("| variant | whole UNet call | ratio | 16 cross layers | ratio | held after 50 steps |")
    print("|---|---|---|---|---|---|")
    for name, one in found.items():
        after_50 = one["held"] * (50 if name in GROWING else 1)
        print(
            f"| {name} | {one['unet']:.3f} s | {ratio(one, 'unet')} | {one['layers']:.4f} s "
            f"| {ratio(one, 'layers')} | {after_50 / 1e6:,.2f} MB |"
        )
    if options.out:
        options.out.write_text(json.dumps({"machine": machine, "variants": found}, indent=1))


def ratio(one: dict[str, Any], what: str) -> str:
    low, high = one[f"{what}_spread"]
    return f"{one[f'{what}_ratio']:.3f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
