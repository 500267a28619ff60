"""Harm to files of weights: a LoRA and a single file that are not whole are refused by name."""

import math
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

import sdattn
from sdattn.models.demos import DEMO

from . import World, kind

Tensors = dict[str, torch.Tensor]
# Of a checkpoint's two models, of which a few tensors are all there is
PLACES = (
    "model.diffusion_model.input_blocks.{}.0.weight",
    "model.diffusion_model.output_blocks.{}.1.transformer_blocks.0.attn2.to_k.weight",
    "cond_stage_model.transformer.text_model.encoder.layers.{}.mlp.fc1.weight",
    "first_stage_model.encoder.down.{}.block.0.conv1.weight",
    "{}",
)
NUMBERS = ("0", "1", "-1", "300000000", "9" * 5000, "", "a\0b", "🙂", "(a+)+$", "state_dict")
DTYPES = (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64)


def lost(tensors: Tensors, name: str, chance: random.Random) -> None:
    del tensors[name]


def reshaped(tensors: Tensors, name: str, chance: random.Random) -> None:
    side = [chance.choice((0, 1, 2, 7)) for _ in range(chance.randrange(4))]
    tensors[name] = torch.ones(side)


def not_finite(tensors: Tensors, name: str, chance: random.Random) -> None:
    held = tensors[name].clone()
    held.view(-1)[chance.randrange(held.numel())] = chance.choice((math.nan, math.inf, -math.inf))
    tensors[name] = held


def renamed(tensors: Tensors, name: str, chance: random.Random) -> None:
    letters = list(name)
    letters[chance.randrange(len(letters))] = chance.choice("9z\0🙂 (")
    if (other := "".join(letters)) != name:
        tensors[other] = tensors.pop(name)
    else:
        del tensors[name]


HARMS: tuple[Callable[[Tensors, str, random.Random], None], ...] = (
    *(lost, reshaped, not_finite, renamed),
)


@cache
def _projections() -> dict[str, torch.Size]:
    """Return the demo's cross-attention projections of queries, with their shapes."""
    [file] = (DEMO / "unet").glob("*.safetensors")
    weights = load_file(file).items()
    return {name: held.shape for name, held in weights if name.endswith("attn2.to_q.weight")}


def whole_lora() -> Tensors:
    """Return a LoRA of rank 2 for these projections."""
    tensors: Tensors = {}
    for name, (rows, cols) in _projections().items():
        layer = f"unet.{name.removesuffix('.weight')}"
        tensors[f"{layer}.lora_A.weight"] = torch.ones(2, cols)
        tensors[f"{layer}.lora_B.weight"] = torch.ones(rows, 2)
    return tensors


@kind("a broken LoRA", 5)
def broken_lora(world: World, chance: random.Random) -> str | None:
    """One matrix is lost, has another shape, value or name; or the file's end is cut off."""
    tensors = whole_lora()
    harm, name = chance.choice(HARMS), chance.choice(sorted(tensors))
    harm(tensors, name, chance)
    data, told = save(tensors), f"{name} {harm.__name__}"
    if chance.random() < 0.2:
        data, told = data[: chance.randrange(len(data))], f"{told}, cut off"
    return _refused(world, data, told, lambda path: {"model": "demo", "lora": path})


@kind("a broken single file", 5)
def broken_single_file(world: World, chance: random.Random) -> str | None:
    """A few tensors of a checkpoint, of odd names and shapes; some bytes of it may be others."""
    tensors: Tensors = {}
    for _ in range(chance.randrange(1, 6)):
        name = chance.choice(PLACES).format(chance.choice(NUMBERS))
        side = [chance.choice((0, 1, 4, 9)) for _ in range(chance.randrange(5))]
        tensors[name] = torch.ones(side, dtype=chance.choice(DTYPES))
    data = bytearray(save(tensors))
    told = f"{[name[:60] for name in tensors]}"
    for _ in range(chance.choice((0, 0, 1, 9))):
        data[chance.randrange(len(data))] = chance.randrange(256)
    config = chance.choice((None, DEMO))
    return _refused(world, bytes(data), told, lambda path: {"model": path, "config": config})


def _refused(
    world: World, data: bytes, told: str, asked: Callable[[Path], dict[str, Any]]
) -> str | None:
    path = world.new_folder() / "harmed.safetensors"
    path.write_bytes(data)
    try:
        sdattn.load_pipeline(**asked(path), device="cpu")
    except sdattn.SdattnError as error:
        named = path.name in str(error)
        return None if named else f"{told} was refused without the file's name: {error}"
    except Exception as error:  # any other is what is looked for
        return f"{told} ended in {type(error).__name__}: {error}"
    finally:
        path.unlink()
    return f"{told} was let in"
