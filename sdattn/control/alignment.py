"""Alignment of a source prompt's token columns with an edited prompt's.

Source: Hertz et al. 2022, section 3.2, "Word Swap" and "Adding a New Phrase". The paper aligns
tokens; here words are aligned, so that a word of several pieces is never torn apart.
"""

import torch
from torch import Tensor

from ..errors import InvalidValueError
from ..prompts.matching import matches
from ..prompts.tokenizing import EOS, PAD, SOS, TEMPLATE
from ..prompts.tokens import Prompt


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
            f"{target.text!r} has {len(target.words)}. `mode='refine'` (AttentionRefine) aligns "
            "the words that both share."
        )
    pairs = [(a.columns, b.columns) for a, b in zip(source.words, target.words, strict=True)]
    # Words first. A word of three pieces that becomes one of two gives each of the new pieces half
    # of each of the old.
    dealt = torch.zeros(len(source.tokens), len(target.tokens))
    for ours, theirs in pairs:
        if len(ours) == len(theirs):
            dealt[list(ours), list(theirs)] = 1
        elif theirs:
            dealt[[[column] for column in ours], list(theirs)] = 1 / len(theirs)
    # Then all others, column by column; a surplus goes to the last of its kind.
    for ours, theirs in _around(source, target):
        if theirs:
            for place, column in enumerate(ours):
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
        for column, other in zip(ours, theirs, strict=False):
            taken[other] = column
    return taken


def _around(source: Prompt, target: Prompt) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return corresponding columns of both prompts that belong to no word, in order: start, end,
    each encoder's padding, and a template's text on either side."""
    start = _special(source, SOS), _special(target, SOS)
    end = _special(source, EOS), _special(target, EOS)
    padding = [_runs(_special(prompt, PAD)) for prompt in (source, target)]
    if len(padding[0]) != len(padding[1]):  # an encoder that has none in one of the prompts
        padding = [[_special(prompt, PAD)] for prompt in (source, target)]
    templates = zip(_template(source), _template(target), strict=True)
    return [start, end, *zip(*padding, strict=True), *templates]


def _runs(columns: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Group consecutive columns: SD3's padding of CLIP, then T5's."""
    runs: list[tuple[int, ...]] = []
    for column in columns:
        if runs and runs[-1][-1] == column - 1:
            runs[-1] += (column,)
        else:
            runs.append((column,))
    return runs


def _template(prompt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
    columns = _special(prompt, TEMPLATE)
    of_words = set[int]().union(*(word.columns for word in prompt.words))
    first = min(of_words, default=0)
    return tuple(c for c in columns if c < first), tuple(c for c in columns if c >= first)


def _special(prompt: Prompt, name: str) -> tuple[int, ...]:
    return tuple(i for i, token in enumerate(prompt.tokens) if token.special == name)


def _check_columns(source: Prompt, target: Prompt) -> None:
    if len(source.tokens) != len(target.tokens):
        raise InvalidValueError(
            f"{source.text!r} has {len(source.tokens)} token columns and {target.text!r} has "
            f"{len(target.tokens)}. Read both with the tokenizer of one pipeline."
        )
