"""The rows of the support matrix whose pipelines are made of blocks: diffusers has no classic one
of these models."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration

from helpers.newer import newer
from helpers.padded_rows import prompts_of
from helpers.rows import Options, Row, Way
from helpers.tiny_encoders import TextProcessor, tiny_qwen3_vl
from helpers.tiny_tokenizers import VISION_CHAT, tiny_qwen
from helpers.transformer_rows import VAE, in_turn, own_norms


@dataclass(frozen=True)
class ModularRow(Row):
    """A row whose pipeline decodes in any case and gives the whole state of its call."""

    def run(self, pipe: Any, way: Way, **more: Any) -> Any:
        return super().run(pipe, way, **{"output_type": "pt", **more})

    def taken(self, result: Any) -> Any:
        return result.get("images")


def built(blocks: str, without: str = "", **parts: Any) -> Any:
    """Return the pipeline of an automatic sequence of blocks, without one of them."""
    sequence = newer(blocks)()
    sequence.sub_blocks.pop(without, None)
    pipe = sequence.init_pipeline()
    pipe.update_components(**parts)
    return pipe


def flux3(blocks: str = "Flux3AutoBlocks", **changes: Any) -> Any:
    torch.manual_seed(0)
    transformer = newer("Flux3Transformer2DModel")(
        in_channels=16,
        cond_in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8 * 16,
        timestep_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        **changes,
    )
    tokenizer = tiny_qwen()
    return built(
        blocks,
        "prompt_upsampler",
        text_encoder=tiny_qwen3_vl(32, Qwen3VLForConditionalGeneration),
        tokenizer=TextProcessor(tokenizer, chat_template=tokenizer.chat_template),
        vae=AutoencoderKLFlux2(**VAE).eval(),
        transformer=own_norms(transformer).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def guider_set(pipe: Any, way: Way) -> Options:
    """A modular pipeline leaves guidance to its guider."""
    pipe.guider.guidance_scale = 4.0 if way.guided else 1.0
    return {"height": way.size[0], "width": way.size[1]}


def with_references(pipe: Any, way: Way) -> Options:
    """Two images, of 3 x 2 and 4 x 4 cells."""
    images = [Image.new("RGB", (48, 32), "red"), Image.new("RGB", (64, 64), "green")]
    return {**guider_set(pipe, way), "image": images}


def distilled(pipe: Any, way: Way) -> Options:
    return {"height": way.size[0], "width": way.size[1], "negative_prompt": None}


def ideogram4_parts() -> Options:
    """The negative branch is another model, with the same settings."""
    torch.manual_seed(0)
    models = [
        newer("Ideogram4Transformer2DModel")(
            in_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            intermediate_size=16,
            adaln_dim=8,
            llm_features_dim=13 * 16,
            mrope_section=(4, 2, 2),
        )
        for _ in range(2)
    ]
    tokenizer = tiny_qwen()
    tokenizer.chat_template = VISION_CHAT
    return {
        "text_encoder": tiny_qwen3_vl(36),
        "tokenizer": tokenizer,
        "vae": AutoencoderKLFlux2(**VAE).eval(),
        "transformer": own_norms(models[0]).eval(),
        "unconditional_transformer": own_norms(models[1]).eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def ideogram4() -> Any:
    pipe = newer("Ideogram4Pipeline")(**ideogram4_parts())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def scheduled(pipe: Any, way: Way) -> Options:
    """Guidance has a scale per step; the negative branch takes no text."""
    return {
        "height": way.size[0],
        "width": way.size[1],
        "guidance_schedule": [4.0 if way.guided else 1.0] * 2,
        "max_sequence_length": 40,
        "negative_prompt": None,
        "prompt": prompts_of(way),
    }


def vision_lengths(pipe: Any, way: Way) -> list[int]:
    """Of the chat around each prompt, without padding."""
    rows = [
        f"<|im_start|>user\n{one}<|im_end|>\n<|im_start|>assistant\n" for one in prompts_of(way)
    ]
    return [len(pipe.tokenizer(row)["input_ids"]) for row in rows for _ in range(way.images)]


class Processor(TextProcessor):
    """The half of Qwen3-VL's processor that a text alone needs."""

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        return self.tokenizer([text] if isinstance(text, str) else text, **options)

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        return [[0] * len(row) for row in ids]


def h3_vae() -> Any:
    return newer("AutoencoderKLMiniMaxH3")(
        latent_channels=4,
        block_out_channels=(4,) * 6,
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ).eval()


def h3_audio_vae() -> Any:
    with warnings.catch_warnings():  # torch's weight_norm is deprecated
        warnings.simplefilter("ignore", FutureWarning)
        return newer("AutoencoderKLMiniMaxH3Audio")(
            encoder_dim=2,
            latent_dim=32,
            num_attention_heads=2,
            decoder_dim=128,
            latents_mean=[0.0] * 32,
            latents_std=[1.0] * 32,
        ).eval()


