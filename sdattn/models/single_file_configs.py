"""What a checkpoint of one file is, read off the names and shapes of its tensors: which pipeline,
and the configuration of each of its models, as diffusers has them.

The names are those of the code that trained these models, CompVis' latent diffusion ("LDM").
Shapes do not tell everything. What the published configurations say beside them is here too:
attention has 8 heads in SD 1.x (v1-inference.yaml), heads of width 64 in 2.x and SDXL
(v2-inference.yaml, sd_xl_base.yaml); groups of normalisation are 32 everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidValueError

Shapes = Mapping[str, tuple[int, ...]]
_UNET, _VAE = "model.diffusion_model.", "first_stage_model."
_CLIP, _OPEN_CLIP = "cond_stage_model.transformer.", "cond_stage_model.model."
_XL_CLIP, _XL_OPEN_CLIP = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."
_REFINER = "conditioner.embedders.0.model."
# By the channels that the UNet takes: beside the latent, a mask and a masked picture, or a picture.
_SD = {
    4: "StableDiffusionPipeline",
    9: "StableDiffusionInpaintPipeline",
    8: "StableDiffusionInstructPix2PixPipeline",
}
_XL = {4: "StableDiffusionXLPipeline", 9: "StableDiffusionXLInpaintPipeline"}
_XL_REFINER = {4: "StableDiffusionXLImg2ImgPipeline"}
_BASE_STEPS = 875_000  # of the training of 2.x's base models, which predict the noise
_BETAS = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}


@dataclass(frozen=True)
class TextEncoder:
    """One text encoder of a checkpoint.

    Attributes:
        name: of the pipeline's part, ``"text_encoder"`` or ``"text_encoder_2"``.
        kind: its class in transformers.
        config: of that class.
        pad_token: that fills up prompts.
    """

    name: str
    kind: str
    config: dict[str, Any]
    pad_token: str


@dataclass(frozen=True)
class SingleFile:
    """What a checkpoint is.

    Attributes:
        pipeline: the name of its class in diffusers.
        unet, vae: their configurations.
        text_encoders: one, or the two of SDXL.
        scheduler: the name of a class and its settings.
        options: further settings of the pipeline.
    """

    pipeline: str
    unet: dict[str, Any]
    vae: dict[str, Any]
    text_encoders: tuple[TextEncoder, ...]
    scheduler: tuple[str, dict[str, Any]]
    options: dict[str, Any]


def single_file_of(shapes: Shapes, global_step: int | None = None) -> SingleFile:
    """What the checkpoint with these tensors is.

    Args:
        shapes: of all tensors, by name.
        global_step: of the training, where the file has it. It tells the base models of 2.x, which
            were trained at 512x512 and predict the noise, from those for 768x768, which predict the
            velocity; without it the latter are meant, as diffusers does.

    Raises:
        ValueError: it is of none of these models, or not whole.
    """
    try:
        return _read(shapes, global_step)
    except KeyError as error:
        raise InvalidValueError(
            f"it has no tensor {error.args[0]!r}, which checkpoints of SD 1.x, 2.x and SDXL have"
        ) from None


def _read(shapes: Shapes, global_step: int | None) -> SingleFile:
    unet, xl = _unet(shapes), _XL_OPEN_CLIP + "positional_embedding" in shapes
    refiner = _REFINER + "positional_embedding" in shapes
    pipelines = _XL if xl else _XL_REFINER if refiner else _SD
    if unet["in_channels"] not in pipelines:
        known = ", ".join(map(str, pipelines))
        raise InvalidValueError(
            f"its UNet takes {unet['in_channels']} channels, and those of {known} are known"
        )
    options: dict[str, Any]
    if xl or refiner:
        size, scale = 1024, 0.13025
        scheduler, prediction = "EulerDiscreteScheduler", "epsilon"
        encoders: tuple[TextEncoder, ...] = (
            _open_clip(shapes, _XL_OPEN_CLIP if xl else _REFINER, projected=True),
        )
        encoders = (_clip(shapes, _XL_CLIP), *encoders) if xl else encoders
        options = {"force_zeros_for_empty_prompt": xl}
        options |= {"requires_aesthetics_score": True} if refiner else {}
    elif _CLIP + "text_model.embeddings.position_embedding.weight" in shapes:
        size, scale, scheduler, prediction = 512, 0.18215, "PNDMScheduler", "epsilon"
        encoders, options = (_clip(shapes, _CLIP),), {"requires_safety_checker": False}
    else:
        is_base = global_step == _BASE_STEPS or unet["in_channels"] == 9
        size, scale, scheduler = 512 if is_base else 768, 0.18215, "DDIMScheduler"
        prediction = "epsilon" if is_base else "v_prediction"
        unet["upcast_attention"] = True
        encoders = (_open_clip(shapes, _OPEN_CLIP, projected=False),)
        options = {"requires_safety_checker": False}
    vae = {**_vae(shapes), "scaling_factor": scale, "sample_size": size}
    unet["sample_size"] = size // 2 ** (len(vae["block_out_channels"]) - 1)
    settings = {**_BETAS, "prediction_type": prediction}
    settings |= {"skip_prk_steps": True} if scheduler == "PNDMScheduler" else {}
    settings |= {"clip_sample": False} if scheduler == "DDIMScheduler" else {}
    settings |= {"set_alpha_to_one": False} if scheduler != "EulerDiscreteScheduler" else {}
    pipeline = pipelines[unet["in_channels"]]
    return SingleFile(pipeline, unet, vae, encoders, (scheduler, settings), options)


def _unet(shapes: Shapes) -> dict[str, Any]:
    """LDM counts residual blocks and downsamplers of all levels in one list, ``input_blocks``."""
    levels: list[list[int]] = [[]]  # the numbers of each level's residual blocks
    for number in range(1, _count(shapes, f"{_UNET}input_blocks.")):
        block = f"{_UNET}input_blocks.{number}"
        if f"{block}.0.op.weight" in shapes:
            levels.append([])
        elif f"{block}.0.in_layers.2.weight" in shapes:
            levels[-1].append(number)
    widths = [shapes[f"{_UNET}input_blocks.{of[0]}.0.out_layers.3.weight"][0] for of in levels]
    depths = [_count(shapes, f"{_UNET}input_blocks.{of[0]}.1.transformer_blocks.") for of in levels]
    middle = f"{_UNET}middle_block.1."
    linear = len(shapes[f"{middle}proj_in.weight"]) == 2  # a convolution in SD 1.x
    text = shapes[f"{middle}transformer_blocks.0.attn2.to_k.weight"][1]
    kinds = ["CrossAttn" if depth else "" for depth in depths]
    last = _count(shapes, f"{middle}transformer_blocks.")
    found: dict[str, Any] = {
        "in_channels": shapes[f"{_UNET}input_blocks.0.0.weight"][1],
        "out_channels": shapes[f"{_UNET}out.2.weight"][0],
        "block_out_channels": widths,
        "layers_per_block": len(levels[0]),
        "down_block_types": [f"{kind}DownBlock2D" for kind in kinds],
        "up_block_types": [f"{kind}UpBlock2D" for kind in reversed(kinds)],
        "cross_attention_dim": text,
        "use_linear_projection": linear,
        # what diffusers calls the width of a head is their number here
        "attention_head_dim": [width // 64 for width in widths] if linear else 8,
        # the middle block has as many as the last level is said to have
        "transformer_layers_per_block": [*(depth or 1 for depth in depths[:-1]), last],
    }
    if (embedding := shapes.get(f"{_UNET}label_emb.0.0.weight")) is not None:  # SDXL
        found |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": embedding[1],
        }
    return found


def _vae(shapes: Shapes) -> dict[str, Any]:
    down = f"{_VAE}encoder.down."
    levels = range(_count(shapes, down))
    return {
        "block_out_channels": [shapes[f"{down}{i}.block.0.conv2.weight"][0] for i in levels],
        "layers_per_block": _count(shapes, f"{down}0.block."),
        "latent_channels": shapes[f"{_VAE}decoder.conv_in.weight"][1],
        "down_block_types": ["DownEncoderBlock2D" for _ in levels],
        "up_block_types": ["UpDecoderBlock2D" for _ in levels],
    }


def _clip(shapes: Shapes, prefix: str) -> TextEncoder:
    """OpenAI's CLIP ViT-L/14 (Radford et al. 2021)."""
    text = f"{prefix}text_model."
    config = {
        **_sizes(
            shapes[f"{text}embeddings.token_embedding.weight"],
            shapes[f"{text}embeddings.position_embedding.weight"],
            shapes[f"{text}encoder.layers.0.mlp.fc1.weight"],
        ),
        "num_hidden_layers": _count(shapes, f"{text}encoder.layers."),
        "hidden_act": "quick_gelu",
    }
    return TextEncoder("text_encoder", "CLIPTextModel", config, "<|endoftext|>")


