"""The rows of the support matrix whose pipelines are made of blocks: diffusers has no classic one
of these models."""

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
from helpers.transformer_rows import VAE, own_norms, quiet


@dataclass(frozen=True)
class ModularRow(Row):
    """A row whose pipeline gives the whole state of its call."""

    def taken(self, result: Any) -> Any:
        return result.get("images")


def built(blocks: str, **parts: Any) -> Any:
    """Return the pipeline of an automatic sequence of blocks, without the one that rewrites."""
    sequence = newer(blocks)()
    sequence.sub_blocks.pop("prompt_upsampler", None)
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
    return quiet(newer("Ideogram4Pipeline")(**ideogram4_parts()))


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


FLUX3: Options = {"joint": "text first", "layers": 2, "unit": 16, "cell": 16, "n_text": 80}
FLUX3 |= {"batched": False, "processors": ("fused",)}
IDEOGRAM4: Options = {"joint": "text first", "layers": 2, "unit": 16, "cell": 16}
IDEOGRAM4 |= {
    "prompt_rows": None,
    "processors": (),
    "lengths": vision_lengths,
    "padded_in_front": True,
}
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
)