def h3(without: str = "decode", **parts: Any) -> Any:
    """It makes videos of five seconds at least; its decoders are no part of what is watched."""
    torch.manual_seed(0)
    transformer = newer("MiniMaxH3Transformer3DModel")(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=16,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=16,
        in_channels=4,
        audio_in_channels=32,
        text_dim=16,
        freq_dim=8,
        time_embed_hidden_dim=8,
        time_embed_dim=8,
        rope_freq_dim=2,
    )
    encoder = tiny_qwen3_vl(52, Qwen3VLForConditionalGeneration)
    return built(
        "MiniMaxH3Blocks",
        without,
        text_encoder=encoder,
        tokenizer=tiny_qwen(),
        processor=Processor(tiny_qwen()),
        transformer=own_norms(transformer).eval(),
        vae=h3_vae(),
        scheduler=newer("MiniMaxH3Scheduler")(),
        audio_scheduler=newer("MiniMaxH3Scheduler")(shift=3.0),
        **parts,
    )


def h3_options(pipe: Any, way: Way) -> Options:
    """Three steps are two calls of the model."""
    return {
        "height": way.size[0],
        "width": way.size[1],
        "num_inference_steps": 3,
        "negative_prompt": None,
    }


def qwen21_parts() -> Options:
    torch.manual_seed(0)
    transformer = newer("QwenImage21Transformer2DModel")(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    vae = newer("AutoencoderKLQwenImage21")(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=4,
        dim_mult=[1] * 5,
        num_res_blocks=1,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    tokenizer = tiny_qwen()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    return {
        "text_encoder": tiny_qwen3_vl(2, Qwen3VLForConditionalGeneration),
        "processor": Processor(tokenizer, chat_template=VISION_CHAT),
        "vae": vae.eval(),
        "transformer": own_norms(transformer).eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    }


def qwen21() -> Any:
    pipe = newer("QwenImage21Pipeline")(**qwen21_parts())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def uncached(pipe: Any, way: Way) -> Options:
    return {**in_turn(pipe, way), "use_kv_cache": False}


def prompt_lengths(pipe: Any, way: Way) -> list[int]:
    return [len(pipe.tokenizer(prompts_of(way)[0])["input_ids"])]


class LatentsRow(ModularRow):
    """Without its decoders a pipeline gives latents, of the video and of its sound."""

    def run(self, pipe: Any, way: Way, **more: Any) -> Any:
        return super().run(pipe, way, **{**more, "output_type": None})

    def taken(self, result: Any) -> Any:
        return torch.cat([result.get(one).flatten() for one in ("latents", "audio_latents")])


FLUX3: Options = {"joint": "text first", "layers": 2, "unit": 16, "cell": 16, "n_text": 80}
FLUX3 |= {"batched": False, "processors": ("fused",)}
IDEOGRAM4: Options = {"joint": "text first", "layers": 2, "unit": 16, "cell": 16}
IDEOGRAM4 |= {
    "prompt_rows": None,
    "processors": (),
    "lengths": vision_lengths,
    "image_last": True,
}
QWEN21: Options = {"joint": "text first", "layers": 2, "unit": 32, "cell": 16, "in_parts": True}
QWEN21 |= {"processors": ("fused",), "needs": "QwenImage21Pipeline", "prompt_rows": None}
GUIDED: Options = {"in_turn": True, "prompt_rows": None}

MODULAR = (
    ModularRow("FLUX.3", flux3, guider_set, needs="Flux3ModularPipeline", **FLUX3, **GUIDED),
    ModularRow(
        "FLUX.3, reference images",
        flux3,
        with_references,
        references=3 * 2 + 4 * 4,
        needs="Flux3ModularPipeline",
        **FLUX3,
        **GUIDED,
    ),
    ModularRow(
        "FLUX.3, distilled",
        lambda: flux3("Flux3DistilledAutoBlocks", flow_map=True),
        distilled,
        prompt_rows=None,
        needs="Flux3DistilledModularPipeline",
        **FLUX3,
    ),
    Row("Ideogram 4", ideogram4, scheduled, needs="Ideogram4Pipeline", **IDEOGRAM4),
    ModularRow(
        "Ideogram 4, modular",
        lambda: built("Ideogram4AutoBlocks", **ideogram4_parts()),
        scheduled,
        needs="Ideogram4ModularPipeline",
        **IDEOGRAM4,
    ),
    Row("Qwen-Image 2.1", qwen21, in_turn, in_turn=True, **QWEN21),
    Row("Qwen-Image 2.1, no cache", qwen21, uncached, in_turn=True, **QWEN21),
    ModularRow(
        "Qwen-Image 2.1, modular",
        lambda: built("QwenImage21AutoBlocks", **qwen21_parts()),
        guider_set,
        in_turn=True,
        **QWEN21,
    ),
    ModularRow(
        "Qwen-Image 2.1 Turbo",
        lambda: built("QwenImage21TurboAutoBlocks", **qwen21_parts()),
        distilled,
        **QWEN21,
    ),
    LatentsRow(
        "MiniMax-H3",
        h3,
        h3_options,
        joint="text first",
        layers=2,
        unit=32,
        cell=32,
        frames=37,
        prompt_rows=None,
        image_last=True,
        between=2 * round(124 / 24 * 40),  # of both channels' sound
        lengths=prompt_lengths,
        processors=("fused",),
        images_option=None,
        batched=False,
        needs="MiniMaxH3ModularPipeline",
    ),
)
