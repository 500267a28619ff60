"""Parts that readers of prompts share: the call, CLIP with its chunks, zeros, refusals.

A reader takes a :class:`TextCall` and texts, one prompt each. Most pipelines are read by
:func:`.encode_prompt.read_encoded`; each family's own file names the readers of the others, see
:mod:`sdattn.models.families`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InvalidTypeError, InvalidValueError, OptionError
from ..prompts.chunks import read_chunks
from ..prompts.tokenizing import NO_LIMIT, PAD, Token, filled, with_vectors
from ..prompts.tokens import Prompt, read_source
from ..prompts.words import Source
from .call_options import call_options, option_of
from .pipeline import Options, Pipeline

PLACEHOLDER = "\ue000"  # a private character, for the place of the prompt in a template


@dataclass(frozen=True)
class TextCall:
    """Call of a pipeline whose prompts are read: the arguments of ``read_prompts``."""

    pipe: Pipeline
    columns: int | None
    options: Options
    negative: bool = False
    split: str | None = None

    def option(self, name: str) -> Any:
        """Return an option of the pipeline's call."""
        return option_of(self.pipe, self.options, name)

    def source(self, tokenizer: Any, text: str) -> Source:
        """Return the prompt, with its textual inversions if the pipeline converts them."""
        converts = hasattr(self.pipe, "maybe_convert_prompt")
        return with_vectors(tokenizer, Source.of(text)) if converts else Source.of(text)

    def check(self, columns: int, by: str) -> None:
        """Refuse (ValueError) text states of another number of columns than ``by`` makes."""
        if self.columns not in (None, columns):
            raise self.unexplained(f"{by} makes {columns}")

    def unexplained(self, found: str) -> ValueError:
        """Return the error for a number of columns that the pipeline cannot have made."""
        return InvalidValueError(
            f"The text states have {self.columns} token columns, and a {type(self.pipe).__name__} "
            f"with {found}. Pass the prompts and options of this very run, or labels."
        )


Reader = Callable[[TextCall, list[str]], list[Prompt]]


