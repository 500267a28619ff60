"""The rows of the support matrix whose pipelines are made of blocks, and classic ones of their
models."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image

from helpers.padded_rows import prompts_of
from helpers.rows import Options, Row, Way, in_turn
from helpers.tiny_pipelines import by_default, tiny_blocks, tiny_model
from helpers.transformer_rows import PATCHES


@dataclass(frozen=True)
class ModularRow(Row):
    """A row whose pipeline decodes in any case and gives the whole state of its call."""

    def run(self, pipe: Any, way: Way, **more: Any) -> Any:
        return super().run(pipe, way, **{"output_type": "pt", **more})

    def taken(self, result: Any) -> Any:
        return result.get("images")


class LatentsRow(ModularRow):
    """Without its decoders a pipeline gives latents, of the video and of its sound."""

    def run(self, pipe: Any, way: Way, **more: Any) -> Any:
        return super().run(pipe, way, **{**more, "output_type": None})

    def taken(self, result: Any) -> Any:
        return torch.cat([result.get(one).flatten() for one in ("latents", "audio_latents")])


ideogram4 = by_default("Ideogram4Pipeline")
qwen21 = by_default("QwenImage21Pipeline")
# pipelines without the block that replaces the prompt
flux3 = partial(tiny_blocks, "Flux3AutoBlocks", "prompt_upsampler")
distilled_flux3 = partial(
    tiny_blocks, "Flux3DistilledAutoBlocks", "prompt_upsampler", flow_map=True
)
ideogram4_blocks = partial(tiny_blocks, "Ideogram4AutoBlocks")
qwen21_blocks = partial(tiny_blocks, "QwenImage21AutoBlocks")
# It makes videos of five seconds at least; its decoders are no part of what is watched.
h3 = partial(tiny_blocks, "MiniMaxH3Blocks", "decode", audio_vae=None)


def h3_with_sound() -> Any:
    with warnings.catch_warnings():  # torch's weight_norm is deprecated
        warnings.simplefilter("ignore", FutureWarning)
        sound = tiny_model("AutoencoderKLMiniMaxH3Audio")
    return tiny_blocks("MiniMaxH3Blocks", audio_vae=sound)


def guider_set(pipe: Any, way: Way) -> Options:
    """A modular pipeline leaves guidance to its guider."""
    pipe.guider.guidance_scale = 4.0 if way.guided else 1.0
    return {"height": way.size[0], "width": way.size[1]}


def with_references(pipe: Any, way: Way) -> Options:
    """Two images, of 3 x 2 and 4 x 4 cells."""
    images = [Image.new("RGB", (48, 32), "red"), Image.new("RGB", (64, 64), "green")]
    return {**guider_set(pipe, way), "image": images}


def distilled(_pipe: Any, way: Way, **more: Any) -> Options:
    return {"height": way.size[0], "width": way.size[1], "negative_prompt": None, **more}


def scheduled(pipe: Any, way: Way) -> Options:
    """Guidance has a scale per step; the negative branch takes no text."""
    scales = [4.0 if way.guided else 1.0] * 2
    options = {"guidance_schedule": scales, "max_sequence_length": 40}
    return distilled(pipe, way, **options, prompt=prompts_of(way))


def vision_lengths(pipe: Any, way: Way) -> list[int]:
    """Of the chat around each prompt, without padding."""
    rows = [
        f"<|im_start|>user\n{one}<|im_end|>\n<|im_start|>assistant\n" for one in prompts_of(way)
    ]
    return [len(pipe.tokenizer(row)["input_ids"]) for row in rows for _ in range(way.images)]


def prompt_lengths(pipe: Any, way: Way) -> list[int]:
    return [len(pipe.tokenizer(prompts_of(way)[0])["input_ids"])]


TEXT_FIRST: Options = {**PATCHES, "joint": "text first", "layers": 2, "prompt_rows": None}
FUSED: Options = {**TEXT_FIRST, "processors": ("fused",)}
FLUX3: Options = {**FUSED, "n_text": 80, "batched": False}
GUIDED: Options = {**FLUX3, "in_turn": True, "needs": "Flux3ModularPipeline"}
IDEOGRAM4: Options = {**TEXT_FIRST, "processors": (), "image_last": True}
IDEOGRAM4 |= {"lengths": vision_lengths}
QWEN21: Options = {**FUSED, "unit": 32, "in_parts": True, "needs": "QwenImage21Pipeline"}

MODULAR = (
    ModularRow("FLUX.3", flux3, guider_set, **GUIDED),
    ModularRow(
        "FLUX.3, reference images", flux3, with_references, references=3 * 2 + 4 * 4, **GUIDED
    ),
    ModularRow(
        "FLUX.3, distilled",
        distilled_flux3,
        distilled,
        needs="Flux3DistilledModularPipeline",
        **FLUX3,
    ),
    Row("Ideogram 4", ideogram4, scheduled, needs="Ideogram4Pipeline", **IDEOGRAM4),
    ModularRow(
        "Ideogram 4, modular",
        ideogram4_blocks,
        scheduled,
        needs="Ideogram4ModularPipeline",
        **IDEOGRAM4,
    ),
    Row("Qwen-Image 2.1", qwen21, in_turn, in_turn=True, **QWEN21),
    Row(
        "Qwen-Image 2.1, no cache",
        qwen21,
        partial(in_turn, use_kv_cache=False),
        in_turn=True,
        **QWEN21,
    ),
    ModularRow("Qwen-Image 2.1, modular", qwen21_blocks, guider_set, in_turn=True, **QWEN21),
    ModularRow(
        "Qwen-Image 2.1 Turbo",
        partial(tiny_blocks, "QwenImage21TurboAutoBlocks"),
        distilled,
        **QWEN21,
    ),
    LatentsRow(
        "MiniMax-H3",
        h3,
        partial(distilled, num_inference_steps=3),  # which are two calls of the model
        **{**FUSED, "unit": 32, "cell": 32},
        frames=37,
        image_last=True,
        between=2 * round(124 / 24 * 40),  # of both channels' sound
        lengths=prompt_lengths,
        images_option=None,
        batched=False,
        needs="MiniMaxH3ModularPipeline",
    ),
)
