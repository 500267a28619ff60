"""Words of one prompt that correspond to words of another."""

from collections.abc import Collection, Mapping, Sequence

from ..errors import NotFoundError, refuse
from .tokens import Prompt, Word
from .words import folded

_BLENDED = "a word, several, or lists of each prompt's, [['cat'], ['dog']]"


def matches(source: Prompt, target: Prompt) -> list[tuple[int, int]]:
    """Return (source word, target word) for the longest sequence that both prompts share."""
    ours = _spelled(source.words)
    theirs = _spelled(target.words)
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
            i += 1
            j += 1
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
    number. With ``in_place`` the n-th word corresponds to the n-th, as in word swap.
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
        i = x + 1
        j = y + 1
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
        shared = set(range(len(source.words)))
        for target in targets:
            shared &= {i for i, _ in matches(source, target)}
    new = [word.text for i, word in enumerate(prompts[index].words) if i not in shared]
    own = [word for word in weighted if _has(prompts[index], word)]
    return list(dict.fromkeys([*new, *own]))


def blended_words(
    prompts: Sequence[Prompt], words: str | Sequence[str | Sequence[str]]
) -> list[list[str]]:
    """Return each prompt's words among ``words``, or the word in the place of one that it lacks.
    Words of each prompt by itself, ``[["cat"], ["dog"]]``, are taken as they are.

    Raises:
        KeyError: a word that is in no prompt, or a prompt with none of them.
        ValueError: no words, or another number of lists than of prompts.
    """
    given = [words] if isinstance(words, str) else words
    if not isinstance(given, Collection) or isinstance(given, (bytes, Mapping)):
        raise refuse("blend", words, _BLENDED)
    of_all = [word for word in given if isinstance(word, str)]
    if len(of_all) == len(given):
        return _words_of_each(prompts, of_all)
    chosen = [[own] if isinstance(own, str) else own for own in given]
    for own in chosen:
        if not isinstance(own, (list, tuple)) or not own:
            raise refuse("blend", words, _BLENDED)
    if len(chosen) != len(prompts):
        number = f"the words of each of the {len(prompts)} prompts, source first, or words for all"
        raise refuse("blend", words, number)
    for prompt, own in zip(prompts, chosen, strict=True):
        for word in own:
            prompt.find(word)
    return [list(own) for own in chosen]


def _words_of_each(prompts: Sequence[Prompt], words: list[str]) -> list[list[str]]:
    for word in words:
        if not any(_has(prompt, word) for prompt in prompts):
            known = dict[str, None]()
            for prompt in prompts:
                known |= dict.fromkeys(entry.text for entry in prompt.words)
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
        if folded(word) in spelled and is_swap(other, prompt):
            return prompt.words[spelled.index(folded(word))].text
    return None


def _spelled(words: Sequence[Word]) -> list[str]:
    return [folded(word.text) for word in words]