def _open_clip(shapes: Shapes, prefix: str, *, projected: bool) -> TextEncoder:
    """OpenCLIP's ViT-H/14 of SD 2.x, whose last layer is left out, and ViT-bigG/14 of SDXL, which
    has its projection."""
    layers = _count(shapes, f"{prefix}transformer.resblocks.")
    config = {
        **_sizes(
            shapes[f"{prefix}token_embedding.weight"],
            shapes[f"{prefix}positional_embedding"],
            shapes[f"{prefix}transformer.resblocks.0.mlp.c_fc.weight"],
        ),
        "num_hidden_layers": layers if projected else layers - 1,
        "hidden_act": "gelu",
    }
    if not projected:
        return TextEncoder("text_encoder", "CLIPTextModel", config, "!")
    config["projection_dim"] = shapes[f"{prefix}text_projection"][1]
    return TextEncoder("text_encoder_2", "CLIPTextModelWithProjection", config, "!")


def _sizes(
    tokens: tuple[int, ...], positions: tuple[int, ...], hidden: tuple[int, ...]
) -> dict[str, Any]:
    """Of a text encoder; every one of them has heads of width 64, and begins and ends prompts with
    the last two tokens of its vocabulary."""
    return {
        "vocab_size": tokens[0],
        "hidden_size": tokens[1],
        "projection_dim": tokens[1],
        "max_position_embeddings": positions[0],
        "intermediate_size": hidden[0],
        "num_attention_heads": tokens[1] // 64,
        "bos_token_id": tokens[0] - 2,
        "eos_token_id": tokens[0] - 1,
    }


def _count(shapes: Shapes, prefix: str) -> int:
    """How many numbers follow a beginning of names: one more than the last."""
    parts = {name[len(prefix) :].partition(".")[0] for name in shapes if name.startswith(prefix)}
    return max((int(part) + 1 for part in parts if part.isdecimal()), default=0)
