"""Quoted text that ByT5 reads in addition to the encoder of the whole prompt, as in HunyuanImage
2.1 and HunyuanVideo 1.5."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..prompts.tokenizing import PAD, Token, filled, tokenize
from ..prompts.tokens import Prompt, place_words
from ..prompts.words import Source
from .encoders import TextCall, refuse_mixed_masks, zeros


def read_with_glyphs(
    call: TextCall,
    texts: list[str],
    whole: Callable[[str], Source],
    quoted: Callable[[str], Source | None],
    several: str,
) -> list[Prompt]:
    """Read ByT5's tokens of the quoted text, then the whole prompt's without the template's start,
    then the padding of both: the order in which the transformers put them.

    Args:
        whole: function from a prompt to the text that its tokenizer gets.
        quoted: function from a prompt to ByT5's text, or None if it gets none and columns are
            zeros.
        several: option for several images or videos per prompt; refused for prompts whose quoted
            texts differ in length, since columns are ordered by masks.
    """
    pipe = call.pipe
    drop = pipe.prompt_template_encode_start_idx
    lengths = pipe.tokenizer_max_length, pipe.tokenizer_2_max_length
    read, n_glyphs = [], set()
    for text in texts:
        every = tokenize(pipe.tokenizer, whole(text), **filled(lengths[0] + drop))
        encoded = [tuple(token.id for token in every)]
        glyphs, source = list(zeros(lengths[1])), quoted(text)
        if source is not None:
            glyphs = tokenize(pipe.tokenizer_2, source, **filled(lengths[1]))
            encoded.append(tuple(token.id for token in glyphs))
        n_glyphs.add(sum(not is_padding(token) for token in glyphs))
        tokens = sorted((*glyphs, *every[drop:]), key=is_padding)  # else in their order
        prompt = place_words(pipe.tokenizer, Source.of(text), tokens)
        read.append(replace(prompt, encoded=tuple(encoded)))
    refuse_mixed_masks(call, several, n_glyphs)
    return read


def is_padding(token: Token) -> bool:
    return token.special == PAD


def glyph_text(text: str, found: Iterable[re.Match[str]]) -> Source | None:
    """Return ByT5's text, ``Text "red". Text "cat". `` for a prompt with two quoted pieces, each
    the non-empty group of its match; None if there is none."""
    parts = [
        Source(text, match[match.lastindex or 0], tuple(range(*match.span(match.lastindex or 0))))
        for match in found
    ]
    if not parts:
        return None
    parts = [part.within('Text "', '". ') for part in parts]
    joined = "".join(part.text for part in parts)
    return Source(text, joined, tuple(origin for part in parts for origin in part.origins))
