"""UNets with self- and cross-attention: Stable Diffusion 1, 2 and XL, Kolors, LCM, AnimateDiff.

``attn1`` and ``attn2`` are in the down, mid and up blocks: SD 1.x has 16 pairs (2 in each of 3 down
blocks, 1 mid, 3 in each of 3 up blocks), so 32 layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ...prompts.words import Source
from ..denoiser_call import head_count, innermost, unwrapped
from ..encoders import TextCall, read_clip
from ..family import Family
from ..layers import PLACES, AttentionLayer, Kind
from ..parts import (
    NEGATIVE_FIRST,
    NEGATIVE_FIRST_IN_CALL,
    Edits,
    Guidance,
    ImageLatents,
    Names,
    Order,
    standardised,
    vae_latents,
)
from ..pipeline import Given, Model, Pipeline

_CHATGLM = 256  # columns of Kolors' texts: encode_prompt's own


def is_unet(model: Model) -> bool:
    """Check whether a denoiser is a UNet, with resolutions and down, mid and up blocks."""
    model = unwrapped(model)
    # processors are asked of the class, since the property walks through the whole model
    return hasattr(model, "down_blocks") and hasattr(type(model), "attn_processors")


class UNets(Family):
    """UNets of any class, recognised by their blocks."""

    def recognises(self, model: Model) -> bool:
        return is_unet(model) and not self.video

    def find_layers(self, model: Model, modules: Mapping[str, Module]) -> list[AttentionLayer]:
        found = super().find_layers(model, modules)
        return sorted(found, key=lambda layer: PLACES.index(layer.place))

    def describe(self, model: Model, name: str, module: Module) -> AttentionLayer:
        place = next((place for place in PLACES if name.startswith(place)), None)
        if getattr(module, "add_k_proj", None) is not None:
            why = "its keys belong to text and image, its queries to the image alone"
            raise self.unknown_layer(name, module, f"{why} (as in DeepFloyd IF and Kandinsky 2)")
        if place is None or not hasattr(module, "to_q"):
            raise self.unknown_layer(name, module)
        # down_blocks.0 is at full resolution, and up_blocks.0 at the lowest.
        deepest = self.levels(model) - 1
        block = int(name.split(".")[1]) if place != "mid" else 0
        level = {"down": block, "mid": deepest, "up": deepest - block}[place]
        kind: Kind = "cross" if module.is_cross_attention else "self"
        if ".motion_modules." in f".{name}.":
            kind = "temporal"
        elif ".fuser." in f".{name}.":  # GLIGEN
            kind = "grounded"
        elif ".ctrl_" in f".{name}":  # ControlNet-XS
            kind = "control"
        return AttentionLayer(name, place, kind, level, head_count(module), module)

    def levels(self, model: Model) -> int:
        return len(model.config.block_out_channels)

    def frame_rows(self, given: Given) -> int:
        return int(given["sample"].shape[2]) if self.video else 1

    def image_columns(self, model: Model, given: Given, _batch: int) -> int:
        text = given[self.names.text]
        images = text[1:] if isinstance(text, tuple) else ()
        return _image_columns(model, images, given.get("added_cond_kwargs") or {})


def _image_columns(model: Model, images: Sequence[list[Tensor]], added: Given) -> int:
    """Return the number of columns of all image prompts: tokens per image times images."""
    if images:  # a bare UNet that was given them beside the text, [B, images, tokens, width] each
        return sum(states.shape[1] * states.shape[2] for states in images[0])
    embeds = added.get("image_embeds")  # [B, images, ...] of each adapter
    if embeds is None:
        return 0
    # the first layer with some: a walk through the whole model at each call is slow
    inner = (innermost(getattr(part, "processor", None)) for part in model.modules())
    tokens = next((found.num_tokens for found in inner if hasattr(found, "num_tokens")), ())
    several = isinstance(embeds, (list, tuple))
    counts = [states.shape[1] for states in embeds] if several else [1]
    return sum(count * each for count, each in zip(counts, tokens, strict=False))


def cells(_model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid of a latent ``[B, C, (frames,) rows, cols]``."""
    return tuple(given["sample"].shape[2:])


def _encode(pipe: Pipeline, pixels: Tensor) -> Tensor:
    """Encode to ``z * scale`` or ``(z - mean) / std * scale``, as image-to-image pipelines do."""
    latents = vae_latents(pipe.vae, pixels)
    if getattr(pipe.vae.config, "latents_mean", None) is not None:
        latents = standardised(pipe, latents)
    return latents * pipe.vae.config.scaling_factor


