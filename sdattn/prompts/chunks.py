"""Prompts longer than CLIP's: how their chunks lie on the token axis.

    read_long_prompt(tokenizer, prompt, 154)  ->  Prompt with 154 columns

CLIP reads 77 tokens. Encoders for longer prompts cut the text's tokens into chunks of up to 75,
encode each by itself and concatenate the states:

    77 columns per chunk, each with its own start, end and padding: Compel with
    ``truncate_long_prompts=False``, sd_embed, code like A1111's.
    75 columns per chunk, with one start before and one end after them all: diffusers' community
    pipelines lpw_stable_diffusion and lpw_stable_diffusion_xl with ``no_boseos_middle=True``.

The number of columns tells the two apart, but not where the chunks end: after 75 tokens, or, in
compel, after the last sentence that fits.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import InvalidValueError, refuse
from ..files.terminal import shown
from .tokenizing import EOS, PAD, SOS, Token, tokenize, with_vectors
from .tokens import Prompt, place_words, warn_of_truncation
from .words import Source

# Where compel ends a chunk, best first; each falls back to the next. Source: compel 2.5,
# embeddings_provider.py, EmbeddingsProvider._find_next_best_split_point.
_ENDS: dict[str, Callable[[str], bool]] = {
    "sentences": lambda token: token == ".</w>",
    "phrases": lambda token: token in (".</w>", ",</w>", ";</w>", ":</w>"),
    "words": lambda token: token.endswith("</w>"),
}
SPLITS = ("tokens", *_ENDS)


def read_long_prompt(
    tokenizer: Any, prompt: str, n_columns: int, *, split: str | None = None
) -> Prompt:
    """Read a prompt whose text states are longer than the tokenizer's ``model_max_length``.

    Args:
        tokenizer: CLIP's, or another that puts a start and an end around a text.
        prompt: the text, without weights or other syntax.
        n_columns: token columns of the text states, and of the returned :class:`Prompt`.
        split: where a chunk of 77 columns ends: ``"tokens"``, after 75 (sd_embed; compel with
            ``SplitLongTextMode.BRUTAL``), or after the last of the ``"sentences"`` (compel's
            default), ``"phrases"`` or ``"words"`` that fits. Default: tokens or sentences,
            whichever fits the number of columns, if they agree where both do.

    Raises:
        ValueError: the prompt has no word; the number of columns fits no layout; tokens and
            sentences both fit and put words into different columns; no such split.

    Warns with :class:`TruncationWarning` of words that were cut off.
    """
    source = with_vectors(tokenizer, Source.of(prompt))
    read = read_chunks(tokenizer, source, n_columns, split)
    warn_of_truncation(read)
    return read


def read_chunks(tokenizer: Any, source: Source, n_columns: int, split: str | None) -> Prompt:
    """Read likewise a text that has been rewritten, without a warning."""
    if split not in (None, *SPLITS):
        raise refuse("split", split, SPLITS)
    most = tokenizer.model_max_length
    pieces = tokenize(tokenizer, source, add_special_tokens=False, verbose=False)
    n_chunks, rest = divmod(n_columns, most)
    if n_chunks > 0 and not rest:
        return _separate(tokenizer, source, pieces, n_chunks, split)
    if n_chunks > 0 and (n_columns - 2) % (most - 2) == 0:
        return place_words(tokenizer, source, _in_a_row(tokenizer, pieces, n_columns))
    raise InvalidValueError(
        f"Asked for the words of {shown(source.prompt, 60)} on {n_columns} token columns, which "
        f"fits no layout: the tokenizer makes {most}, long prompts a multiple of {most} (compel, "
        f"sd_embed) or of {most - 2} plus 2 (lpw with no_boseos_middle). Pass the pipeline "
        "that ran or its own tokenizer, or labels, which name the columns of each word."
    )


def _separate(
    tokenizer: Any, source: Source, pieces: list[Token], n_chunks: int, split: str | None
) -> Prompt:
    """Lay out chunks with a start and an end each; those after the end of the text are empty."""
    room = tokenizer.model_max_length - 2
    start, end, pad = _specials(tokenizer)
    laid = {}
    for way in SPLITS[:2] if split is None else (split,):
        chunks = _cut(pieces, room, way)
        if way == "tokens" or split or len(chunks) <= n_chunks:  # compel itself never truncates
            chunks = [*chunks, *([[]] * n_chunks)][:n_chunks]
            tokens = list[Token]()
            for one in chunks:
                tokens += [start, *one, end, *[pad] * (room - len(one))]
            laid[way] = place_words(tokenizer, source, tokens)
    first, *others = laid.values()
    for other in others:
        if other.words != first.words:
            pairs = zip(first.words, other.words, strict=True)
            word, twin = next(pair for pair in pairs if pair[0] != pair[1])
            raise InvalidValueError(
                f"{shown(source.prompt, 60)} on {n_chunks} chunks of {room + 2} columns: "
                f"{word.text!r} is at {word.columns} where chunks are cut after {room} tokens "
                f"(sd_embed), and at {twin.columns} where they are cut after a sentence (compel). "
                'Pass split="tokens" or split="sentences".'
            )
    return first


def _cut(pieces: Sequence[Token], room: int, split: str) -> list[list[Token]]:
    ways = list(_ENDS)[SPLITS.index(split) - 1 :] if split in _ENDS else []
    chunks = []
    rest = list(pieces)
    while len(rest) > room:
        end = room
        for way in ways:
            ends = [i + 1 for i, token in enumerate(rest[:room]) if _ENDS[way](token.text)]
            if ends:
                end = ends[-1]
                break
        chunks.append(rest[:end])
        rest = rest[end:]
    return [*chunks, rest]


def _in_a_row(tokenizer: Any, pieces: list[Token], n_columns: int) -> list[Token]:
    """Lay out the whole text between one start and one end, which comes after the padding
    (lpw_stable_diffusion.py, ``pad_tokens_and_weights``)."""
    start, end, pad = _specials(tokenizer)
    pieces = pieces[: n_columns - 2]
    padding = [pad] * (n_columns - 2 - len(pieces))
    closing = [end, *padding] if pad.id == end.id else [*padding, end]
    return [start, *pieces, *closing]


def _specials(tokenizer: Any) -> tuple[Token, Token, Token]:
    return (
        Token(tokenizer.bos_token_id, tokenizer.bos_token, 0, 0, SOS),
        Token(tokenizer.eos_token_id, tokenizer.eos_token, 0, 0, EOS),
        Token(tokenizer.pad_token_id, tokenizer.pad_token, 0, 0, PAD),
    )
