"""Single attention layers with random weights, called on states of any size in passes of their
models: what `bench_growth` measures."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from time import thread_time
from typing import Any

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from torch import nn

from sdattn.keep.keep import Keep
from sdattn.models.denoiser import find_denoiser
from sdattn.models.denoiser_call import Size
from sdattn.models.layers import TEXT_KINDS


@dataclass(frozen=True)
class Shape:
    """What a layer is called for; ``frames`` is 0 for an image."""

    side: int = 512
    tokens: int = 77
    images: int = 1
    steps: int = 1
    frames: int = 0


class OneLayer:
    """A model in whose passes one attention layer runs, on random states, and nothing else.

    Args:
        model: the model, with this layer at its real width.
        name: the layer's name.
        widths: of the states that it is called with, and of the text's.
        size: the latent's size, as sdattn reads it from ``inputs``.
        inputs: arguments of the model's call.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        widths: tuple[int, int],
        size: Callable[[Shape], Size],
        inputs: Callable[[Shape, Size], dict[str, Any]],
    ):
        [self.layer] = [one for one in find_denoiser(model).layers if one.name == name]
        self.model, self.widths, self._size, self._inputs = model, widths, size, inputs

        @wraps(model.forward)
        def run_layer(*_: Any, **__: Any) -> None:
            before = thread_time()
            self.layer.module(*self.given)
            self.seconds = thread_time() - before

        model.forward = run_layer

    def prepare(self, shape: Shape) -> int:
        """Make the states and arguments of a call; return the number of the layer's queries."""
        size = self._size(shape)
        self.inputs = self._inputs(shape, size)
        cells = math.prod(self.layer.grid(size))
        states = torch.randn(shape.images, cells, self.widths[0])
        text = torch.randn(shape.images, shape.tokens, self.widths[1])
        self.given = [states] if self.layer.kind == "self" else [states, text]
        return cells

    def call(self) -> float:
        """Run a pass; return the thread's seconds in the layer."""
        self.model(**self.inputs)
        return self.seconds


def unet(name: str, width: int) -> OneLayer:
    """Return a layer of SD 1.5's two finest levels."""
    model = UNet2DConditionModel(
        block_out_channels=(320, 640),
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        layers_per_block=1,
        cross_attention_dim=768,
    )

    def inputs(shape: Shape, size: Size) -> dict[str, Any]:
        text = torch.randn(shape.images, shape.tokens, 768)
        sample = torch.randn(shape.images, 4, *size)
        return {"sample": sample, "timestep": 500, "encoder_hidden_states": text}

    return OneLayer(model, name, (width, 768), lambda s: (s.side // 8, s.side // 8), inputs)


def sd3() -> OneLayer:
    """Return a block's attention of Stable Diffusion 3."""
    heads = {"num_attention_heads": 24, "caption_projection_dim": 1536}
    model = SD3Transformer2DModel(num_layers=2, **heads)

    def inputs(shape: Shape, size: Size) -> dict[str, Any]:
        rows, cols = size
        pooled = torch.randn(shape.images, 2048)
        sample = torch.randn(shape.images, 16, 2 * rows, 2 * cols)
        return {**_transformer(shape, sample), "pooled_projections": pooled}

    name, widths = "transformer_blocks.0.attn", (1536, 1536)
    return OneLayer(model, name, widths, lambda s: (s.side // 16, s.side // 16), inputs)


def wan() -> OneLayer:
    """Return the cross-attention of Wan 2.1's 1.3B, at 480x832 pixels."""
    model = WanTransformer3DModel(num_attention_heads=12, num_layers=1, ffn_dim=1536)

    def inputs(shape: Shape, size: Size) -> dict[str, Any]:
        return _transformer(shape, torch.randn(shape.images, 16, size[0], 60, 104))

    return OneLayer(model, "blocks.0.attn2", (1536, 1536), _frames(30, 52), inputs)


def cogvideox() -> OneLayer:
    """Return the joint attention of CogVideoX 2B, at 256x384 pixels."""
    model = CogVideoXTransformer3DModel(num_layers=1)

    def inputs(shape: Shape, size: Size) -> dict[str, Any]:
        return _transformer(shape, torch.randn(shape.images, size[0], 16, 32, 48))

    return OneLayer(model, "transformer_blocks.0.attn1", (1920, 1920), _frames(16, 24), inputs)


def _frames(rows: int, cols: int) -> Callable[[Shape], Size]:
    return lambda shape: ((shape.frames - 1) // 4 + 1, rows, cols)


def _transformer(shape: Shape, sample: torch.Tensor) -> dict[str, Any]:
    text = torch.randn(shape.images, shape.tokens, 4096)
    timestep = torch.full((shape.images,), 500.0)
    return {"hidden_states": sample, "timestep": timestep, "encoder_hidden_states": text}


UP = "up_blocks.{}.attentions.0.transformer_blocks.0.{}"
LAYERS: dict[str, Callable[[], OneLayer]] = {
    "cross": lambda: unet(UP.format(1, "attn2"), 320),
    "self": lambda: unet(UP.format(0, "attn1"), 640),  # that refines a UNet's maps at 512x512
    "joint": sd3,
    "video, cross": wan,
    "video, joint": cogvideox,
}


def video_bytes() -> dict[str, int]:
    """Return the bytes that a capture of Wan 2.1's 14B holds of 81 frames of 720x1280."""
    with torch.device("meta"):
        model = WanTransformer3DModel()
    layers = [layer for layer in find_denoiser(model).layers if layer.kind in TEXT_KINDS]
    size = 21, 45, 80
    few, each = Keep.of(tokens=range(10)), Keep.of(steps="all", heads="all")
    return {
        "layers": len(layers),
        "cells": math.prod(size),
        "default": Keep.of().nbytes(layers, size, 512),
        "ten columns": few.nbytes(layers, size, 10),
        "ten columns, three frames": Keep.of(frames=[0, 10, 20]).nbytes(layers, size, 10),
        "each of 50 steps and 40 heads": each.nbytes(layers, size, 512, passes=50),
        "one matrix of cells by cells": 4 * math.prod(size) ** 2,
    }
