"""HunyuanDiT: cross-attention to BERT followed by T5, with rotated queries."""

from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, join_prompts, read_source
from ...prompts.words import Source
from ..denoiser_call import grid_of_patches
from ..encoders import TextCall
from ..family import NEGATIVE_FIRST, Family
from ..parts import Names

BERT, T5 = 77, 256  # columns, which no option changes


def read_hunyuan_dit(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read BERT in the first columns, then T5. Source: pipeline_hunyuandit.py,
    ``encode_prompt``."""
    pipe = call.pipe
    if call.columns not in (None, BERT + T5):
        raise call.unexplained(f"its two encoders makes {BERT + T5}")
    return [
        join_prompts(
            [
                read_source(pipe.tokenizer, Source.of(text), **filled(BERT)),
                read_source(pipe.tokenizer_2, Source.of(text), **filled(T5)),
            ],
            ("BERT", "T5"),
        )
        for text in texts
    ]


FAMILY = Family(
    name="HunyuanDiT",
    denoisers=("HunyuanDiT2DModel",),
    layers={
        "blocks.*.attn1": ("block", "self"),
        "blocks.*.attn2": ("block", "cross"),
    },
    grid=grid_of_patches,
    half="float16",
    readers={"HunyuanDiT": read_hunyuan_dit},
    guidance=dict.fromkeys(("HunyuanDiTPipeline", "HunyuanDiTControlNetPipeline"), NEGATIVE_FIRST),
    text_options=(),
    names=Names(text_2="encoder_hidden_states_t5"),
)
