"""The rows of the support matrix of HunyuanImage."""

from typing import Any

from diffusers import (
    AutoencoderKLHunyuanImage,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
)
from diffusers.guiders import AdaptiveProjectedMixGuidance
from transformers import ByT5Tokenizer

from helpers.rows import PROMPTS, Options, Row, Way
from helpers.tiny_encoders import tiny_qwen_vl, tiny_t5_encoder
from helpers.tiny_pipelines import tiny, tiny_model
from helpers.tiny_tokenizers import tiny_qwen
from helpers.transformer_rows import own_norms


def hunyuan_image() -> Any:
    sizes = {"attention_head_dim": 8, "num_refiner_layers": 1, "rope_axes_dim": (4, 4)}
    sizes |= {"in_channels": 4, "out_channels": 4, "patch_size": (1, 1)}
    sizes |= {"text_embed_dim": 16, "text_embed_2_dim": 32}
    model = own_norms(tiny_model(HunyuanImageTransformer2DModel, **sizes))
    made = AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        sample_size=64,
        scaling_factor=0.4,
    )
    texts = (tiny_qwen_vl(), tiny_qwen()), (tiny_t5_encoder(), ByT5Tokenizer())
    pipe = tiny(HunyuanImagePipeline, model, made.eval(), *texts)
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 190, 16
    return pipe


def guided(pipe: Any, way: Way) -> Options:
    """Guidance is a part of the pipeline."""
    pipe.guider = AdaptiveProjectedMixGuidance(enabled=way.guided)
    return {"height": way.size[0], "width": way.size[1]}


def quoting(pipe: Any, way: Way) -> Options:
    quoted = ['a "red" cat', *PROMPTS[1:]][: way.prompts]
    return {**guided(pipe, way), "prompt": quoted if way.prompts > 1 else quoted[0]}


HUNYUAN: Options = {"joint": "image first", "n_text": 190 + 16, "layers": 4, "processors": ()}
HUNYUAN |= {"in_turn": True, "prompt_rows": None}

HUNYUAN_IMAGES = (
    Row("HunyuanImage 2.1", hunyuan_image, guided, **HUNYUAN),
    Row("HunyuanImage 2.1, quoted text", hunyuan_image, quoting, **HUNYUAN),
)
