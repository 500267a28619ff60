"""``run.json`` read: whole, as it was written, and with every entry that reading it relies on.

read_info(files, where)      the document, or an error that names the file, the entry and what to do
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..maps.presets import Preset
from .packing import CHECKSUM, FORMAT, FURTHER, MAPS, STEPS, sealed

# What an entry holds. A tuple: one of these; [one]: a list of them, [one, two]: a list of so many;
# {str: one}: any names; other names must be there, unless they end in "?".
_NUMBER, _NUMBERS, _SIZE = (int, float), [int], [int, int]
_KEPT = ("mean", "last", "all", _NUMBERS, [(int, float)], None)
_PRESET = {
    "name": str,
    "places": [str],
    "or_all?": bool,
    "cells?": (int, None),
    "least_cells?": int,
    "deepest?": (int, None),
    "steps?": (str, [_NUMBER, _NUMBER]),
    "each_head?": bool,
    "among_words?": bool,
    "contrast?": _NUMBER,
    "sigma?": _NUMBER,
}
_EDITED = {
    "prompt": str,
    "targets": [str],
    "mode": str,
    "cross_replace_steps": (_NUMBER, [_NUMBER], {str: (_NUMBER, [_NUMBER])}),
    "self_replace_steps": (_NUMBER, [_NUMBER]),
    "blend": ([[str]], None),
    "weights": {str: _NUMBER},
}
_RUN = {
    "prompt": str,
    "words": [{"text": str, "start": int, "end": int, "columns": _NUMBERS}],
    "tokens": [{"id": int, "text": str, "start": int, "end": int, "special": str}],
    "columns": _NUMBERS,
    "preset": _PRESET,
    "passes": int,
    "layers": {str: {"place": str, "level": int, "heads": int, "grid": _SIZE}},
    "self_attention": (_SIZE, None),
    "details": {"steps": (_NUMBERS, None), "heads": ("all", _NUMBERS, None), "columns": _NUMBERS},
    "more": {str: {"text": str, "maps": [[str, _NUMBERS]]}},
    "files": {str: str},
    "truncated?": [str],
    "seed?": (int, None),
    "model?": str,
    "pipeline?": str,
    "scheduler?": str,
    "options?": {},
    "options_left_out?": [str],
    "device?": str,
    "dtype?": str,
    "timesteps?": [_NUMBER],
    "captured?": {"steps": _KEPT, "heads": _KEPT},
    "versions?": {str: str},
    "size?": _SIZE,
    "asked?": str,
    "edited?": _EDITED,
    "explained?": {"way": str, "timesteps": _NUMBERS},
    "id?": str,
    "line?": int,
    "fingerprint?": str,
}


def read_info(files: Mapping[str, bytes], where: str) -> dict[str, Any]:
    """``run.json``, checked.

    Args:
        files: a run's, by their paths.
        where: they come from, for errors.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no run's of this version, not what was written, or lacks an entry or
            holds another kind of thing there; the message names both.
    """
    if "run.json" not in files:
        raise missing(where, "run.json")
    try:
        info = json.loads(files["run.json"].decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}/run.json is corrupt: {error}. {_DO}") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        found = info.get("format") if isinstance(info, dict) else type(info).__name__
        raise ValueError(
            f"{where}/run.json is not of this version's format {FORMAT!r}; found {found!r}."
        )
    if not isinstance(info.get("files"), dict):
        raise ValueError(f"{where}/run.json is corrupt: it names no files. {_DO}")
    if not _is_as_written(info, files["run.json"]):
        raise ValueError(
            f"{where}/run.json is not what this run wrote: its own checksum differs. {_DO}"
        )
    for problem in _problems(info):
        raise ValueError(f"{where}/run.json: {problem}. {_DO}")
    return info


_DO = "Restore it or generate the run again."


def missing(where: str, part: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"{where} has no {part}, so it is no run's folder. Runs are made by `sdattn generate`."
    )


def _is_as_written(info: Mapping[str, Any], data: bytes) -> bool:
    """Runs of the first version have no checksum of their own and end with those of their files."""
    if list(info)[-1] == "files" and CHECKSUM not in info:
        return True
    try:
        return sealed(info) == data
    except ValueError:  # a number in it is not finite
        return False


def _problems(info: Mapping[str, Any]) -> Iterator[str]:
    """What makes a document none of a run: the first entry of the wrong kind, or else all that
    does not fit together."""
    if wrong := next(_wrong(info, _RUN, ""), None):
        yield wrong
        return
    try:
        Preset.from_json(info["preset"])
    except ValueError as error:
        yield f"'preset' cannot be read: {str(error).rstrip('.')}"
    if info["passes"] < 1:
        yield f"'passes' is {info['passes']}, where 1 or more is expected"
    yield from _misplaced(info)
    yield from _unnamed(info)


def _misplaced(info: Mapping[str, Any]) -> Iterator[str]:
    """Words and columns that are not in the prompt."""
    tokens, letters = range(len(info["tokens"])), len(info["prompt"])
    for i, word in enumerate(info["words"]):
        start, end = word["start"], word["end"]
        if not 0 <= start <= end <= letters:
            yield f"'words[{i}]' is at {start} to {end}, and the prompt has {letters} letters"
        if not set(word["columns"]).issubset(tokens):
            yield f"'words[{i}].columns' are {_told(word['columns'])} of {len(tokens)} columns"
    held = info["columns"]
    if len(set(held)) < len(held) or not set(held).issubset(tokens):
        yield f"'columns' are {_told(held)} of {len(tokens)}, where each is there once"


def _unnamed(info: Mapping[str, Any]) -> Iterator[str]:
    """Maps that a document tells of without the checksum of their file."""
    if foreign := info["more"].keys() - {*FURTHER}:
        yield f"'more' has {min(foreign)!r}, which no run of this version has"
    needed = [f"{name}/{MAPS}" for name in info["more"]]
    if info["details"]["steps"] is not None:
        needed.append(STEPS)
    if MAPS in info["files"]:  # else it was saved without maps
        yield from (f"'files' does not name {n}" for n in needed if n not in info["files"])


def _wrong(value: Any, kind: Any, at: str) -> Iterator[str]:
    """What in a value is not of a kind, by its place."""
    if isinstance(kind, tuple):
        found = [next(_wrong(value, one, at), None) for one in kind]
        if all(found):
            yield _is_not(value, kind, at)
    elif isinstance(kind, dict) and isinstance(value, dict):
        yield from _wrong_entries(value, kind, at)
    elif isinstance(kind, list) and isinstance(value, list) and len(kind) in (1, len(value)):
        kinds = kind * len(value) if len(kind) == 1 else kind
        for i, (one, of) in enumerate(zip(value, kinds, strict=True)):
            yield from _wrong(one, of, f"{at}[{i}]")
    elif not _is(value, kind):
        yield _is_not(value, kind, at)


def _is(value: Any, kind: Any) -> bool:
    if isinstance(kind, type):
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return not isinstance(kind, (dict, list)) and bool(value == kind)


def _is_not(value: Any, kind: Any, at: str) -> str:
    return f"{at!r} is {_told(value)}, where {_named(kind)} is expected"


def _wrong_entries(value: Mapping[str, Any], kind: Mapping[Any, Any], at: str) -> Iterator[str]:
    begins = f"{at}." if at else ""
    for name, of in kind.items():
        if name is str:
            for key, one in value.items():
                yield from _wrong(one, of, f"{begins}{key}")
        elif (key := name.removesuffix("?")) in value:
            yield from _wrong(value[key], of, f"{begins}{key}")
        elif key == name:
            yield f"{begins + key!r} is missing"


def _told(value: Any) -> str:
    text = " ".join(json.dumps(value, ensure_ascii=False).split())
    return text if len(text) <= 40 else f"{text[:39]}…"


def _named(kind: Any) -> str:
    if isinstance(kind, tuple):
        return " or ".join(dict.fromkeys(map(_named, kind)))
    if isinstance(kind, list):
        size = "" if len(kind) == 1 else f"{len(kind)} of "
        return f"a list of {size}{_named(kind[0])}"
    if isinstance(kind, dict):
        return "an object"
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(kind) or json.dumps(kind)
