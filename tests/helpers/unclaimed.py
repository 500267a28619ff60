"""Models of diffusers that no family of sdattn claims, tiny and random, with a call of each.

``truth`` is what their code says of the layers that see the text, read by hand: the argument whose
tokens are all their keys, or the text's slice of the keys, and the grid of the image's queries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS, COLS, FRAMES, T, WIDTH = 4, 6, 3, 7, 16
STATES = "encoder_hidden_states"
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
FIRST = slice(0, T)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text(batch: int = 1) -> Tensor:
    return noise(batch, T, WIDTH, seed=1)


def image(channels: int = 4, patch: int = 2) -> Tensor:
    return noise(1, channels, patch * ROWS, patch * COLS)


def video(channels: int = 4, patch: int = 2) -> Tensor:
    return noise(1, channels, FRAMES, patch * ROWS, patch * COLS)


def places(first: int = 0, axes: int = 3) -> Tensor:
    """Ids ``[N, axes]`` of the image's cells, row by row; the last two are row and column."""
    grid = torch.cartesian_prod(torch.arange(ROWS) + first, torch.arange(COLS) + first)
    return torch.cat([torch.full((ROWS * COLS, axes - 2), first), grid], dim=1).float()


@dataclass(frozen=True)
class Unclaimed:
    config: dict[str, Any]
    call: Callable[[], dict[str, Any]]
    text: str | slice
    grid: tuple[int, ...] = (ROWS, COLS)


def of_video(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"hidden_states": video(), STATES: text(), "timestep": torch.ones(1), **more}


def wan_like(**more: Any) -> Unclaimed:
    config = {
        **HEADS,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": WIDTH,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": 2,
    }
    return Unclaimed(config | more, of_video(), STATES, (FRAMES, ROWS, COLS))


def packed() -> dict[str, Any]:
    """FLUX' manner: packed latents and ids."""
    return {
        "hidden_states": noise(1, ROWS * COLS, 4),
        STATES: text(),
        "timestep": torch.ones(1),
        "img_ids": places(),
        "txt_ids": torch.zeros(T, 3),
    }


