"""Prompts to token columns, as each pipeline reads them before its text encoder.

Columns are the ones in the ``encoder_hidden_states`` that the denoiser gets.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidValueError
from ..prompts.tokens import Prompt, read_labels, warn_of_truncation
from .encoders import TextCall
from .families import reader_of
from .pipeline import Options, Pipeline
from .values import check_text


def read_prompts(
    pipe: Pipeline,
    prompts: str | Mapping[str, Sequence[int]] | Prompt | Sequence[Any],
    columns: int | None = None,
    *,
    negative: bool = False,
    split: str | None = None,
    **options: Any,
) -> list[Prompt]:
    """Read prompts as a pipeline's text encoders see them, see :func:`sdattn.read_prompt`.

    Args:
        pipe: diffusers pipeline that a family reads; for labels, any pipeline.
        prompts: one prompt or all of a run, in order: texts; labels, ``{"cat": [2], "red dog": [4,
            5]}``, if the text states were made elsewhere; or prompts already read.
        columns: token columns of the text states; default: as many as the pipeline makes with these
            options. Labels need it.
        negative: True for negative prompts, which Sana reads without its instruction.
        split: where the chunks of a long CLIP prompt end, see
            :func:`sdattn.prompts.chunks.read_long_prompt`.
        options: options of the pipeline's call. ``max_sequence_length``, ``clean_caption`` and
            ``complex_human_instruction`` count; options that give the text encoder another text are
            refused.

    Returns:
        One :class:`sdattn.Prompt` each.

    Raises:
        TypeError: a pipeline that no family reads.
        ValueError: a prompt without a word or longer than :data:`~.values.LONGEST`; columns that
            cannot be explained; an option that changes the text; labels out of range; or two
            tokenizers (SDXL) that put a word into different columns.

    Warns:
        TruncationWarning: words were cut off; the message names them.
    """
    given = [prompts] if isinstance(prompts, str | Mapping | Prompt) else list(prompts)
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    read: list[Prompt] = []
    for text in texts:
        check_text(text, "negative prompt" if negative else "prompt")
    if texts:
        _check_options(texts, options, negative)
        read = reader_of(pipe)(TextCall(pipe, columns, options, negative, split), texts)
    for prompt in read:
        warn_of_truncation(prompt)
    found = []
    for each in given:
        found.append(read.pop(0) if isinstance(each, str) else _ready(each, columns))
    return found


def _ready(prompt: object, columns: int | None) -> Prompt:
    """Return a prompt that needs no tokenizer: labels, or one already read."""
    if isinstance(prompt, Mapping):
        if columns is None:
            raise InvalidValueError(
                f"The labels {dict(prompt)} name token columns, and it is not known how many "
                "there are. Pass columns=, the length of the text states."
            )
        return read_labels(prompt, columns)
    if not isinstance(prompt, Prompt):
        raise InvalidValueError(f"Asked to read {prompt!r}. Pass a text, labels or a Prompt.")
    if columns not in (None, len(prompt.tokens)):
        raise InvalidValueError(
            f"The text states have {columns} token columns, and {prompt.text!r} was read with "
            f"{len(prompt.tokens)}. Read it with the pipeline and the options of this run."
        )
    return prompt


def _check_options(texts: list[str], options: Options, negative: bool) -> None:
    """Refuse options that give a text encoder another text."""
    before = "negative_prompt" if negative else "prompt"
    for name in (f"{before}_2", f"{before}_3", f"{before}_4"):
        other = options.get(name)
        if other is not None and any(text != other for text in texts) and other != texts:
            raise InvalidValueError(
                f"{name}={other!r} is another text than {texts}, so that a token column would "
                "belong to a word of each. Leave it out, or pass labels."
            )
    if options.get("caption_upsample_temperature") is not None:
        raise InvalidValueError(
            "caption_upsample_temperature has the pipeline rewrite the prompt before it is read. "
            "Call pipe.upsample_prompt yourself and pass what it gives as the prompt."
        )
