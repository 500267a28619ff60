"""Items against the pipeline that will draw them, and jobs that can run in one batch."""

import inspect
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..edit.editing import EditOptions, plan_edit
from ..errors import InvalidValueError
from ..inversion.images import fitted_size
from ..loading.quiet import only_errors
from ..models.facts import PipelineFacts, images_a_prompt, makes_videos
from ..models.pipeline import Options, Pipeline
from ..models.pipeline_call import checked_options
from ..models.reading import read_prompts
from ..models.values import check_text, checked_part, checked_whole
from ..prompts.tokens import Prompt
from ..runs.candidates import decision
from ..runs.explaining import check_explained
from .columns import CHOICE, NUMBERS
from .items import BadLine, Item, number

_WHOLE = (int, int | None)  # annotations of integer options
# Texts that every tokenizer takes as they are: no control character, entity or special token
_PLAIN = re.compile(r"[ -%'-;=?-~]+")
_PHRASE = re.compile(r"[a-z0-9]+( [a-z0-9]+)*")
_SIGN = re.compile(r"[^a-z0-9'\- ]")  # no part of a word
_LONG_TEXT = "a " * 2000
_MARGIN = 2  # tokens that may join with those of a text around


@dataclass(frozen=True, slots=True)
class Job:
    """An item that the pipeline can draw or explain, and its ``options`` without the negative
    prompt; items of one ``shape`` can run in one batch, unless each runs alone."""

    item: Item
    options: Options
    shape: int

    @property
    def is_alone(self) -> bool:
        """Check for an edit, whose prompts are a batch, and for candidates."""
        return self.item.edit_to is not None or "candidates" in self.options


class Checks:
    """Checks of items, a part of the list at a time; each set of options is checked once, and so is
    each text whose words are asked for.

    Args:
        pipe: the pipeline that will draw.
        defaults: options for items that do not have them.
    """

    def __init__(self, pipe: Pipeline, defaults: Options):
        self.pipe = pipe
        self.defaults = dict(defaults)
        self.negative = self.defaults.pop("negative_prompt", None)
        parameters = inspect.signature(pipe.__call__).parameters.values()
        self.kinds = {p.name: p.annotation for p in parameters if p.kind is not p.VAR_KEYWORD}
        self.checked: dict[str, Options | Exception] = {}
        self.shapes: dict[tuple[str, bool, int, bool], int] = {}
        self.words = _Words(pipe, cleans="clean_caption" in self.kinds)
        # Some pipelines pad prompts only to the longest of a batch.
        self.of_length = False
        with suppress(TypeError, ValueError):  # reported for each item that needs it
            lengths = {len(self.words.read(text, {}).tokens) for text in ("a", _LONG_TEXT[:20])}
            self.of_length = len(lengths) > 1

    def check(self, found: Sequence[Item | BadLine]) -> Iterator[Job | BadLine]:
        """Yield each item's job, or why it cannot be drawn, and bad lines as they are."""
        items = [one for one in found if isinstance(one, Item)]
        self.words.count(item.text for item in items if item.words is not None)
        for one in found:
            if isinstance(one, BadLine):
                yield one
                continue
            try:
                yield self._job(one)
            except (ValueError, TypeError, KeyError) as error:
                reason = error.args[0] if error.args else error
                yield BadLine.of(one.line, reason, one.prompt)

    def _job(self, item: Item) -> Job:
        own_options = dict(item.options)
        for name, value in item.options.items():
            if self.kinds.get(name) in _WHOLE:
                own_options[name] = number(value, whole=True)
        negative = item.negative_prompt
        if negative is None and item.image is None:
            negative = self.negative
        item = replace(item, options=own_options, negative_prompt=negative)
        check_text(item.prompt, "prompt")
        check_text(item.text, "prompt")
        check_text(negative or "", "negative prompt")
        key, options = self._options(item)
        columns = 0
        if item.words is not None:
            self.words.check(item.text, item.words, options)
        if self.of_length:
            columns = len(self.words.read(item.text, options).tokens)
        if item.edit_to is not None:  # its prompts run together, and with no other's
            if makes_videos(self.pipe):
                raise InvalidValueError(
                    f"A {type(self.pipe).__name__} makes videos, not images to edit. Leave edit_to "
                    "out."
                )
            if "candidates" in options:
                raise InvalidValueError("candidates is for an image, not an edit. Leave it out.")
            plan_edit(self.pipe, item.prompt, item.edit_to, EditOptions(**item.edit), options)
        shape = (key, negative is not None, columns, item.edit_to is not None)
        return Job(item, options, self.shapes.setdefault(shape, len(self.shapes)))

    def _options(self, item: Item) -> tuple[str, Options]:
        """Return an item's options, checked, and a text that is the same for the same ones."""
        size = None if item.image is None else fitted_size(self.pipe, item.image.size)
        given = {**self.defaults, **item.options}
        if item.negative_prompt is not None:
            given["negative_prompt"] = item.negative_prompt
        # For the negative prompt it only matters whether there is one.
        key = json.dumps(
            [{**given, "negative_prompt": bool(item.negative_prompt)}, size], sort_keys=True
        )
        if key not in self.checked:
            try:
                self.checked[key] = self._checked(given, size)
            except (ValueError, TypeError) as error:
                self.checked[key] = error
        found = self.checked[key]
        if isinstance(found, Exception):
            raise found
        return key, found

    def _checked(self, given: Options, size: tuple[int, int] | None) -> Options:
        if size is not None:
            check_explained(self.pipe, size, **given)
            return given
        choice = {name: given[name] for name in CHOICE if name in given}
        others = {name: value for name, value in given.items() if name not in choice}
        found = checked_options(self.pipe, others, videos=True)
        if (made := images_a_prompt(self.pipe, found)) != 1:
            raise InvalidValueError(
                f"A {type(self.pipe).__name__} makes {made} per item, but an item is one image or "
                "video. Write a line for each."
            )
        found.pop("negative_prompt", None)
        if "decide_at" in choice:
            choice["decide_at"] = checked_part("decide_at", choice["decide_at"])
        count = checked_whole("candidates", choice.get("candidates", 1))
        if count == 1:
            return found
        decision(PipelineFacts(self.pipe), found, choice.get("decide_at"))
        return {**found, **choice, "candidates": count}