UNCLAIMED = {
    "AllegroTransformer3DModel": Unclaimed(
        {
            **HEADS,
            "cross_attention_dim": WIDTH,
            "num_layers": 2,
            "sample_height": 2 * ROWS,
            "sample_width": 2 * COLS,
            "sample_frames": FRAMES,
            "caption_channels": WIDTH,
        },
        of_video(
            image_rotary_emb=None,
            attention_mask=torch.ones(1, FRAMES, 2 * ROWS, 2 * COLS),
            encoder_attention_mask=torch.ones(1, T),
        ),
        STATES,
        (FRAMES, ROWS, COLS),
    ),
    "ChronoEditTransformer3DModel": wan_like(),
    "ConsisIDTransformer3DModel": Unclaimed(
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "time_embed_dim": 2,
            "text_embed_dim": WIDTH,
            "sample_height": 2 * ROWS,
            "sample_width": 2 * COLS,
            "sample_frames": 9,
            "max_text_seq_length": T,
        },
        # frames before channels, as in CogVideoX
        of_video(hidden_states=noise(1, FRAMES, 4, 2 * ROWS, 2 * COLS)),
        FIRST,
        (FRAMES, ROWS, COLS),
    ),
    "CosmosTransformer3DModel": Unclaimed(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "text_embed_dim": WIDTH,
            "adaln_lora_dim": 4,
            "max_size": (FRAMES, 2 * ROWS, 2 * COLS),
            "concat_padding_mask": False,
        },
        of_video(),
        STATES,
        (FRAMES, ROWS, COLS),
    ),
    "EasyAnimateTransformer3DModel": Unclaimed(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 2,
            "mmdit_layers": 1,
            "time_embed_dim": 4,
            "text_embed_dim": WIDTH,
        },
        of_video(),
        FIRST,
        (FRAMES, ROWS, COLS),
    ),
    "LatteTransformer3DModel": Unclaimed(
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": WIDTH,
            "sample_size": 8,
            "patch_size": 2,
            "caption_channels": WIDTH,
            "norm_type": "ada_norm_single",
            "num_embeds_ada_norm": 1000,
            "norm_elementwise_affine": False,
            "video_length": FRAMES,
        },
        lambda: {
            "hidden_states": noise(1, 4, FRAMES, 8, 8),
            STATES: text(),
            "timestep": torch.ones(1),
        },
        STATES,
        (FRAMES, 4, 4),
    ),
    "LuminaNextDiT2DModel": Unclaimed(
        {
            "sample_size": 8,
            "hidden_size": 16,
            "num_layers": 2,
            "num_attention_heads": 2,
            "num_kv_heads": 2,
            "multiple_of": 8,
            "cross_attention_dim": WIDTH,
        },
        lambda: lumina_call(),
        STATES,
    ),
    "PRXTransformer2DModel": Unclaimed(
        {
            "in_channels": 4,
            "context_in_dim": WIDTH,
            "hidden_size": 16,
            "num_heads": 2,
            "depth": 2,
            "axes_dim": [4, 4],
            "mlp_ratio": 2.0,
        },
        lambda: {"hidden_states": image(), STATES: text(), "timestep": torch.ones(1)},
        FIRST,
    ),
    "SanaVideoTransformer3DModel": Unclaimed(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12,
            "cross_attention_dim": 24,
            "caption_channels": WIDTH,
        },
        of_video(),
        STATES,
        (FRAMES, ROWS, COLS),
    ),
    "WanVACETransformer3DModel": Unclaimed(
        wan_like(vace_layers=[0], vace_in_channels=4).config,
        of_video(control_hidden_states=noise(1, 4, FRAMES, 2 * ROWS, 2 * COLS, seed=3)),
        STATES,
        (FRAMES, ROWS, COLS),
    ),
    "UNet3DConditionModel": Unclaimed(
        {
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "block_out_channels": (8, 8),
            "norm_num_groups": 4,
            "layers_per_block": 1,
            "cross_attention_dim": WIDTH,
            "attention_head_dim": 4,
        },
        lambda: {"sample": video(patch=1), STATES: text(), "timestep": torch.ones(1)},
        STATES,
        (FRAMES, ROWS, COLS),
    ),
    "NucleusMoEImageTransformer2DModel": Unclaimed(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": WIDTH,
            "axes_dims_rope": (8, 12, 12),
            "moe_enabled": False,
            "patch_size": 1,
        },
        lambda: {
            "hidden_states": noise(1, ROWS * COLS, 4),
            STATES: text(),
            "timestep": torch.ones(1),
            "img_shapes": [(1, ROWS, COLS)],
            "encoder_hidden_states_mask": torch.ones(1, T),
        },
        slice(-T, None),
    ),
    "StableCascadeUNet": Unclaimed(
        {
            "in_channels": 4,
            "out_channels": 4,
            "timestep_ratio_embedding_dim": 4,
            "conditioning_dim": WIDTH,
            "block_out_channels": (8,),
            "num_attention_heads": (2,),
            "down_num_layers_per_block": (1,),
            "up_num_layers_per_block": (1,),
            "down_blocks_repeat_mappers": (1,),
            "up_blocks_repeat_mappers": (1,),
            "block_types_per_layer": (
                ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
            ),
            "clip_text_in_channels": WIDTH,
            "clip_text_pooled_in_channels": WIDTH,
            "clip_image_in_channels": WIDTH,
            "clip_seq": 2,
        },
        lambda: {
            "sample": image(patch=1),
            "timestep_ratio": torch.ones(1),
            "clip_text": text(),
            "clip_text_pooled": noise(1, 1, WIDTH, seed=2),
            "clip_img": noise(1, 1, WIDTH, seed=3),
        },
        slice(ROWS * COLS, ROWS * COLS + T),
    ),
    "BriaFiboTransformer2DModel": Unclaimed(
        {
            **HEADS,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": WIDTH,
            "text_encoder_dim": 8,
            "axes_dims_rope": [2, 2, 4],
        },
        lambda: {**packed(), "text_encoder_layers": [noise(1, T, 8, seed=4)] * 2},
        FIRST,
    ),
    "MotifVideoTransformer3DModel": Unclaimed(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "text_embed_dim": WIDTH,
            "rope_axes_dim": (4, 6, 6),
        },
        of_video(encoder_attention_mask=torch.ones(1, T)),
        slice(-T, None),
        (FRAMES, ROWS, COLS),
    ),
}


def lumina_call() -> dict[str, Any]:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    return {
        "hidden_states": image(),
        STATES: text(),
        "timestep": torch.ones(1),
        "encoder_mask": torch.ones(1, T, dtype=torch.bool),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(8, 16, 16),
        "cross_attention_kwargs": {},
    }
