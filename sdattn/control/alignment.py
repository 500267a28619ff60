"""Alignment of a source prompt's token columns with an edited prompt's.

Source: Hertz et al. 2022, section 3.2, "Word Swap" and "Adding a New Phrase". The paper aligns
tokens; here words are aligned, so that a word of several pieces is never torn apart.
"""

from collections.abc import Sequence
from itertools import chain, groupby

import torch
from torch import Tensor

from ..errors import InvalidValueError, NotFoundError
from ..prompts.tokenizing import EOS, PAD, SOS, TEMPLATE
from ..prompts.tokens import Prompt, Word


def swap(source: Prompt, target: Prompt) -> Tensor:
    """Return each source column's shares of the target's columns, float32 ``[T, T]``; rows sum to
    1.

    The n-th word goes to the n-th word: column to column if both have the same number, else in
    equal parts to all of them. Start, end, padding and a chat template's text go to their
    counterparts, any surplus to the last of these; columns without a counterpart go to the target's
    last padding, or to its end. Raise ValueError for another number of words or columns.
    """
    _check_columns(source, target)
    if len(source.words) != len(target.words):
        raise InvalidValueError(
            f"Replacing goes word by word, and {source.text!r} has {len(source.words)} words, "
            f"{target.text!r} has {len(target.words)}. Use refine, which aligns the words that "
            "both share."
        )
    pairs = [(a.columns, b.columns) for a, b in zip(source.words, target.words, strict=True)]
    # Words first. A word of three pieces that becomes one of two gives each of the new pieces half
    # of each of the old.
    dealt = torch.zeros(len(source.tokens), len(target.tokens))
    for ours, theirs in pairs:
        if len(ours) == len(theirs):
            dealt[list(ours), list(theirs)] = 1
        for column in ours if len(ours) != len(theirs) > 0 else ():
            dealt[column, list(theirs)] = 1 / len(theirs)
    # Then all others, column by column; a surplus goes to the last of its kind.
    for ours, theirs in _around(source, target):
        for place, column in enumerate(ours if theirs else ()):
            dealt[column, theirs[min(place, len(theirs) - 1)]] = 1
    last = _special(target, PAD)[-1:] or _special(target, EOS) or (len(target.tokens) - 1,)
    left_over = dealt.sum(1) == 0  # padding, and words that the target's encoder did not see
    dealt[left_over, last[0]] = 1
    return dealt / dealt.sum(1, keepdim=True)  # a token may belong to two words


def refine(source: Prompt, target: Prompt) -> Tensor:
    """Return the source column of each target column's attention, int64 ``[T]``; -1 for something
    new.

    Words are aligned so that as many as possible match in order (Needleman and Wunsch 1970, with 1
    for a match and 0 for a gap). Start and end match; padding and a chat template's text match by
    place. Raise ValueError for another number of columns.
    """
    _check_columns(source, target)
    taken = torch.full((len(target.tokens),), -1)
    pairs = [(source.words[i].columns, target.words[j].columns) for i, j in matches(source, target)]
    for ours, theirs in [*pairs, *_around(source, target)]:
        for column, wanted in zip(ours, theirs, strict=False):
            taken[wanted] = column
    return taken


def matches(source: Prompt, target: Prompt) -> list[tuple[int, int]]:
    """Return (source word, target word) for the longest sequence that both prompts share."""
    ours, theirs = _spelled(source.words), _spelled(target.words)
    # best[i][j]: how many words match at most from source word i and target word j on.
    best = [[0] * (len(theirs) + 1) for _ in range(len(ours) + 1)]
    for i in reversed(range(len(ours))):
        for j in reversed(range(len(theirs))):
            met = best[i + 1][j + 1] + 1 if ours[i] == theirs[j] else 0
            best[i][j] = max(met, best[i + 1][j], best[i][j + 1])
    found = []
    i = j = 0
    # Go forward along a path with that number; if there are two, skip the source's word first.
    while i < len(ours) and j < len(theirs):
        if ours[i] == theirs[j] and best[i][j] == best[i + 1][j + 1] + 1:
            found.append((i, j))
            i, j = i + 1, j + 1
        elif best[i + 1][j] >= best[i][j + 1]:
            i += 1
        else:
            j += 1
    return found


