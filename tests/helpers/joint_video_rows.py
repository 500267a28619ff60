"""Rows of the support matrix: videos whose attention is joint, with random weights."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLMochi,
    CogVideoXDDIMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanSkyreelsImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
)
from diffusers.guiders import ClassifierFreeGuidance
from transformers import ByT5Tokenizer, CLIPTextModel

from helpers.rows import PROMPTS, Options, Row, Way, new_images
from helpers.tiny_encoders import tiny_llama, tiny_qwen_vl, tiny_t5_encoder
from helpers.tiny_pipelines import tiny, tiny_model
from helpers.tiny_tokenizers import tiny_mistral, tiny_qwen, tiny_t5, tiny_tokenizer
from helpers.transformer_rows import clip, own_norms
from helpers.video_rows import BATCHED, FRAMES, VIDEO, long_video, video


def cogvideox(kind: Any = CogVideoXPipeline, **changes: Any) -> Any:
    sizes = {"in_channels": 4, "out_channels": 4, "time_embed_dim": 2, "text_embed_dim": 32}
    sizes |= {"sample_width": 24, "sample_height": 24, "sample_frames": 9, "patch_size": 2}
    sizes |= {"max_text_seq_length": 12, "use_rotary_positional_embeddings": True}
    model = tiny_model(CogVideoXTransformer3DModel, **{**sizes, **changes})
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    text = tiny_t5_encoder(), tiny_t5()
    return tiny(kind, model, vae.eval(), text, scheduler=CogVideoXDDIMScheduler())


def hunyuan_vae() -> AutoencoderKLHunyuanVideo:
    return AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        mid_block_add_attention=False,
    ).eval()


def hunyuan_video(kind: Any = HunyuanVideoPipeline, in_channels: int = 4) -> Any:
    sizes = {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1}
    sizes |= {"attention_head_dim": 12, "rope_axes_dim": (4, 4, 4), "in_channels": in_channels}
    sizes |= {"out_channels": 4, "text_embed_dim": 16, "pooled_projection_dim": 32}
    model = own_norms(tiny_model(HunyuanVideoTransformer3DModel, **sizes))
    llama = tiny_llama().model, tiny_mistral("right")
    return tiny(kind, model, hunyuan_vae(), llama, (clip(CLIPTextModel), tiny_tokenizer()))


def templated_video(pipe: Any, way: Way) -> Options:
    """The pipeline's own template would be 500 tokens here, which spell it in letters."""
    guidance = {"true_cfg_scale": 5.0 if way.guided else 1.0, "guidance_scale": 6.0}
    template = {"template": "[INST]clip: {}[/INST]", "crop_start": 4}
    return {**video(pipe, way), **guidance, "prompt_template": template}


def from_first_frame(pipe: Any, way: Way) -> Options:
    return {**templated_video(pipe, way), "image": new_images(way, way.total)}


def cogvideox15() -> Any:
    """Two frames of the latent are one of the grid; three are filled up to four."""
    return cogvideox(patch_size_t=2, patch_bias=False)


def cogvideox15_from_an_image() -> Any:
    changes = {"in_channels": 8, "ofs_embed_dim": 2}
    return cogvideox(CogVideoXImageToVideoPipeline, patch_size_t=2, patch_bias=False, **changes)


def long_from_first_frame(pipe: Any, way: Way) -> Options:
    return {**long_video(pipe, way), "image": new_images(way, way.prompts)}


# its pipeline makes one video a prompt, whatever it is told
COG: dict[str, Any] = {**BATCHED, "joint": "text first", "images_option": None}


def hunyuan_video15() -> Any:
    sizes = {"attention_head_dim": 12, "rope_axes_dim": (4, 4, 4), "num_refiner_layers": 1}
    sizes |= {"text_embed_dim": 16, "text_embed_2_dim": 32, "image_embed_dim": 8}
    sizes |= {"in_channels": 5, "out_channels": 2}
    model = own_norms(tiny_model(HunyuanVideo15Transformer3DModel, **sizes))
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=2, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
    )
    vae.enable_slicing()  # in diffusers 0.42 it cannot code two videos at once
    pipe = tiny(
        HunyuanVideo15Pipeline,
        model,
        vae.eval(),
        (tiny_qwen_vl().model.language_model, tiny_qwen()),
        (tiny_t5_encoder(), ByT5Tokenizer()),
        guider=ClassifierFreeGuidance(),
    )
    pipe.system_message, pipe.prompt_template_encode_start_idx = "clip", 12
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 40, 24
    pipe.vision_num_semantic_tokens = 3
    return pipe


