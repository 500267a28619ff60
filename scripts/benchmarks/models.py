"""Models of real shapes with random weights, each in the middle of a guided run of its pipeline.

As far as capture asks it: the pipeline's schedule is set and its model is called, on a batch of
which one half is the negative prompt's.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import Tensor

from sdattn import load_pipeline

STEPS = 50


@dataclass(frozen=True)
class Bench:
    """A model to be called.

    Attributes:
        about: what it is, for a table.
        pipe: the pipeline.
        model: its UNet or transformer.
        inputs: the keyword arguments of a call.
    """

    about: str
    pipe: Any
    model: Any
    inputs: dict[str, Any]

    def call(self) -> None:
        self.model(**self.inputs)

    def copy(self) -> "Bench":
        """Another pipeline and model, of the same weights."""
        weights = {id(one): one for one in (*self.model.parameters(), *self.model.buffers())}
        pipe = deepcopy(self.pipe, weights)
        return replace(self, pipe=pipe, model=_denoiser(pipe))


def make_bench(name: str, images: int, device: str, dtype: torch.dtype, whole: bool) -> Bench:
    """One of ``BENCHES``.

    Args:
        name: of it.
        images: the batch has twice as many rows.
        device, dtype: of weights and inputs.
        whole: all layers; else, of SDXL, SD3 and FLUX, one or two of each shape, which are enough
            to time layers and fit into a small machine.
    """
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # billions of weights are made where they stay, as they stay
    try:
        with torch.device(device):
            pipe, inputs, about = BENCHES[name](2 * images, whole)
    finally:
        torch.set_default_dtype(before)
    model = _denoiser(pipe)
    model.eval().to(device, dtype)
    pipe.scheduler.set_timesteps(STEPS)
    inputs = {key: _moved(one, device, dtype) for key, one in inputs.items()}
    return Bench(f"{about}, batch {2 * images}", pipe, model, inputs)


def _denoiser(pipe: Any) -> Any:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def _moved(value: Any, device: str, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {key: _moved(one, device, dtype) for key, one in value.items()}
    return value.to(device, dtype) if isinstance(value, Tensor) else value


def _sd15(
    widths: tuple[int, ...], about: str, rows: int, _whole: bool
) -> tuple[Any, dict[str, Any], str]:
    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, block_out_channels=widths)
    return stable_diffusion(unet), _unet_inputs(rows, 64, 768), about


def _demo(rows: int, _whole: bool) -> tuple[Any, dict[str, Any], str]:
    pipe = load_pipeline("demo", device="cpu")
    config, tokens = pipe.unet.config, pipe.tokenizer.model_max_length
    inputs = _unet_inputs(rows, 16, config.cross_attention_dim, tokens, config.in_channels)
    return pipe, inputs, "the demo model, 128x128"


def stable_diffusion(unet: Any) -> StableDiffusionPipeline:
    parts = ("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    scheduler = DDIMScheduler(steps_offset=1, clip_sample=False)
    return StableDiffusionPipeline(
        unet=unet, scheduler=scheduler, **dict.fromkeys(parts), requires_safety_checker=False
    )


def _unet_inputs(
    rows: int, side: int, width: int, tokens: int = 77, channels: int = 4
) -> dict[str, Any]:
    states = torch.randn(rows, tokens, width)
    sample = torch.randn(rows, channels, side, side)
    return {"sample": sample, "timestep": 500, "encoder_hidden_states": states}


def _sdxl(rows: int, whole: bool) -> tuple[Any, dict[str, Any], str]:
    depths = (1, 2, 10) if whole else (1, 1, 1)
    unet = UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=depths,
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    pipe = StableDiffusionXLPipeline(
        unet=unet,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        **dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")),
        add_watermarker=False,
    )
    added = {"text_embeds": torch.randn(rows, 1280), "time_ids": torch.ones(rows, 6)}
    inputs = {**_unet_inputs(rows, 128, 2048), "added_cond_kwargs": added}
    return pipe, inputs, "SDXL, 1024x1024" + ("" if whole else ", one layer of each block")


def _sd3(rows: int, whole: bool) -> tuple[Any, dict[str, Any], str]:
    transformer = SD3Transformer2DModel(
        sample_size=128,
        num_layers=24 if whole else 2,
        num_attention_heads=24,
        attention_head_dim=64,
        caption_projection_dim=1536,
        joint_attention_dim=4096,
        pooled_projection_dim=2048,
        out_channels=16,
        pos_embed_max_size=192,
    )
    names = "vae", "text_encoder", "text_encoder_2", "text_encoder_3"
    tokenizers = "tokenizer", "tokenizer_2", "tokenizer_3"
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        **dict.fromkeys((*names, *tokenizers)),
    )
    inputs = {
        "hidden_states": torch.randn(rows, 16, 128, 128),
        "timestep": torch.full((rows,), 500.0),
        "encoder_hidden_states": torch.randn(rows, 333, 4096),
        "pooled_projections": torch.randn(rows, 2048),
    }
    return pipe, inputs, "SD3, 1024x1024" + ("" if whole else ", 2 of 24 layers")


def _flux(
    side: int, tokens: int, sizes: dict[str, Any], about: str, rows: int, whole: bool
) -> tuple[Any, dict[str, Any], str]:
    transformer = FluxTransformer2DModel(
        num_layers=19 if whole else 1,
        num_single_layers=38 if whole else 1,
        guidance_embeds=True,
        **sizes,
    )
    names = "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"
    pipe = FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        **dict.fromkeys(names),
    )
    cells = torch.arange(float(side))
    inputs = {
        "hidden_states": torch.randn(rows, side * side, 64),
        "timestep": torch.full((rows,), 0.5),
        "guidance": torch.full((rows,), 3.5),
        "encoder_hidden_states": torch.randn(rows, tokens, transformer.config.joint_attention_dim),
        "pooled_projections": torch.randn(rows, transformer.config.pooled_projection_dim),
        "img_ids": torch.cartesian_prod(torch.zeros(1), cells, cells),
        "txt_ids": torch.zeros(tokens, 3),
    }
    return pipe, inputs, about + ("" if whole else ", 1 + 1 of 19 + 38 layers")


NARROW = {
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 6, 6),
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
}
BENCHES: dict[str, Callable[[int, bool], tuple[Any, dict[str, Any], str]]] = {
    "sd15": partial(_sd15, (320, 640, 1280, 1280), "SD 1.5, 512x512"),
    "sdxl": _sdxl,
    "sd3": _sd3,
    "flux": partial(_flux, 64, 512, {}, "FLUX.1, 1024x1024"),
    "narrow-flux": partial(_flux, 8, 77, NARROW, "FLUX.1 of tiny widths, 128x128"),
    "demo": _demo,
    "thin": partial(_sd15, (64, 128, 256, 256), "SD 1.5 at a fifth of its width"),
}
