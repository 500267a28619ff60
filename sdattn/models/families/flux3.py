"""FLUX.3: each mode attends to itself, then text and image to each other; prompts inside a chat."""

from ...errors import InvalidValueError
from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, read_source
from ..denoiser_call import grid_of_ids
from ..encoders import TextCall, in_chat
from ..family import IN_TURN, Family

UPSAMPLER = "prompt_upsampler"  # the block that replaces the prompt with a caption


def read_flux3(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3-VL's chat format, each prompt padded to a multiple of 80 tokens. Source:
    modular_pipelines/flux3/encoders.py, ``_get_qwen3_vl_prompt_embeds``."""
    _refuse_upsampling(call)
    processor, most = call.pipe.tokenizer, call.option("max_sequence_length")
    unit, read = call.setting("pad_multiple"), []
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


FAMILY = Family(
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
)
