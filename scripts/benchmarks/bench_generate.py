"""What ``generate()`` adds to a transformer's time, in the same run with a plain pipeline.

An SD3 of two blocks of its real width, random weights, and the demo's text encoders: 1024x1024
(4,096 image tokens), four steps. CPU time of one thread, call by call in turn.

    python -m scripts.benchmarks.bench_generate --rounds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import torch
from diffusers import SD3Transformer2DModel

import sdattn
from sdattn.maps.presets import PRESETS, Preset

from .machine import processor_name

PROMPT = "a red circle on the left of a blue square"
# what the default of joint attention was before demos.evaluation.joint_search chose another
FORMER = replace(PRESETS["joint"], steps=(0.5, 1.0), depth=None, sharpen=5.0)


def pipeline(blocks: int, side: int) -> Any:
    """The demo's SD3 pipeline with a transformer as wide as SD3-medium's."""
    pipe: Any = sdattn.load_pipeline("demo-mmdit", device="cpu")
    own = pipe.transformer.config
    torch.manual_seed(0)
    pipe.transformer = SD3Transformer2DModel(
        sample_size=2 * side,
        num_layers=blocks,
        num_attention_heads=24,
        attention_head_dim=64,
        caption_projection_dim=1536,
        joint_attention_dim=own.joint_attention_dim,
        pooled_projection_dim=own.pooled_projection_dim,
        in_channels=own.in_channels,
        out_channels=own.out_channels,
        pos_embed_max_size=2 * side,
    ).eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Clock:
    """CPU time of a module's calls."""

    def __init__(self, module: torch.nn.Module):
        self.spent = self._began = 0.0
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._began = process_time()

    def _end(self, *_: object) -> None:
        self.spent += process_time() - self._began

    def of(self, call: Callable[[], object]) -> float:
        self.spent = 0.0
        call()
        return self.spent


def measure(pipe: Any, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each way's rounds, after a short run that is not counted."""
    pixels = 2 * options.side * pipe.vae_scale_factor
    settings: dict[str, Any] = {
        "num_inference_steps": options.steps,
        "guidance_scale": options.guidance,
        "max_sequence_length": 8,
        "height": pixels,
        "width": pixels,
    }
    pipe.vae.decode = lambda latents, **_: (torch.zeros(len(latents), 3, 8, 8),)  # not measured

    def maps(preset: str | Preset) -> Callable[[], object]:
        return lambda: sdattn.generate(pipe, PROMPT, preset=preset, **settings)

    ways: dict[str, Callable[[], object]] = {
        "plain pipeline": lambda: pipe(PROMPT, **settings),
        "default": maps("default"),
        "former default": maps(FORMER),
    }
    small = {"height": pixels // 8, "width": pixels // 8, "num_inference_steps": 1}
    sdattn.generate(pipe, PROMPT, **{**settings, **small})
    clock, times = Clock(pipe.transformer), defaultdict(list)
    for _ in range(options.rounds):
        for name, way in ways.items():
            if name not in options.without:
                times[name].append(clock.of(way))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--side", type=int, default=64, help="image tokens along a side")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--guidance", type=float, default=1.0, help="above 1 for two rows")
    parser.add_argument("--without", nargs="+", default=[], help="ways to leave out, by name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(pipeline(options.blocks, options.side), options)
    print(f"torch {torch.__version__}, {processor_name()}, float32, CPU time\n")
    about = f"{options.blocks} blocks, {options.side**2:,} image tokens, {options.steps} steps"
    print(f"| SD3, {about} | the transformer's time | ratio, median (range) |\n|---|---|---|")
    for name, spent in times.items():
        ratios = [a / b for a, b in zip(spent, times["plain pipeline"], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"| {name} | {statistics.median(spent):.2f} s | {spread} |")
    if options.out:
        options.out.write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
