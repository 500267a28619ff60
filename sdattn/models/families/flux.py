"""FLUX.1's architecture: joint attention in blocks of two streams, then of one."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ...errors import InvalidValueError
from ...prompts.tokenizing import PAD, Token, tokenize
from ...prompts.tokens import Prompt, place_words
from ...prompts.words import Source
from ..denoiser_call import grid_of_ids
from ..encode_prompt import read_encoded
from ..encoders import TextCall, refuse_rewriting, refuse_unknown
from ..family import Family
from ..layers import DOUBLE_THEN_SINGLE
from ..parts import IN_TURN, NEGATIVE_FIRST, Edits, ImageLatents, packed, shifted_latents


def read_longcat(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen2.5-VL inside a template whose columns are all dropped. Source:
    pipeline_longcat_image.py, ``_encode_prompt``."""
    pipe = call.pipe
    how = "Call pipe.rewire_prompt(prompt, pipe.device) yourself"
    refuse_rewriting(call, "enable_prompt_rewrite", how)
    call.check(pipe.tokenizer_max_length, "tokenizer_max_length")
    before = pipe.tokenizer(pipe.prompt_template_encode_prefix, add_special_tokens=False)
    after = pipe.tokenizer(pipe.prompt_template_encode_suffix, add_special_tokens=False)
    read = []
    for text in texts:
        tokens = list[Token]()
        for part in _parts(text):
            tokens += tokenize(pipe.tokenizer, part, add_special_tokens=False)
        columns = _filled(call, tokens)
        ids = (token.id for token in columns)
        encoded = (*before["input_ids"], *ids, *after["input_ids"])
        prompt = place_words(pipe.tokenizer, Source.of(text), columns)
        read.append(replace(prompt, encoded=(encoded,)))
    return read


def _parts(text: str) -> Iterator[Source]:
    """Split a prompt into the parts that are tokenized alone."""
    from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation

    parts = split_quotation(text)
    if "".join(part for part, _ in parts) != text:
        raise InvalidValueError(
            f"LongCat-Image mixes up the apostrophes of {text!r} when it looks for quoted text. "
            "Use an apostrophe in at most one word."
        )
    start = 0
    for part, is_quoted in parts:
        for piece in part if is_quoted else [part]:
            end = start + len(piece)
            yield Source(text, piece, tuple(range(start, end)))
            start = end


def _filled(call: TextCall, tokens: list[Token]) -> list[Token]:
    tokenizer = call.pipe.tokenizer
    kept = tokens[: call.pipe.tokenizer_max_length]
    n_pads = call.pipe.tokenizer_max_length - len(kept)
    pads = [Token(tokenizer.pad_token_id, tokenizer.pad_token, 0, 0, PAD)] * n_pads
    return pads + kept if tokenizer.padding_side == "left" else kept + pads


# A family of FLUX.1's architecture
flux_like = partial(
    Family,
    layers=DOUBLE_THEN_SINGLE,
    joined="text first",
    grid=grid_of_ids,
    grid_argument="img_ids",
    timestep_unit=1000.0,
    patch=2,  # cut by the pipelines; the model's own patches are of 1
    preset="joint",
)
_FLUX1 = """
FluxPipeline FluxImg2ImgPipeline FluxInpaintPipeline FluxFillPipeline FluxControlPipeline
FluxControlImg2ImgPipeline FluxControlInpaintPipeline FluxControlNetPipeline
FluxControlNetImg2ImgPipeline FluxControlNetInpaintPipeline FluxKontextPipeline
FluxKontextInpaintPipeline FluxModularPipeline
"""

FAMILIES = (
    # CLIP gives one pooled vector: pipeline_flux.py, _get_t5_prompt_embeds.
    flux_like(
        name="FLUX.1",
        denoisers=("FluxTransformer2DModel",),
        readers={
            "Flux": partial(read_encoded, most=512),
            "FluxPriorRedux": refuse_unknown,
        },
        text_stream=lambda model, states: model.context_embedder(states),
        guidance=dict.fromkeys(_FLUX1.split(), IN_TURN),
        text_argument="prompt_2",  # T5's; CLIP gives no columns
        image_latents=ImageLatents(
            # guidance_scale is an input of the model, which keeps its default
            pipelines={"FluxPipeline": {"true_cfg_scale": 1.0}},
            encode=lambda pipe, pixels: packed(pipe, shifted_latents(pipe, pixels)),
            noise="flow",
        ),
        # The times are SD3's. The layers that matter are at both ends (Avrahami et al. 2024,
        # "Stable Flow"), so that all take part.
        edits=Edits(pipelines=("FluxPipeline",), cross=0.3, self_=0.3),
    ),
    # Without CLIP, and with a mask over T5's padding: pipeline_chroma.py, _get_t5_prompt_embeds.
    flux_like(
        name="Chroma",
        denoisers=("ChromaTransformer2DModel",),
        readers={"Chroma": partial(read_encoded, most=512)},
        guidance=dict.fromkeys(
            ("ChromaPipeline", "ChromaImg2ImgPipeline", "ChromaInpaintPipeline"), IN_TURN
        ),
    ),
    # Bria 3, with T5: pipeline_bria.py, _get_t5_prompt_embeds.
    flux_like(
        name="Bria",
        denoisers=("BriaTransformer2DModel",),
        timestep_unit=1.0,
        patch=1,  # the pipeline counts the cells of 2x2 that it packs
        readers={"BriaFibo": refuse_unknown},
        guidance={"BriaPipeline": NEGATIVE_FIRST},
    ),
    flux_like(
        name="Ovis-Image",
        denoisers=("OvisImageTransformer2DModel",),
        guidance={"OvisImagePipeline": IN_TURN},
    ),
    flux_like(
        name="LongCat-Image",
        denoisers=("LongCatImageTransformer2DModel",),
        grid=partial(grid_of_ids, made=1),
        readers={"LongCatImage": read_longcat, "LongCatImageEdit": refuse_unknown},
        guidance=dict.fromkeys(("LongCatImagePipeline", "LongCatImageEditPipeline"), IN_TURN),
        text_options=("enable_prompt_rewrite",),
    ),
)
