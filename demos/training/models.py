"""The parts of the demo model, untrained, and two helpers that are thrown away afterwards."""

from __future__ import annotations

import math
from functools import partial

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from .data import SIZE

WIDTH = 128  # of the text encoder
FACTOR = 8  # pixels a side of a latent's cell
SETTINGS = {"num_inference_steps": 20, "guidance_scale": 2.0}
INVERSION = {"learning_rate": 5e-2}  # 1e-2 is for 50 steps
NARROW = -6.0  # log variance of latents: exp(-6 / 2) is 5 % of one


def new_vae() -> AutoencoderKL:
    """An eighth of the image's side, 4 channels: 128 x 128 images, 16 x 16 latents."""
    blocks = (16, 32, 64, 64)
    vae = AutoencoderKL(
        block_out_channels=blocks,
        down_block_types=("DownEncoderBlock2D",) * len(blocks),
        up_block_types=("UpDecoderBlock2D",) * len(blocks),
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=SIZE,
        mid_block_add_attention=False,
        scaling_factor=1.0,
    )
    # A posterior that starts wide drowns the colours in noise.
    nn.init.constant_(vae.quant_conv.bias[4:], NARROW)
    return vae


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """CLIP's causal text encoder, four layers of ``WIDTH``."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            projection_dim=WIDTH,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def new_unet(
    channels: int = 4,
    widths: tuple[int, ...] = (32, 64, 96, 96),
    heads: tuple[int, ...] = (2, 4, 4, 4),
) -> UNet2DConditionModel:
    """Return the blocks of Stable Diffusion 1.x, a tenth as wide; 6 + 1 + 9 attention blocks."""
    return UNet2DConditionModel(
        sample_size=SIZE // FACTOR,
        in_channels=channels,
        out_channels=channels,
        block_out_channels=widths,
        layers_per_block=2,
        cross_attention_dim=WIDTH,
        attention_head_dim=heads,  # what diffusers calls so is the number of heads
        norm_num_groups=8,
    )


def new_scheduler() -> DDIMScheduler:
    """Noise that ends in nothing but noise, so that the first step has only the words to go by."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        steps_offset=1,
    )


class LatentReader(nn.Module):
    """Foretells the latent, at half its size, from token states: a query a cell, two layers."""

    def __init__(self, side: int = SIZE // FACTOR // 2, layers: int = 2, channels: int = 4) -> None:
        super().__init__()
        self.cells = nn.Parameter(0.02 * torch.randn(side * side, WIDTH))
        self.attend = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(layers)
        )
        self.think = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)
            )
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, channels))

    def forward(self, states: Tensor) -> Tensor:
        """States [batch, tokens, WIDTH] to latents [batch, channels, side, side]."""
        hidden = self.cells.expand(len(states), -1, -1)  # [batch, cells, WIDTH]
        for attend, think, norm in zip(self.attend, self.think, self.norms, strict=True):
            hidden = hidden + attend(norm(hidden), states, states, need_weights=False)[0]
            hidden = hidden + think(hidden)
        side = math.isqrt(hidden.shape[1])
        return self.out(hidden).transpose(1, 2).unflatten(2, (side, side))


class PlaceProbe(nn.Module):
    """Has every cross-attention of a UNet know where each of its cells is.

    A UNet has no position embedding: all it knows of places comes in from its zero-padded borders,
    and it takes very long to find that out from images. A linear map from what each
    cross-attention's queries are made of to (x, y) is trained with it, and then thrown away. It
    sees no image, no mask and no word.
    """

    def __init__(self, unet: UNet2DConditionModel) -> None:
        super().__init__()
        blocks = [m for m in unet.modules() if isinstance(m, BasicTransformerBlock)]
        norms = [block.norm2 for block in blocks]
        self.heads = nn.ModuleList(nn.Linear(norm.normalized_shape[0], 2) for norm in norms)
        self.guesses: list[Tensor] = []  # [batch, cells, 2] each, of the UNet's last pass
        self.hooks = [
            norm.register_forward_hook(partial(self._guess, head))
            for norm, head in zip(norms, self.heads, strict=True)
        ]

    def leave(self) -> None:
        """Take the hooks off the UNet; without this they would go on keeping guesses."""
        for hook in self.hooks:
            hook.remove()

    def _guess(self, head: nn.Module, _norm: nn.Module, _seen: object, hidden: Tensor) -> None:
        """Hook: what a cross-attention's cells say of their places."""
        if torch.is_grad_enabled():
            self.guesses.append(head(hidden))

    def forward(self) -> Tensor:
        """Mean squared error of the places in the UNet's last pass; the image spans -1 to 1."""
        errors = []
        for guess in self.guesses:
            side = math.isqrt(guess.shape[1])
            line = (torch.arange(side, device=guess.device) + 0.5) / side * 2 - 1
            places = torch.cartesian_prod(line, line)  # [cells, 2]
            errors.append((guess.float() - places).square().mean())
        self.guesses.clear()
        return torch.stack(errors).mean()


def assemble(
    vae: AutoencoderKL, text: CLIPTextModel, tokenizer: CLIPTokenizer, unet: UNet2DConditionModel
) -> StableDiffusionPipeline:
    """The pipeline, silent and without the safety checker, which knows no drawn scenes."""
    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=new_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