def read_chatglm(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read prompts padded on the left, then two start tokens, then the text.

    Sources: pipeline_kolors.py, ``__call__``, whose ``max_sequence_length`` has no effect;
    kolors/tokenizer.py, ``ChatGLMTokenizer``.
    """
    call.check(_CHATGLM, "any max_sequence_length")
    tokenizer = _Marked(call.pipe.tokenizer)
    return [read_source(tokenizer, Source.of(text), **filled(_CHATGLM)) for text in texts]


class _Marked:
    """Tokenizer that marks special tokens: ChatGLM's own mask knows no padding and no start."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __call__(self, text: str, **options: object) -> dict[str, Any]:
        encoded = dict(self._tokenizer(text, **options))
        own = self._tokenizer.get_prefix_tokens()
        seen = encoded["attention_mask"]
        start = len(seen) - sum(seen)
        ids = encoded["input_ids"]
        ends = start + len(own) if ids[start : start + len(own)] == own else start
        encoded["special_tokens_mask"] = [int(i < ends) for i in range(len(ids))]
        return encoded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


_READ_CLIP = """
StableDiffusion StableUnCLIP SDXL LatentConsistencyModel TextToVideo VideoToVideoSD
LEditsPP SemanticStableDiffusion CycleDiffusion AltDiffusion
"""  # SDXL: community pipelines
_NEGATIVE_FIRST = """
StableDiffusionPipeline StableDiffusionImg2ImgPipeline StableDiffusionInpaintPipeline
StableDiffusionDepth2ImgPipeline StableDiffusionControlNetPipeline
StableDiffusionControlNetImg2ImgPipeline StableDiffusionControlNetInpaintPipeline
StableDiffusionAdapterPipeline StableDiffusionXLPipeline StableDiffusionXLImg2ImgPipeline
StableDiffusionXLInpaintPipeline StableDiffusionXLControlNetPipeline
StableDiffusionXLControlNetImg2ImgPipeline StableDiffusionXLControlNetInpaintPipeline
StableDiffusionXLControlNetUnionPipeline StableDiffusionXLControlNetUnionImg2ImgPipeline
StableDiffusionXLControlNetUnionInpaintPipeline StableDiffusionXLAdapterPipeline
LatentConsistencyModelPipeline LatentConsistencyModelImg2ImgPipeline KolorsPipeline
KolorsImg2ImgPipeline StableDiffusionLDM3DPipeline StableDiffusionControlNetXSPipeline
StableDiffusionXLControlNetXSPipeline PAGMixin
"""  # PAGMixin: also of the PAG pipelines of transformers
# Pipelines that make their image from noise and prompts alone.
TEXT_TO_IMAGE = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
# Those that keep to their call whether they are guided
_IN_CALL = """
StableDiffusionUpscalePipeline StableDiffusionDiffEditPipeline StableDiffusionGLIGENPipeline
"""
_ANIMATEDIFF = """
AnimateDiffPipeline AnimateDiffControlNetPipeline AnimateDiffSDXLPipeline
AnimateDiffSparseControlNetPipeline AnimateDiffVideoToVideoPipeline
AnimateDiffVideoToVideoControlNetPipeline
"""
# [prompt and image, image only, neither]: Brooks et al. 2022, section 3.2.1.
_THREE_WAY: Order = ("conditional", None, "unconditional")

FAMILIES = (
    UNets(
        name="UNets with self- and cross-attention in down, mid and up blocks: SD 1.x, 2.x, SDXL, "
        "Kolors",
        denoisers=("UNet2DConditionModel",),
        half="float16",
        grid=cells,
        patch=1,
        names=Names(latents="sample"),
        readers={**dict.fromkeys(_READ_CLIP.split(), read_clip), "Kolors": read_chatglm},
        guidance={
            **dict.fromkeys(_NEGATIVE_FIRST.split(), NEGATIVE_FIRST),
            **dict.fromkeys(_IN_CALL.split(), NEGATIVE_FIRST_IN_CALL),
            "StableDiffusionInstructPix2PixPipeline": Guidance(_THREE_WAY),
            "StableDiffusionXLInstructPix2PixPipeline": Guidance(_THREE_WAY, known_by="variable"),
            # a chunk for each prompt that edits (Brack et al. 2023)
            "SemanticStableDiffusionPipeline": replace(
                NEGATIVE_FIRST_IN_CALL, further="enabled_editing_prompts"
            ),
            # the second call of a step has latents that are blurred (Hong et al. 2023)
            "StableDiffusionSAGPipeline": replace(NEGATIVE_FIRST_IN_CALL, once=True),
        },
        image_latents=ImageLatents(
            pipelines={name: {"guidance_scale": 1.0} for name in TEXT_TO_IMAGE},
            encode=_encode,
            noise="diffusion",
            invertible=True,
        ),
        edits=Edits(pipelines=TEXT_TO_IMAGE),
    ),
    # Guo et al. 2023: frames are consecutive rows of the batch, each with the attention of an
    # image. Only the motion modules attend across frames; they are not captured.
    UNets(
        name="AnimateDiff",
        denoisers=("UNetMotionModel",),
        half="float16",
        grid=cells,
        video=True,
        patch=1,
        names=Names(latents="sample"),
        readers={"AnimateDiff": read_clip, "PIA": read_clip},
        guidance=dict.fromkeys(_ANIMATEDIFF.split(), NEGATIVE_FIRST),
    ),
)