def linked(
    source: Prompt, target: Prompt, *, in_place: bool = False
) -> list[tuple[int | None, int | None]]:
    """Return (source word, target word) pairs that correspond for a reader, None for no
    counterpart.

    Shared words correspond; so do, in order, the words between them if both sides have the same
    number. With ``in_place`` the n-th word corresponds to the n-th, as in :func:`swap`.
    """
    ends = [] if in_place else matches(source, target)
    found: list[tuple[int | None, int | None]] = []
    i = j = 0
    for x, y in [*ends, (len(source.words), len(target.words))]:
        # Between two matches, equally many words on both sides correspond in order.
        if x - i == y - j:
            found += zip(range(i, x), range(j, y), strict=True)
        else:
            found += [*((n, None) for n in range(i, x)), *((None, n) for n in range(j, y))]
        if x < len(source.words):
            found.append((x, y))
        i, j = x + 1, y + 1
    return found


def is_swap(source: Prompt, target: Prompt) -> bool:
    """Check whether the prompts match best word by word, each in the other's place."""
    if len(source.words) != len(target.words):
        return False
    in_place = zip(_spelled(source.words), _spelled(target.words), strict=True)
    return sum(a == b for a, b in in_place) == len(matches(source, target))


def edited_words(prompts: Sequence[Prompt], index: int, weighted: Sequence[str] = ()) -> list[str]:
    """Return, for one of the prompts, the words that an edit from ``prompts[0]`` is about: first
    words that the source and the target do not share, then its words among ``weighted``."""
    source, *targets = prompts
    if index:
        shared = {j for _, j in matches(source, prompts[index])}
    else:
        shared = set.intersection(*({i for i, _ in matches(source, target)} for target in targets))
    new = [word.text for i, word in enumerate(prompts[index].words) if i not in shared]
    return list(dict.fromkeys([*new, *(word for word in weighted if _has(prompts[index], word))]))


def blended_words(prompts: Sequence[Prompt], words: str | Sequence[str]) -> list[list[str]]:
    """Return each prompt's words among ``words``, or the word in the place of one that it lacks;
    raise KeyError for a word that is in no prompt, or a prompt with none of them."""
    words = [words] if isinstance(words, str) else list(words)
    for word in words:
        if not any(_has(prompt, word) for prompt in prompts):
            known = dict.fromkeys(entry.text for prompt in prompts for entry in prompt.words)
            raise NotFoundError(
                f"{word!r} is in none of the prompts. Their words: {', '.join(known)}."
            )
    chosen = []
    for prompt in prompts if words else ():
        own = [word if _has(prompt, word) else _twin(prompts, prompt, word) for word in words]
        kept = list(dict.fromkeys(word for word in own if word))
        if not kept:
            raise NotFoundError(
                f"None of the words {words} is in {prompt.text!r}, nor is a word in the "
                f"place of one. Its words are: {', '.join(word.text for word in prompt.words)}."
            )
        chosen.append(kept)
    return chosen


def _has(prompt: Prompt, word: str) -> bool:
    try:
        return bool(prompt.find(word))
    except KeyError:
        return False


def _twin(prompts: Sequence[Prompt], prompt: Prompt, word: str) -> str | None:
    """Return the word of ``prompt`` in the place of ``word`` in a prompt that it is a swap of."""
    for other in prompts:
        spelled = _spelled(other.words)
        if word.casefold() in spelled and is_swap(other, prompt):
            return prompt.words[spelled.index(word.casefold())].text
    return None


def _spelled(words: Sequence[Word]) -> list[str]:
    return [word.text.casefold() for word in words]


def _around(source: Prompt, target: Prompt) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return corresponding columns of both prompts that belong to no word, in order: start, end,
    each encoder's padding, and a template's text on either side."""
    ends = [(_special(source, name), _special(target, name)) for name in (SOS, EOS)]
    padding = [_runs(_special(prompt, PAD)) for prompt in (source, target)]
    if len(padding[0]) != len(padding[1]):  # an encoder that has none in one of the prompts
        padding = [[tuple(chain(*runs))] for runs in padding]
    templates = zip(_template(source), _template(target), strict=True)
    return [*ends, *zip(*padding, strict=True), *templates]


def _runs(columns: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Group consecutive columns: SD3's padding of CLIP, then T5's."""
    groups = groupby(enumerate(columns), key=lambda pair: pair[1] - pair[0])
    return [tuple(column for _, column in run) for _, run in groups]


def _template(prompt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
    columns = _special(prompt, TEMPLATE)
    first = min((column for word in prompt.words for column in word.columns), default=0)
    return tuple(c for c in columns if c < first), tuple(c for c in columns if c >= first)


def _special(prompt: Prompt, name: str) -> tuple[int, ...]:
    return tuple(i for i, token in enumerate(prompt.tokens) if token.special == name)


def _check_columns(source: Prompt, target: Prompt) -> None:
    if len(source.tokens) != len(target.tokens):
        raise InvalidValueError(
            f"{source.text!r} has {len(source.tokens)} token columns and {target.text!r} has "
            f"{len(target.tokens)}. Read both with the tokenizer of one pipeline."
        )
