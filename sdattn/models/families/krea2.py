"""Krea 2: one stream of joint attention, the text first, padded in its middle."""

from dataclasses import replace

from ...prompts.tokenizing import TEMPLATE, Token, filled
from ...prompts.tokens import Prompt, join_prompts
from ...prompts.words import Source
from ..denoiser_call import grid_of_ids
from ..encoders import TextCall, read_inside
from ..family import IN_TURN, Family
from ..pipeline import Given, Model


def read_krea2(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3-VL after a system message that is dropped, padded, with the end of the user's turn
    after the padding. Source: pipeline_krea2.py, ``get_text_hidden_states``."""
    tokenizer, length, template = call.pipe.tokenizer, call.length(), "prompt_template_encode"
    before, after = (call.setting(f"{template}_{part}") for part in ("prefix", "suffix"))
    drop = call.setting(f"{template}_start_idx")
    options = filled(length + drop - call.setting(f"{template}_num_suffix_tokens"))
    ids = tokenizer([after])["input_ids"][0]
    suffix = tuple(Token(one, tokenizer.convert_ids_to_tokens(one), 0, 0, TEMPLATE) for one in ids)
    sources = [Source.of(text).within(before, "") for text in texts]
    return [
        replace(
            join_prompts([own, Prompt(own.text, (), suffix)]), encoded=((*own.encoded[0], *ids),)
        )
        for own in read_inside(tokenizer, sources, drop, **options)
    ]


def _grid(model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid from ``position_ids`` ``[T + N, (0, row, col)]``, the text first."""
    n_text = given["encoder_hidden_states"].shape[1]
    return grid_of_ids(model, {"img_ids": given["position_ids"][n_text:]})


FAMILY = Family(
    name="Krea 2",
    denoisers=("Krea2Transformer2DModel",),
    layers={
        "text_fusion.*.attn": ("block", "text"),
        "transformer_blocks.*.attn": ("single", "joint"),
    },
    joined="text first",
    grid=_grid,
    grid_argument="position_ids",
    timestep_unit=1000.0,
    patch=2,  # cut by the pipeline
    readers={"Krea2": read_krea2},
    guidance=dict.fromkeys(("Krea2Pipeline", "Krea2TurboModularPipeline"), IN_TURN),
    preset="joint",
)
