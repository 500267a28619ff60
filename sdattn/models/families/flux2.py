"""FLUX.2, FLUX.2 klein and FLUX.3: joint attention; prompts inside a chat."""

from torch import Tensor

from ...errors import InvalidValueError
from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ..denoiser_call import grid_of_ids
from ..encoders import TextCall, in_chat, read_inside, rendered
from ..family import Family
from ..parts import IN_TURN, Edits, ImageLatents, vae_latents
from ..pipeline import Pipeline
from .flux import flux_like

UPSAMPLER = "prompt_upsampler"  # the block that replaces the prompt with a caption


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
    latents = pipe._patchify_latents(vae_latents(pipe.vae, pixels))
    norm = pipe.vae.bn
    deviation = (norm.running_var + pipe.vae.config.batch_norm_eps).sqrt()
    return (latents - norm.running_mean[:, None, None]) / deviation[:, None, None]


def read_flux3(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3-VL's chat format, each prompt padded to a multiple of 80 tokens. Source:
    modular_pipelines/flux3/encoders.py, ``_get_qwen3_vl_prompt_embeds``."""
    _refuse_upsampling(call)
    processor = call.pipe.tokenizer
    most = call.option("max_sequence_length")
    unit = call.setting("pad_multiple")
    read = []
    for source in map(in_chat(processor), texts):
        own = read_source(processor.tokenizer, source, truncation=True, max_length=most)
        length = len(own.tokens)
        columns = min(length + -length % unit, most)
        if call.columns not in (None, columns):
            raise call.unexplained(
                f"`max_sequence_length={most!r}` makes {columns} of {source.prompt!r}"
            )
        options = {**filled(columns), "padding_side": "right"}
        read.append(read_source(processor.tokenizer, source, **options))
    return read


def _refuse_upsampling(call: TextCall) -> None:
    """Refuse, before a run, a prompt that a block of the pipeline will replace. After it the
    caption is known, and read."""
    if call.columns is None and UPSAMPLER in call.pipe.blocks.sub_blocks:
        raise InvalidValueError(
            f"The {UPSAMPLER} of this {type(call.pipe).__name__} replaces the prompt with a "
            "caption before it is read. Build the pipeline from blocks without it, "
            f'blocks.sub_blocks.pop("{UPSAMPLER}"), or run it inside capture(): store.heatmaps() '
            "has the caption's words."
        )


_FLUX2 = "Flux2Pipeline Flux2KleinPipeline Flux2KleinInpaintPipeline Flux2ModularPipeline"

FAMILIES = (
    flux_like(
        name="FLUX.2",
        denoisers=("Flux2Transformer2DModel",),
        readers={"Flux2": read_flux2, "Flux2Klein": read_klein},
        text_stream=lambda model, states: model.context_embedder(states),
        guidance=dict.fromkeys(_FLUX2.split(), IN_TURN),
        image_latents=ImageLatents(
            # Flux2Pipeline's guidance_scale is an input of the model, which keeps its default
            pipelines={"Flux2Pipeline": {}, "Flux2KleinPipeline": {"guidance_scale": 1.0}},
            encode=_encode,
            noise="flow",
        ),
        # SD3's times
        edits=Edits(pipelines=("Flux2Pipeline", "Flux2KleinPipeline"), cross=0.3, self_=0.3),
    ),
    # Each mode attends to itself, then text and image to each other.
    Family(
        name="FLUX.3",
        denoisers=("Flux3Transformer2DModel",),
        layers={
            "txt_mode_blocks.*.attn": ("block", "text"),
            "mode_blocks.image.*.attn": ("block", "self"),
            "mode_blocks.image_cond.*.attn": ("block", "control"),
            "single_transformer_blocks.*.attn": ("single", "joint"),
        },
        joined="text first",
        grid=grid_of_ids,
        grid_argument="img_ids",
        timestep_unit=1000.0,
        patch=2,  # cut by the pipelines
        readers={"Flux3": read_flux3},
        guidance={"Flux3DistilledModularPipeline": IN_TURN},  # the other has a guider
        preset="joint",
    ),
)
