"""Qwen-Image 2.1: one stream, in which the image attends to the text and itself, and the text to
itself alone; after the first step the text's keys come from a cache."""

from collections.abc import Sequence

from ...attention.joint_processor import Spans
from ...errors import InvalidTypeError
from ...prompts.tokens import Prompt
from ..encoders import TextCall, filled_to_longest, in_template, padded_in_front, read_inside
from ..family import IN_TURN, Family
from ..pipeline import Given, Model

SYSTEM = "Comprehend and analyze the provided prompt."
TEMPLATE = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def read_qwen21(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3-VL inside a template without its system message, padded with zeros to the longest
    prompt in the batch. Source: pipeline_qwenimage21.py, ``_get_qwen_prompt_embeds``."""
    if call.options.get("image") is not None:
        raise _of_images(type(call.pipe).__name__)
    processor = call.pipe.processor
    message = [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}]
    (system,) = processor.apply_chat_template(message, tokenize=True, return_dict=False)
    sources = map(in_template(TEMPLATE), texts)
    read = read_inside(processor.tokenizer, sources, drop=len(system))
    longest = max(len(one.encoded[0]) for one in read)
    read = padded_in_front(read, longest, processor.tokenizer.pad_token_id)
    return filled_to_longest(call, read)


def _of_images(name: str) -> InvalidTypeError:
    return InvalidTypeError(
        f"A {name} was given images, whose tokens stand among the text's, so which column is which "
        "token is not known. Draw from the text alone."
    )


def _grid(model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid from ``img_shapes``, per row the (frames, rows, cols) of its images, the
    generated one last."""
    *images, own = given["img_shapes"][0]
    if images:
        raise _of_images(type(model).__name__)
    return tuple(own)


def _spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    """Return the spans: the text, then the image; no other layer of the text is watched."""
    batch, length, _ = given["encoder_hidden_states"].shape
    return [(slice(length, length + cells), slice(0, length))] * batch


FAMILY = Family(
    name="Qwen-Image 2.1",
    denoisers=("QwenImage21Transformer2DModel",),
    layers={"transformer_blocks.*.attn": ("single", "joint")},
    joined="text first",
    grid=_grid,
    spans=_spans,
    caches_text=True,
    timestep_unit=1000.0,
    patch=1,
    size_unit=32,
    readers={"QwenImage21": read_qwen21},
    guidance=dict.fromkeys(("QwenImage21Pipeline", "QwenImage21TurboModularPipeline"), IN_TURN),
    text_options=("image",),
    preset="joint",
)
