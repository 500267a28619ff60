"""HiDream-I1: joint attention, the image first, with T5 and twice with Llama."""

from collections.abc import Sequence
from dataclasses import replace

from ...attention.joint_processor import Spans
from ...errors import InvalidValueError
from ...prompts.tokenizing import filled
from ...prompts.tokens import Prompt, join_prompts, read_source
from ...prompts.words import Source
from ..denoiser_call import grid_of_patches, unwrapped
from ..encoders import TextCall
from ..family import NEGATIVE_FIRST, Family
from ..parts import Names
from ..pipeline import Given, Model


def read_hidream(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read T5, then Llama's last layer and the block's own layer, with the same number of columns
    each; the CLIPs give one pooled vector. Source: pipeline_hidream_image.py,
    ``_get_t5_prompt_embeds`` and ``_get_llama3_prompt_embeds``; transformer_hidream_image.py,
    ``forward``."""
    asked = int(call.option("max_sequence_length"))
    length, rest = (asked, 0) if call.columns is None else divmod(call.columns, 3)
    if rest or not length or call.options.get("max_sequence_length") not in (None, length):
        raise call.unexplained(f"`max_sequence_length={asked!r}` makes {3 * asked}")
    read = []
    for text in texts:
        t5, llama = (
            read_source(
                tokenizer, Source.of(text), **filled(min(length, tokenizer.model_max_length))
            )
            for tokenizer in (call.pipe.tokenizer_3, call.pipe.tokenizer_4)
        )
        joined = join_prompts([t5, llama, llama], ("T5", "Llama", "Llama, the block's layer"))
        read.append(replace(joined, encoded=t5.encoded + llama.encoded))
    return read


def _grid(model: Model, given: Given) -> tuple[int, ...]:
    if given["hidden_states"].ndim != 4:
        raise InvalidValueError(
            "HiDream was called with patches that were cut elsewhere, whose grid is not known. "
            "Call it with latents [B, C, rows, cols], as its pipeline does."
        )
    return grid_of_patches(model, given)


def _spans(model: Model, given: Given, cells: int) -> Sequence[Spans]:
    """Return the spans. Patches of images that are not square are padded to the largest number."""
    rows, cols = given["hidden_states"].shape[-2:]
    start = cells if rows == cols else unwrapped(model).max_seq
    t5, llama = given["encoder_hidden_states_t5"], given["encoder_hidden_states_llama3"]
    end = start + t5.shape[1] + 2 * llama.shape[2]
    return [(slice(0, cells), slice(start, end))] * len(given["hidden_states"])


FAMILY = Family(
    name="HiDream-I1",
    denoisers=("HiDreamImageTransformer2DModel",),
    layers={
        "double_stream_blocks.*.block.attn1": ("double", "joint"),
        "single_stream_blocks.*.block.attn1": ("single", "joint"),
    },
    joined="image first",
    grid=_grid,
    spans=_spans,
    names=Names(timestep=("timesteps",), text="encoder_hidden_states_t5"),
    readers={"HiDreamImage": read_hidream},
    preset="joint",
    guidance={"HiDreamImagePipeline": NEGATIVE_FIRST},
)
