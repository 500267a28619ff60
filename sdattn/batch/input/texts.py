"""Lines of text: prompts, and other content of text files."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ...errors import InvalidValueError
from ...files.terminal import shown
from .values import Fields

DELIMITERS = "\t,;|"
# Options of AUTOMATIC1111's "prompts from file" script that mean the same here.
_A1111 = {
    "steps": "num_inference_steps",
    "cfg_scale": "guidance_scale",
    **{name: name for name in ("prompt", "negative_prompt", "seed", "width", "height")},
}
_BEGINS = re.compile(
    r"\s*--(?:[a-z]+_[a-z_]+|prompt|seed|steps|width|height|styles|tiling|guidance|negative)"
    r"(?=[\s=]|$)",
    re.IGNORECASE,
)
# In the middle of a line: a name with an underscore, or one with a number, also Midjourney's.
_INSIDE = re.compile(
    r"\s((?:--|\u2014|\u2013)(?:[a-z]+_[a-z_]+(?=[\s=]|$)|prompt[ =]+[\"']|(?:seed|steps|width"
    r"|height|guidance|ar|aspect|v|version|niji|stylize|s|chaos|c|quality|q|iw|sw|weird|w|stop"
    r"|repeat|r|W|H)[ =]+[\"']?-?[0-9]))"
)
_NEGATIVE = re.compile(r"\s*(?i:negative[ _]prompt):|.*\sNegative prompt: ")
_SETTING = re.compile(
    r"(?:^|[,\s])((?:Steps|Seed|CFG scale|Clip skip|Size)(?=: [0-9])"
    r"|(?:Sampler|Model hash|Schedule type)(?=: ))"
)
_COLUMN = re.compile(r"[^\W\d][\w .:-]{0,39}")
_QUOTED = re.compile('"[^"]*"')
_PROMPT_COLUMN = re.compile(r"prompts?", re.IGNORECASE)
_COMMON = re.compile(
    r"captions?|text|.*prompts?|prompt.*|positive|negative|id|.*_id|name|category|seed|challenge"
    r"|note|width|height|steps|file_?name|url|style|label|description",
    re.IGNORECASE,
)


def text_lines(lines: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a text, each with its number, from 1.

    An image's settings, as AUTOMATIC1111 writes them, are joined with its prompt above them.
    """
    start, settings = 0, False
    for end, raw in enumerate([*lines, b""], 1):
        text = raw.decode(errors="replace") if b":" in raw else ""
        is_last = _is_settings(text)
        settings = settings or is_last or bool(_NEGATIVE.match(text))
        if is_last or not raw.strip():
            block = lines[start:end]
            if settings:
                yield start + 1, b"".join(block)
            else:
                yield from enumerate(block, start + 1)
            start, settings = end, False


def _is_settings(text: str) -> bool:
    return len({*_SETTING.findall(text)}) > 1


def of_text(text: str) -> Fields:
    """Return the fields of a line of text, usually only the prompt; raise InvalidValueError if it
    is JSON, settings of an image, or options."""
    text = text.rstrip("\r\n")
    is_row = False
    with suppress(ValueError, RecursionError):  # an object without it may be meant as a prompt
        is_row = text.lstrip().startswith("{") and "prompt" in json.loads(text)
    if is_row:
        raise InvalidValueError(
            "it is a JSON object that names prompt. Name the file .jsonl or write the prompt alone."
        )
    if ":" in text and (_is_settings(text) or any(map(_NEGATIVE.match, text.splitlines()))):
        raise InvalidValueError(
            "it holds the settings of an image (Negative prompt:, Steps:). Write it as JSON in a "
            ".jsonl file: prompt, negative_prompt, seed, num_inference_steps, guidance_scale."
        )
    if "\r" in text:
        raise InvalidValueError(
            "there is a carriage return in the middle of it. End every line in the same way."
        )
    if _BEGINS.match(text):
        return _of_options(text)
    if found := _INSIDE.search(text):
        raise InvalidValueError(
            f"it holds an option, {re.split('[ =]', found[1])[0]}, which would be drawn as words. "
            "Write the line as JSON, in a .jsonl file, or leave the option out."
        )
    return Fields({"prompt": text})


def _of_options(text: str) -> Fields:
    """Return the fields of ``--prompt "a cat" --steps 20``."""
    found: dict[str, list[str]] = {}
    try:
        for word in shlex.split(text):
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                name = _A1111.get(name, name)
                if name in found:
                    raise InvalidValueError(f"{shown(word)} occurs twice. Write it once.")
                found[name] = [value] if equals else []
            else:
                next(reversed(found.values())).append(word)
    except ValueError as error:
        raise InvalidValueError(
            f"its options cannot be read: {str(error).rstrip('.')}. Put quotes around a text."
        ) from None
    return Fields({name: " ".join(words) for name, words in found.items()})


def header_delimiter(lines: Sequence[str]) -> str | None:
    """Return the delimiter of a table, or None if the first line that is not blank is no header."""
    first = lines[0].strip("\r\n") if lines else ""
    for delimiter in DELIMITERS:
        names = [name.strip('" ') for name in first.split(delimiter)]
        are_names = all(map(_COLUMN.fullmatch, names)) and len({*names}) == len(names)
        if not are_names or not (delimiter == "\t" or _are_words(names)):
            continue
        if len(names) == 1:
            # alone it is a prompt of one word
            return "," if len(lines) > 1 and _PROMPT_COLUMN.fullmatch(names[0]) else None
        if any(map(_PROMPT_COLUMN.fullmatch, names)) or _is_table(lines, names, delimiter):
            return delimiter
    return None


def _is_table(lines: Sequence[str], names: Sequence[str], delimiter: str) -> bool:
    """Check that all lines have the columns of a first line, which may be a header."""
    if len(lines) < 2 or f"{delimiter} " in lines[0]:
        return False
    is_wide = delimiter == "\t"
    if not any(map(_COMMON.fullmatch, names)) and not (is_wide and _are_words(names)):
        return False
    plain = lines if is_wide else [_QUOTED.sub("", line) for line in lines]
    return {line.count(delimiter) for line in plain} == {len(names) - 1}


def _are_words(names: Sequence[str]) -> bool:
    return all(map(str.isidentifier, names))
