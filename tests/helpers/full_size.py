"""Models at their full size, without weights: their published configurations, one call each.

Each is what ``config.json`` of the model's repository on the hub says where it differs from the
default of its class in diffusers, and an image and a text of the size that its pipeline makes by
default. On torch's meta device a model of any size takes no memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch


@dataclass(frozen=True)
class FullSize:
    """A published model.

    Attributes:
        kind: its class in diffusers.
        parameters: in millions.
        config: of the class, where it is not the default.
        given: the arguments of a call of one image, made on torch's default device.
        grids: (layers, rows, cols) of the layers with columns of the text.
        n_text: columns.
        latent_size: for capture(), where the grid is in values, which there are none of.
    """

    kind: str
    parameters: float
    config: dict[str, Any]
    given: Callable[[], dict[str, Any]]
    grids: tuple[tuple[int, int, int], ...]
    n_text: int
    latent_size: tuple[int, int] | None = None

    def model(self) -> Any:
        """On the meta device."""
        with torch.device("meta"):
            return getattr(diffusers, self.kind)(**self.config).eval()


def unet_inputs(cells: int, width: int, **more: tuple[int, ...]) -> dict[str, Any]:
    given = {
        "sample": torch.empty(1, 4, cells, cells),
        "timestep": torch.empty(()),
        "encoder_hidden_states": torch.empty(1, 77, width),
    }
    if more:
        given["added_cond_kwargs"] = {name: torch.empty(shape) for name, shape in more.items()}
    return given


def flux_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.empty(1, 4096, 64),
        "encoder_hidden_states": torch.empty(1, 512, 4096),
        "pooled_projections": torch.empty(1, 768),
        "timestep": torch.empty(1),
        "guidance": torch.empty(1),
        "img_ids": torch.empty(4096, 3),
        "txt_ids": torch.empty(512, 3),
    }


FULL_SIZES = {
    "SD 1.5": FullSize(  # 512 x 512
        "UNet2DConditionModel",
        859.521,
        {"sample_size": 64, "cross_attention_dim": 768},
        lambda: unet_inputs(64, 768),
        ((5, 64, 64), (5, 32, 32), (5, 16, 16), (1, 8, 8)),
        77,
    ),
    "SDXL": FullSize(  # 1024 x 1024; two blocks of 2 and 10 transformer layers each, three upwards
        "UNet2DConditionModel",
        2567.464,
        {
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        lambda: unet_inputs(128, 2048, text_embeds=(1, 1280), time_ids=(1, 6)),
        ((2 * 2 + 3 * 2, 64, 64), (2 * 10 + 10 + 3 * 10, 32, 32)),
        77,
    ),
    "SD 3.5 large": FullSize(  # 1024 x 1024, patches of 2; CLIP's 77 and T5's 256 columns
        "SD3Transformer2DModel",
        8056.627,
        {
            "sample_size": 128,
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        lambda: {
            "hidden_states": torch.empty(1, 16, 128, 128),
            "encoder_hidden_states": torch.empty(1, 333, 4096),
            "pooled_projections": torch.empty(1, 2048),
            "timestep": torch.empty(1),
        },
        ((38, 64, 64),),
        333,
    ),
    "FLUX.1-dev": FullSize(  # 1024 x 1024; T5's 512 columns
        "FluxTransformer2DModel",
        11901.408,
        {"guidance_embeds": True},
        flux_inputs,
        ((19 + 38, 64, 64),),
        512,
        latent_size=(64, 64),
    ),
    "Qwen-Image": FullSize(  # 1328 x 1328; a prompt of 40 tokens
        "QwenImageTransformer2DModel",
        20430.401,
        {},
        lambda: {
            "hidden_states": torch.empty(1, 83 * 83, 64),
            "encoder_hidden_states": torch.empty(1, 40, 3584),
            "timestep": torch.empty(1),
            "img_shapes": [[(1, 83, 83)]],
        },
        ((60, 83, 83),),
        40,
    ),
    "Z-Image": FullSize(  # 1024 x 1024; a prompt of 40 tokens, filled up to 64
        "ZImageTransformer2DModel",
        6154.908,
        {},
        lambda: {
            "x": [torch.empty(16, 1, 128, 128)],
            "t": torch.empty(1),
            "cap_feats": [torch.empty(40, 2560)],
        },
        ((30, 64, 64),),
        64,
    ),
}