def guided_video(pipe: Any, way: Way) -> Options:
    """Guidance is a part of the pipeline."""
    pipe.guider = ClassifierFreeGuidance(enabled=way.guided)
    return {"height": way.size[0], "width": way.size[1], "num_frames": FRAMES}


def quoting_video(pipe: Any, way: Way) -> Options:
    quoted = ['a "red" cat', PROMPTS[1]][: way.prompts]
    return {**guided_video(pipe, way), "prompt": quoted if way.prompts > 1 else quoted[0]}


def of_masks(options: Any) -> Any:
    """The tokens of each video's texts that the pipeline does not mask."""

    def lengths(pipe: Any, way: Way) -> list[int]:
        prompts = options(pipe, way).get("prompt", list(PROMPTS[: way.prompts]))
        with torch.no_grad():
            made = pipe.encode_prompt(prompts, batch_size=way.prompts)
        return [int(n) for n in made[1].sum(1) + made[3].sum(1)]

    return lengths


def mochi(**options: Any) -> Any:
    sizes = {"attention_head_dim": 8, "pooled_projection_dim": 16, "text_embed_dim": 32}
    model = tiny_model(MochiTransformer3DModel, in_channels=4, time_embed_dim=8, **sizes)
    torch.nn.init.normal_(model.pos_frequencies)  # 0 without weights, which turns nothing
    vae = AutoencoderKLMochi(
        latent_channels=4,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        latents_mean=None,
        latents_std=None,
    )
    inverted = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    text = tiny_t5_encoder(), tiny_t5()
    return tiny(MochiPipeline, own_norms(model), vae.eval(), text, scheduler=inverted, **options)


def mochi_video(pipe: Any, way: Way) -> Options:
    """Two frames of a latent that is cut by six."""
    return {**video(pipe, way), "num_frames": 7}


def of_own_mask(pipe: Any, way: Way) -> list[int]:
    """Of several videos of each prompt diffusers repeats the masks prompt by prompt, the text
    states video by video: pipeline_mochi.py, ``_get_t5_prompt_embeds``."""
    prompts = PROMPTS[: way.prompts]
    return [len(pipe.tokenizer(prompt)["input_ids"]) for prompt in prompts] * way.images


MOCHI: dict[str, Any] = {**BATCHED, "joint": "image first", "n_text": 12, "row_by_row": True}
HUNYUAN: dict[str, Any] = {**VIDEO, "in_turn": True, "joint": "image first", "n_text": 12}
HUNYUAN15: dict[str, Any] = {**HUNYUAN, "n_text": None, "images_option": None}

JOINT_VIDEOS = (
    Row("CogVideoX", cogvideox, video, **COG),
    Row("CogVideoX 1.5", cogvideox15, long_video, **COG),
    Row("CogVideoX 1.5, from an image", cogvideox15_from_an_image, long_from_first_frame, **COG),
    Row("HunyuanVideo", hunyuan_video, templated_video, **HUNYUAN),
    Row(
        "HunyuanVideo, SkyReels from an image",
        lambda: hunyuan_video(HunyuanSkyreelsImageToVideoPipeline, in_channels=8),
        from_first_frame,
        **HUNYUAN,
    ),
    Row(
        "HunyuanVideo 1.5",
        hunyuan_video15,
        guided_video,
        lengths=of_masks(guided_video),
        **HUNYUAN15,
    ),
    Row(
        "HunyuanVideo 1.5, quoted text",
        hunyuan_video15,
        quoting_video,
        lengths=of_masks(quoting_video),
        **HUNYUAN15,
    ),
    Row("Mochi", mochi, mochi_video, lengths=of_own_mask, **MOCHI),
)
