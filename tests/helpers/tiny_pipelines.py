"""Tiny pipelines of the real classes and their parts, with random weights.

tiny("FluxImg2ImgPipeline")                         a pipeline
tiny("WanPipeline", expand_timesteps=True)          with another part or setting of the pipeline
tiny("FluxPipeline", vae={"latent_channels": 8})    with another setting of a part
tiny("FluxPipeline", num_layers=3)                  with another setting of its denoiser
"""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

from helpers.newer import newer
from helpers.tiny_encoders import tiny_text_encoder as tiny_text_encoder
from helpers.tiny_parts import PARTS, SDXL_UNET, SMALL_UNET
from helpers.tiny_parts import make_scheduler as make_scheduler
from helpers.tiny_tokenizers import tiny_tokenizer

DENOISERS = ("transformer", "unet")
# By class, and by "Transformer" and "Autoencoder" those that each of these takes if it knows them.
# Text encoders are 16 wide, CLIP and T5 32.
SIZES = json.loads(Path(__file__).with_suffix(".json").read_text())
# Weights that without training are zeros, ones or anything, which would hide them.
LEARNT = {
    "ErnieImageTransformer2DModel": r"adaLN_modulation\.\d+\.weight|final_linear\.weight",
    "Kandinsky5Transformer3DModel": r"modulation|_norm\.weight",
    "MochiTransformer3DModel": r"^pos_frequencies$",
    "ZImageTransformer2DModel": r"^(x|cap)_pad_token$",
}
# Models whose norms of queries and keys stay ones, so that attention is nearly even
EVEN = (
    "CogVideoXTransformer3DModel",
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "LTXVideoTransformer3DModel",
    "LTX2VideoTransformer3DModel",
    "PixArtTransformer2DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
)


def tiny_model(kind: Any, seed: int | None = 0, **changes: Any) -> Any:
    """A model of a class, or of its name, as small as it can be; without a seed its weights are
    those that come after the last model's."""
    kind = newer(kind) if isinstance(kind, str) else kind
    if seed is not None:
        torch.manual_seed(seed)
    known = inspect.signature(kind).parameters
    groups = {"Transformer": "Transformer", "DiT": "Transformer", "Autoencoder": "Autoencoder"}
    shared = next((SIZES[group] for part, group in groups.items() if part in kind.__name__), {})
    sizes = {name: size for name, size in shared.items() if name in known}
    model = kind(**{**sizes, **SIZES.get(kind.__name__, {}), **changes}).eval()
    learnt = LEARNT.get(kind.__name__)
    for name, weight in model.named_parameters():
        if learnt and re.search(learnt, name):
            torch.nn.init.normal_(weight)
    return model if kind.__name__ in EVEN else own_norms(model)


def own_norms(model: Any) -> Any:
    """Give the norms of queries and keys weights of their own, which a training would."""
    generator = torch.Generator().manual_seed(4)
    for name, weight in model.named_parameters():
        if ".norm_q." in name or ".norm_k." in name or ".norm_added_" in name:
            weight.data = 8 * torch.rand(weight.shape, generator=generator)
    return model


def tiny(kind: Any, **changes: Any) -> Any:
    """A pipeline of a class, or of its name. ``changes`` are parts, a part's settings in a dict,
    and settings of the denoiser; parts that nobody needs are None."""
    kind = newer(kind) if isinstance(kind, str) else kind
    known = inspect.signature(kind, eval_str=True).parameters
    recipe = recipe_of(kind)
    wanted = {
        name: parameter.annotation
        for name, parameter in known.items()
        if name in ("transformer", *changes, *recipe) or parameter.default is parameter.empty
    }
    parts = made(wanted, recipe, changes)
    if "requires_safety_checker" in known:
        parts["requires_safety_checker"] = False
    pipe = kind(**parts)
    for name, value in recipe.items():
        if name not in known:
            setattr(pipe, name, value)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_blocks(blocks: str, *without: str, **changes: Any) -> Any:
    """The pipeline of an automatic sequence of blocks, without some of them."""
    sequence = newer(blocks)()
    for name in without:
        sequence.sub_blocks.pop(name, None)
    pipe = sequence.init_pipeline()
    recipe = recipe_of(type(pipe))
    hints = {spec.name: spec.type_hint for spec in pipe.blocks.expected_components}
    parts = made(hints, recipe, changes)
    pipe.update_components(**{name: part for name, part in parts.items() if part is not None})
    return pipe