def refuse_unknown(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Refuse prompts of a pipeline that no family reads, or that reads them unlike the family whose
    name it begins with."""
    raise InvalidTypeError(
        f"sdattn does not know how a {type(call.pipe).__name__} reads its prompts, so the columns "
        f"of {texts[0]!r} are unknown. Pass labels, for example {{'cat': [2]}}, and columns=; or, "
        "if it only pads the prompt, the result of sdattn.read_prompt(tokenizer, prompt)."
    )


def read_clip(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read CLIP's prompts, filled up to its 77 columns or in chunks; SDXL's two encoders share
    columns. Raise TypeError if the pipeline has no tokenizer."""
    held = (getattr(call.pipe, name, None) for name in ("tokenizer", "tokenizer_2"))
    tokenizers = [tokenizer for tokenizer in held if tokenizer is not None]  # SDXL's refiner: one
    if not tokenizers:
        raise InvalidTypeError(
            f"This {type(call.pipe).__name__} has no tokenizer, so words are unknown. Pass labels, "
            'for example {"cat": [2]}, and columns=.'
        )
    read = [_clip_columns(call, tokenizers[0], text) for text in texts]
    # A column has a row of either encoder's states, so both must put each word into the same ones.
    for other in tokenizers[1:]:
        for i, text in enumerate(texts):
            twin = _clip_columns(call, other, text)
            check_agreement(read[i], twin)
            read[i] = replace(read[i], encoded=read[i].encoded + twin.encoded)
    return read


def _clip_columns(call: TextCall, tokenizer: Any, text: str) -> Prompt:
    source = call.source(tokenizer, text)
    most = tokenizer.model_max_length
    if most >= NO_LIMIT:
        raise InvalidValueError(
            f"The {type(tokenizer).__name__} has no model_max_length, to which CLIP's prompts are "
            "filled up. Get the folder of the model's tokenizer again, tokenizer_config.json above "
            "all, or set tokenizer.model_max_length."
        )
    if call.columns is None or call.columns == most:
        return read_source(tokenizer, source, **filled(most))
    return read_chunks(tokenizer, source, call.columns, call.split)


def check_agreement(prompt: Prompt, twin: Prompt) -> None:
    spans = [(word.start, word.end) for word in prompt.words]
    if spans != [(word.start, word.end) for word in twin.words]:
        raise InvalidValueError(
            f"The pipeline's tokenizers disagree on the words of {prompt.text!r}: "
            f"{[word.text for word in prompt.words]} and {[word.text for word in twin.words]}. "
            "Load a textual inversion into both."
        )
    for word, other in zip(prompt.words, twin.words, strict=True):
        if word.columns != other.columns:
            raise InvalidValueError(
                f"The pipeline's tokenizers disagree on {prompt.text!r}: {word.text!r} is at "
                f"columns {word.columns} for one and {other.columns} for the other. Use "
                "tokenizers that split words alike."
            )


def rendered(text: str, render: Callable[[str], str]) -> Source:
    """Return the prompt inside the text that a chat template makes of it; raise ValueError if the
    template rewrites the prompt."""
    # The template puts the same around a private character as around the prompt, which is
    # checked: templates may rewrite their input.
    before, _, after = render(PLACEHOLDER).partition(PLACEHOLDER)
    source = Source.of(text)
    found = render(text)
    for inner in (source, source.strip()):
        whole = inner.within(before, after)
        if whole.text == found:
            return whole
    raise InvalidValueError(
        f"The pipeline's chat template rewrites the prompt {text!r} to {found!r}. Leave out what "
        "has a special meaning there, or pass labels."
    )


def filled_to_longest(
    call: TextCall, read: list[Prompt], by: str = "", *, unit: int = 1, or_more: bool = False
) -> list[Prompt]:
    """Fill prompts with columns of zeros up to the longest of the batch, in multiples of ``unit``;
    raise ValueError if the text states have another number, which ``by`` explains. They may have
    ``or_more``, if a longer text ran with these."""
    texts = [one.text for one in read]
    longest = max(len(one.tokens) + -len(one.tokens) % unit for one in read)
    columns = longest if call.columns is None else call.columns
    is_longer = columns > longest and columns % unit == 0
    if columns != longest and not (or_more and is_longer):
        makes = f"{by} makes {longest} of {texts}" if by else f"{texts} makes {longest}"
        more = ", or more" if or_more else ""
        raise call.unexplained(f"{makes}, as many as the longest needs{more}")
    return zero_filled(read, columns)


def zeros(length: int) -> tuple[Token, ...]:
    """Return columns of zeros, which come from no token."""
    return (Token(-1, PAD, 0, 0, PAD),) * length


def zero_filled(prompts: list[Prompt], length: int) -> list[Prompt]:
    """Return the prompts followed by columns of zeros, up to a length."""
    return [replace(one, tokens=one.tokens + zeros(length - len(one.tokens))) for one in prompts]


def refuse_rewriting(call: TextCall, option: str, how: str) -> None:
    """Refuse a prompt that the pipeline rewrites with an option; ``how`` is the way to its text.
    An older diffusers lacks some of these options, and rewrites nothing."""
    if option in {**call_options(call.pipe), **call.options} and call.option(option):
        raise InvalidValueError(
            f"A {type(call.pipe).__name__} rewrites the prompt before it is read. {how}, pass that "
            f"as the prompt, and {option}=False, to the run and here."
        )


def refuse_mixed_masks(call: TextCall, option: str, lengths: Iterable[int]) -> None:
    """Refuse several images or videos for each of several prompts of different lengths:
    ``encode_prompt`` repeats masks in another order than text states."""
    number = call.options.get(option) or 1
    if number > 1 and len(set(lengths)) > 1:
        text = (
            f"a {type(call.pipe).__name__} mixes up the masks of prompts whose texts differ in "
            "length. Make one per prompt, or run each prompt by itself."
        )
        raise OptionError(option, number, text)
