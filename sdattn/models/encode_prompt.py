"""Prompts to token columns by the pipeline's own ``encode_prompt``, see :mod:`.stand_ins`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import InvalidTypeError, InvalidValueError, MissingPackageError
from ..prompts.tokenizing import PAD, TEMPLATE, Token, tokenize
from ..prompts.tokens import Prompt, join_prompts, place_words
from ..prompts.words import Source, empty_prompt
from .call_options import call_options
from .encoders import PLACEHOLDER, TextCall, check_agreement, filled_to_longest, zeros
from .stand_ins import Column, Encoded, Overheard, Tokenized, overhear

# Options of a pipeline's call that its encode_prompt may take too
_OPTIONS = (
    *("max_sequence_length", "clean_caption", "complex_human_instruction", "system_prompt"),
    "prompt_template",
)


def read_encoded(
    call: TextCall,
    texts: list[str],
    *,
    most: int | None = None,
    before: int = 0,
    encoders: Sequence[str] = (),
    negative_apart: bool = False,
    masked: bool = False,
    unit: int = 1,
    or_more: bool = False,
) -> list[Prompt]:
    """Read prompts as the pipeline's own ``encode_prompt`` does.

    Args:
        most: largest ``max_sequence_length`` that the pipeline takes.
        before: columns of the model's own, which belong to no token, before the text.
        encoders: names of the text encoders, if they follow each other on the token axis.
        negative_apart: True if a negative prompt is encoded differently.
        masked: True if the model drops padding and fills up to the longest prompt of the batch.
        unit, or_more: how the model fills up shorter prompts, see :func:`filled_to_longest`.

    Raises:
        TypeError: an ``encode_prompt`` that cannot be followed.
        ValueError: a prompt that it rewrites, or another number of columns than it makes.
    """
    for text in texts:
        if not text.strip():
            raise empty_prompt(text)
    known = {**call_options(call.pipe), **call.options}
    options = {name: known[name] for name in _OPTIONS if name in known}
    asked: int | None = options.get("max_sequence_length")
    is_apart = call.negative and negative_apart
    encoded = partial(_Reading, call, texts, negative=is_apart)
    reading = encoded(options)
    made = before + len(reading.columns[0])
    is_given = "max_sequence_length" in call.options
    if asked and call.columns and not (is_given or masked or or_more):
        other = asked + call.columns - made  # what the run was given
        if other != asked and 1 <= other <= (most or other):
            reading = encoded({**options, "max_sequence_length": other})
    read = [reading.read(i, encoders, masked) for i in range(len(texts))]
    if before:
        read = [join_prompts([Prompt(one.text, (), zeros(before)), one]) for one in read]
    by = "encode_prompt" if asked is None else f"`max_sequence_length={asked}`"
    if masked or or_more:
        return filled_to_longest(call, read, by, unit=unit, or_more=or_more)
    if any(call.columns not in (None, len(one.tokens)) for one in read):
        found = f"{by} makes {made} of {texts!r}"
        if asked and most:
            found += f", and {made - asked + most} is the most there can be"
        raise call.unexplained(found)
    return read


def read_each_encoded(call: TextCall, texts: list[str], **options: Any) -> list[Prompt]:
    """Read likewise prompts of a pipeline that takes one at a time."""
    return [read_encoded(call, [text], **options)[0] for text in texts]


class _Reading:
    """Texts as one call of a pipeline's ``encode_prompt`` reads them."""

    def __init__(
        self, call: TextCall, texts: list[str], options: dict[str, Any], *, negative: bool
    ):
        self._call = call
        self._texts = texts
        self._options = options
        self._negative = negative
        self._heard = self._overhear(texts)
        self._around: list[tuple[str, str]] | None = None  # templates, once they are needed
        if not self._heard.outputs:
            raise self._unknown("it returned no states of a text encoder")
        self.columns = self._heard.outputs[-1 if negative else 0]

    def _overhear(self, texts: list[str]) -> Overheard:
        pipe = self._call.pipe
        try:
            return overhear(pipe, texts, self._options, negative=self._negative)
        except Exception as error:
            # most pipelines of Wan use ftfy without asking whether it is there
            if isinstance(error, NameError) and "ftfy" in str(error):
                raise MissingPackageError(
                    f"A {type(pipe).__name__} cleans its prompts with ftfy, which is not "
                    "installed. Install it: pip install 'sdattn[video]'"
                ) from error
            raise self._unknown(f"{type(error).__name__}: {error}") from error

    def _unknown(self, why: str) -> TypeError:
        return InvalidTypeError(
            f"The encode_prompt of this {type(self._call.pipe).__name__} could not be followed "
            f"({why}), so the columns of {self._texts[0]!r} are unknown. Pass labels, for example "
            "{'cat': [2]}, and columns=."
        )

    def read(self, i: int, encoders: Sequence[str], masked: bool) -> Prompt:
        """Return a text's prompt, ``masked`` without the columns of its padding."""
        text = self._texts[i]
        columns = self.columns[i]
        if masked:
            columns = [column for column in columns if column and self._is_seen(*column[0])]
        groups: list[tuple[list[int], list[Column]]] = []  # columns of the same encoders
        for column in columns:
            rows = [row for row, _ in column]
            if not groups or (rows and rows != groups[-1][0]):
                groups.append((rows, []))
            groups[-1][1].append(column)
        parts = []
        for rows, own in groups:
            part = Prompt(text, (), zeros(len(own)))
            for number, row in enumerate(rows):
                twin = self._place(text, row, [column[number:][:1] for column in own])
                if number:
                    check_agreement(part, twin)
                    twin = replace(part, encoded=part.encoded + twin.encoded)
                part = twin
            parts.append(part)
        return parts[0] if len(parts) == 1 else join_prompts(parts, encoders)

    def _is_seen(self, row: int, number: int) -> bool:
        seen = self._heard.encoded[row].seen
        return seen is None or bool(seen[number])

    def _place(self, text: str, row: int, columns: list[Column]) -> Prompt:
        """Place a text's words on columns that come from a row of an encoder's call."""
        encoded = self._heard.encoded[row]
        tokenizer, source, tokens = self._tokens(encoded, text)
        (zero,) = zeros(1)
        placed = [tokens[column[0][1]] if column else zero for column in columns]
        # padding at the end that gives no columns is left out: its length is not the text's
        used = [column[0][1] for column in columns if column]
        used += [k for k, token in enumerate(tokens) if token.special != PAD]
        ids = tuple(encoded.ids[: max(used) + 1])
        return replace(place_words(tokenizer, source, placed), encoded=(ids,))

    def _tokens(self, encoded: Encoded, text: str) -> tuple[Any, Source, list[Token]]:
        """Return the tokens of an encoder's row, with the tokenizer and the source of its text."""
        found = [(one, _index(encoded.ids, one.ids)) for one in self._heard.tokenized]
        held = [(one, start) for one, start in found if start is not None]
        held.sort(key=lambda pair: len(pair[0].ids), reverse=True)
        for one, start in held:
            source = self._source(one, text)
            if source is None:
                continue
            options: dict[str, Any] = {"truncation": True, "max_length": len(one.ids)}
            for name in ("add_special_tokens", "padding_side"):
                if name in one.options:
                    options[name] = one.options[name]
            if one.options.get("padding"):
                options["padding"] = "max_length"
            own = tokenize(one.tokenizer, source, **options)
            if [token.id for token in own] == one.ids:
                return one.tokenizer, source, _with_rest(one.tokenizer, encoded, own, start)
        raise self._rewritten(text, held[0][0].text if held else "")

    def _source(self, tokenized: Tokenized, text: str) -> Source | None:
        """Return the prompt inside a text that was tokenized, or None if it is another text."""
        rewritings = list(self._rewritings(tokenized.tokenizer, text))
        for source in rewritings:
            if source.text == tokenized.text:
                return source
        # The pipeline puts the same around a private character as around the prompt.
        if self._around is None:
            noted = self._overhear([PLACEHOLDER])
            pieces = [one.text.partition(PLACEHOLDER) for one in noted.tokenized]
            self._around = [(before, after) for before, found, after in pieces if found]
        for before, after in self._around:
            for source in rewritings:
                whole = source.within(before, after)
                if whole.text == tokenized.text:
                    return whole
        return None

    def _rewritings(self, tokenizer: Any, text: str) -> Iterator[Source]:
        """Yield a prompt in the ways that pipelines leave it: as it is, without outer spaces, in
        lower case, with single spaces."""
        source = self._call.source(tokenizer, text)
        stripped = source.strip()
        yield from (source, stripped, source.lower().strip())
        kept = [match.start() for match in re.finditer(r"\S|\s(?!\s)", stripped.text)]
        spaced = "".join(" " if stripped.text[i].isspace() else stripped.text[i] for i in kept)
        yield Source(text, spaced, tuple(stripped.origins[i] for i in kept))

    def _rewritten(self, text: str, found: str) -> ValueError:
        """Return the error for a prompt that the pipeline rewrites."""
        for before, after in self._around or ():
            found = found.removeprefix(before).removesuffix(after)
        advice = ""
        if self._options.get("clean_caption"):
            advice = ", or `clean_caption=False` to the run and here"
        return InvalidValueError(
            f"A {type(self._call.pipe).__name__} reads {found!r} for the prompt {text!r}. Pass "
            f"that as the prompt{advice}; or labels, for example {{'cat': [2]}}, and columns=."
        )


def _index(ids: list[int], part: list[int]) -> int | None:
    """Return where a part of some ids begins in them, or None."""
    for start in range(len(ids) - len(part) + 1):
        if ids[start : start + len(part)] == part:
            return start
    return None


def _with_rest(tokenizer: Any, encoded: Encoded, own: list[Token], start: int) -> list[Token]:
    """Return an encoder's tokens: a text's own, and the padding or template around them."""
    ids = encoded.ids
    pad = tokenizer.pad_token_id
    seen = encoded.seen or [number != pad for number in ids]
    rest = []
    for i in (*range(start), *range(start + len(own), len(ids))):
        (spelled,) = tokenizer.convert_ids_to_tokens([ids[i]])
        rest.append(Token(ids[i], spelled, 0, 0, TEMPLATE if seen[i] else PAD))
    return [*rest[:start], *own, *rest[start:]]