class _Words:
    """Checks that words are in their texts and that a pipeline's text encoder sees them.

    Reading a text as the pipeline does takes a millisecond. But a plain text of few enough tokens
    is seen whole, and a phrase between spaces or other signs is in it.
    """

    def __init__(self, pipe: Pipeline, *, cleans: bool):
        self.pipe = pipe
        parts = [getattr(part, "tokenizer", part) for part in pipe.components.values()]
        # A pipeline that cleans captions may drop words.
        self.tokenizers = [] if cleans else [p for p in parts if hasattr(p, "added_tokens_decoder")]
        self.added: list[str] = []
        for part in self.tokenizers:
            added = part.added_tokens_decoder.values()
            self.added += [token.content.lower() for token in added if not token.special]
        self.counts: dict[str, tuple[int, ...]] = {}  # tokens of each plain text, by tokenizer
        self.seen: dict[str, tuple[int, ...]] = {}  # tokens that are seen for sure, by options

    def count(self, texts: Iterable[str]) -> None:
        """Count the tokens of plain texts, which :meth:`check` is asked about next."""
        plain = []
        for text in dict.fromkeys(texts):
            if _PLAIN.fullmatch(text) and not any(word in text.lower() for word in self.added):
                plain.append(text)
        numbers = zip(*(_lengths(part, plain) for part in self.tokenizers), strict=True)
        self.counts = dict(zip(plain, numbers, strict=True)) if plain and self.tokenizers else {}

    def check(self, text: str, words: Sequence[str], options: Options) -> None:
        """Raise KeyError for words that are not in the text, or not seen by the text encoder."""
        unsure = [word.lower() for word in words]
        counts = self.counts.get(text)
        if counts and all(map(int.__le__, counts, self._seen(options))):
            spaced = _SIGN.sub(r" \g<0> ", f" {text.lower()} ")
            unsure = [w for w in unsure if not (_PHRASE.fullmatch(w) and f" {w} " in spaced)]
        if unsure:
            read = self.read(text, options)
            for word in words:
                read.find(word)

    def read(self, text: str, options: Options) -> Prompt:
        """Return a text as the pipeline reads it; truncated words are in the item's row."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read_prompts(self.pipe, text, **options)[0]

    def _seen(self, options: Options) -> tuple[int, ...]:
        """Return the number of tokens, by tokenizer, up to which a text is seen whole."""
        key = json.dumps({n: options[n] for n in options if n not in NUMBERS}, default=repr)
        if key not in self.seen:
            self.seen[key] = (-1,) * len(self.tokenizers)
            with suppress(ValueError, TypeError), only_errors():  # or tell the items' own
                words = self.read(_LONG_TEXT, options).words
                n_seen = sum(bool(word.columns) for word in words)
                if n_seen and all(word.columns for word in words[:n_seen]):
                    text = _LONG_TEXT[: words[n_seen - 1].end]
                    lengths = [_lengths(part, [text])[0] for part in self.tokenizers]
                    self.seen[key] = tuple(length - _MARGIN for length in lengths)
        return self.seen[key]


def _lengths(tokenizer: Any, texts: list[str]) -> list[int]:
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    return [len(ids) for ids in tokenizer(texts, **options)["input_ids"]] if texts else []