def recipe_of(kind: type) -> dict[str, Any]:
    """What makes the parts of a class, by the longest beginning of its name or its base's."""
    for cls in kind.__mro__:
        names = [name for name in PARTS if cls.__name__.startswith(name)]
        if names and "Pipeline" in cls.__name__:
            return PARTS[max(names, key=len)]
    return {}


def made(hints: dict[str, Any], recipe: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Parts by name, of the classes that ``hints`` names: the denoiser and the VAE first."""
    order = (*DENOISERS, "vae", *hints)
    own = {name: value for name, value in changes.items() if name not in (*hints, *DENOISERS)}
    torch.manual_seed(1)
    parts = {}
    for name in sorted(hints, key=order.index):
        known, change = recipe.get(name, {}), changes.get(name, {})
        if name in changes and not isinstance(change, dict):
            parts[name] = change
        elif callable(known):
            parts[name] = known()
        else:
            kinds = [kind for kind in (hints[name], *get_args(hints[name])) if is_sized(kind)]
            seed = 1 if AutoencoderKL in kinds else None
            if name in DENOISERS:
                seed = 0
            settings = {**known, **change, **(own if name in DENOISERS else {})}
            parts[name] = tiny_model(kinds[0], seed, **settings) if kinds else None
    return parts


def is_sized(kind: Any) -> bool:
    return getattr(kind, "__name__", "") in SIZES


def make_unet(**changes: Any) -> UNet2DConditionModel:
    return tiny_model(UNet2DConditionModel, **changes)


def make_small_unet(**changes: Any) -> UNet2DConditionModel:
    """One of few layers, for what takes long in each."""
    return make_unet(**{**SMALL_UNET, **changes})


def make_sdxl_unet(**changes: Any) -> UNet2DConditionModel:
    return make_unet(**{**SDXL_UNET, **changes})


def make_sd15_unet() -> UNet2DConditionModel:
    """SD 1.5's own configuration, which is diffusers' default, at a fifth of its width."""
    return make_unet(
        sample_size=64,
        block_out_channels=(64, 128, 256, 256),
        attention_head_dim=8,
        cross_attention_dim=768,
        norm_num_groups=32,
    )


def make_vae(**changes: Any) -> AutoencoderKL:
    return tiny_model(AutoencoderKL, 1, **changes)


def make_pipeline(kind: Any = "StableDiffusionPipeline", max_length: int = 77, **parts: Any) -> Any:
    if max_length != 77:
        parts["text_encoder"] = tiny_text_encoder(max_length=max_length)
        parts["tokenizer"] = tiny_tokenizer(max_length)
    return tiny(kind, **parts)


def small_pipeline(kind: Any = "StableDiffusionPipeline", **parts: Any) -> Any:
    """A pipeline whose UNet has few layers, for what does not depend on them: it takes a third of
    the time. The matrix's rows of SD 1.x and 2.x have all blocks."""
    return make_pipeline(kind, **{"unet": SMALL_UNET, **parts})


def make_sdxl_pipeline(kind: Any = "StableDiffusionXLPipeline", **parts: Any) -> Any:
    return tiny(kind, **parts)


def by_default(kind: str) -> Callable[..., Any]:
    """A function that makes pipelines of this class, or of another of its kin."""

    def make(other: Any = kind, **changes: Any) -> Any:
        return tiny(other, **changes)

    return make
