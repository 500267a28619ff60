"""FLUX.2 and FLUX.2 klein: joint attention; prompts inside a chat."""

from torch import Tensor

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ..encoders import TextCall, in_chat, read_inside, rendered
from ..family import IN_TURN
from ..parts import Edits, ImageLatents, vae_latents
from ..pipeline import Pipeline
from .flux import flux_like


def read_klein(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3's chat format. Source: pipeline_flux2_klein.py, ``_get_qwen3_prompt_embeds``."""
    tokenizer = call.pipe.tokenizer
    sources = map(in_chat(tokenizer, enable_thinking=False), texts)
    return read_inside(tokenizer, sources, **filled(call.length()))


def read_flux2(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Mistral's chat format after a system message. Source: pipeline_flux2.py,
    ``format_input`` and ``_get_mistral_3_small_prompt_embeds``."""
    processor = call.pipe.tokenizer
    tokenizer = getattr(processor, "tokenizer", processor)
    options = filled(call.length())
    system = call.setting("system_message", "DEFAULT_SYSTEM_MESSAGE")

    def render(text: str) -> str:
        roles = {"system": system, "user": text.replace("[IMG]", "")}
        chat = [
            {"role": role, "content": [{"type": "text", "text": content}]}
            for role, content in roles.items()
        ]
        return processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)

    read = []
    for text in texts:
        source = rendered(text, render)
        # A processor adds the start that the template lacks; a bare tokenizer adds nothing.
        begun = tokenizer.bos_token and source.text.startswith(tokenizer.bos_token)
        adds = processor is not tokenizer and not begun
        read.append(read_source(tokenizer, source, add_special_tokens=adds, **options))
    return read


def _encode(pipe: Pipeline, pixels: Tensor) -> Tensor:
    """Encode to patches of 2x2 cells, ``[B, 4 C, rows / 2, cols / 2]``, normalised by the VAE's
    batch norm (pipeline_flux2.py, ``_encode_vae_image``)."""
    latents, norm = pipe._patchify_latents(vae_latents(pipe.vae, pixels)), pipe.vae.bn
    mean, variance = (one[:, None, None] for one in (norm.running_mean, norm.running_var))
    return (latents - mean) / (variance + pipe.vae.config.batch_norm_eps).sqrt()


_PIPELINES = """
Flux2Pipeline Flux2KleinPipeline Flux2KleinInpaintPipeline Flux2ModularPipeline
"""

FAMILY = flux_like(
    name="FLUX.2",
    denoisers=("Flux2Transformer2DModel",),
    readers={"Flux2": read_flux2, "Flux2Klein": read_klein},
    text_stream=lambda model, states: model.context_embedder(states),
    guidance=dict.fromkeys(_PIPELINES.split(), IN_TURN),
    image_latents=ImageLatents(
        # Flux2Pipeline's guidance_scale is an input of the model, which keeps its default
        pipelines={"Flux2Pipeline": {}, "Flux2KleinPipeline": {"guidance_scale": 1.0}},
        encode=_encode,
        noise="flow",
    ),
    edits=Edits(pipelines=("Flux2Pipeline", "Flux2KleinPipeline"), cross=0.3, self_=0.3),  # SD3's
)
