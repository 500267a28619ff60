"""Tokens as ComfyUI's tokenizers give them, and the words of a prompt placed on them.

The spellings of a prompt's tokens, put together, are the prompt, but for what a tokenizer changes
(case, unknown characters). Each token is placed where its bytes stand in the prompt, so words are
the prompt's own, whatever a tokenizer's marks and ComfyUI's word ids are: a word id counts the
weighted parts of a prompt, not its words.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from numbers import Integral
from typing import Any

from sdattn import Prompt
from sdattn.prompts.tokenizing import EOS, PAD, SOS, TEMPLATE, Token
from sdattn.prompts.tokens import place

Tokenize = Callable[[str], dict[str, Any]]  # text -> chunks of (token, weight, word id) by encoder
IMAGE = "<image>"
IMAGE_PADS = ("<|image_pad|>", "<image_soft_token>")
UNKNOWN = b"\xff"  # a byte that no text has
EMBEDDED = b"\xfe"  # another, for a vector of an embedding
EMBEDDING = re.compile(r"embedding:[^\s,()]+")
# Characters for bytes in byte-level vocabularies (CLIP, GPT-2, Qwen, Llama)
_OWN = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _OWN)
_BYTES = {chr(byte): byte for byte in _OWN} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's spelling of a byte


@dataclass(frozen=True)
class Piece:
    """One token that a text encoder gets.

    Attributes:
        id: number in the vocabulary; -1 for an embedding.
        text: spelling in the vocabulary.
        special: as in :class:`sdattn.prompts.tokenizing.Token`, or ``"<image>"``.
        spelled: bytes that it stands for, without spaces.
    """

    id: int
    text: str
    special: str = ""
    spelled: bytes = b""


def read_prompts(tokenizer: Any, tokenize: Tokenize, prompt: str) -> dict[str, Prompt]:
    """Return the prompt as each encoder reads it, with each word's columns. Its text is what was
    tokenized: without weights, if the tokenizer reads them."""
    around = tokenize("")
    texts = list(dict.fromkeys((prompt, _unweighted(prompt))))
    found = {}
    for name, chunks in tokenize(prompt).items():
        part = getattr(tokenizer, f"clip_{name}", None) or getattr(tokenizer, name)
        template = [number for chunk in around[name] for number, _, word in chunk if word]
        pieces = [piece for chunk in chunks for piece in _chunk(part, chunk)]
        pieces = list(_with_template(pieces, template))
        vectors = {  # of each embedding that this encoder has
            text: sum(piece.spelled == EMBEDDED for piece in _alone(part, name, tokenize, text))
            for text in {match for text in texts for match in EMBEDDING.findall(text)}
        }
        found[name] = _placed(texts, pieces, vectors)
    return found


def _alone(part: Any, name: str, tokenize: Tokenize, text: str) -> list[Piece]:
    return [piece for chunk in tokenize(text)[name] for piece in _chunk(part, chunk)]


def _chunk(part: Any, chunk: Sequence[Any]) -> Iterator[Piece]:
    """Yield the tokens of a chunk as the encoder reads them."""
    ended = False
    dropped = 0
    for token, _, word in chunk:
        if not isinstance(token, Integral):
            if token.shape[-1] != part.embedding_size:
                dropped += 1  # the encoder ignores it, and is given a padding at the end
                continue
            yield Piece(-1, "<embedding>", spelled=EMBEDDED)
            continue
        text = spelled(part, int(token))
        special = "" if word else PAD
        if not word and not ended and token == part.start_token:
            special = SOS
        if not word and not ended and token == part.end_token:
            special = EOS
            ended = True
        if text in IMAGE_PADS:
            special = IMAGE
        yield Piece(int(token), text, special, _data(text))
    for _ in range(dropped):
        yield Piece(int(part.pad_token), spelled(part, int(part.pad_token)), PAD)


def spelled(part: Any, token: int) -> str:
    """Return a token's spelling in the vocabulary; "" if it has none."""
    try:
        return str(part.untokenize([(token, 1.0)])[0][1])
    except KeyError:  # a special token beside the vocabulary
        return ""


def _with_template(pieces: Sequence[Piece], template: Sequence[Any]) -> Iterator[Piece]:
    """Yield pieces, those marked that stand in every prompt's tokens, before it or after it."""
    ids = [piece.id for piece in pieces if not piece.special or piece.special == IMAGE]
    after = _common(ids[::-1], template[::-1])
    before = _common(ids, template[: len(template) - after])
    number = -1
    for piece in pieces:
        number += not piece.special or piece.special == IMAGE
        is_around = number < before or number >= len(ids) - after
        is_template = is_around and not piece.special
        yield replace(piece, special=TEMPLATE) if is_template else piece


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many entries at the start of two sequences are the same."""
    for number, (entry, other) in enumerate(zip(first, second, strict=False)):
        if entry != other:
            return number
    return min(len(first), len(second))


def _data(text: str) -> bytes:
    """Return the bytes of a vocabulary's entry, in lower case and without spaces."""
    if byte := _BYTE.fullmatch(text):
        return bytes([int(byte[1], 16)])
    if text in ("<unk>", "<|unk|>"):
        return UNKNOWN
    if "\u2581" in text:
        return _folded(text.replace("\u2581", " ").encode())
    letters = text.removesuffix("</w>")
    return _folded(b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in letters))


def _folded(data: bytes) -> bytes:
    return b"".join(data.lower().split())  # of bytes, ASCII letters alone


def _placed(texts: Sequence[str], pieces: Sequence[Piece], vectors: Mapping[str, int]) -> Prompt:
    """Return the prompt by the text that the tokens spell best."""
    content = [i for i, piece in enumerate(pieces) if not piece.special]
    aligned = [_Aligned(text, [pieces[i] for i in content], vectors) for text in texts]
    best = max(aligned, key=lambda reading: reading.likeness)
    spans = dict(zip(content, best.spans(), strict=True))
    tokens = [
        Token(piece.id, piece.text, *spans.get(i, (0, 0)), piece.special)
        for i, piece in enumerate(pieces)
    ]
    return place(best.text, tokens, [found.span() for found in EMBEDDING.finditer(best.text)])


def _unweighted(prompt: str) -> str:
    """Return a prompt without its weights, as ComfyUI reads them; adjacent ones are of two
    words."""
    try:
        from comfy.sd1_clip import escape_important, token_weights, unescape_important
    except ImportError:
        return prompt
    parts = token_weights(escape_important(prompt).replace(")(", ") ("), 1.0)
    return "".join(unescape_important(part) for part, _ in parts)


class _Aligned:
    """The tokens of a prompt beside its text, byte by byte."""

    def __init__(self, text: str, pieces: Sequence[Piece], vectors: Mapping[str, int]):
        self.text = text
        self.pieces = pieces
        embeddings = {found.start(): found[0] for found in EMBEDDING.finditer(text)}
        owners = []
        data = b""
        skipped = 0  # owners: of each byte, the character of the text
        for i, char in enumerate(text):
            letter = _folded(char.encode())
            if vectors.get(embeddings.get(i, "")):
                letter = EMBEDDED * vectors[embeddings[i]]
                skipped = i + len(embeddings[i])
            elif i < skipped:
                continue
            data += letter
            owners += [i] * len(letter)
        self.owners = owners
        spelled = b"".join(piece.spelled for piece in pieces)
        self.matcher = SequenceMatcher(None, data, spelled, autojunk=False)
        self.likeness = 1.0 if data == spelled else self.matcher.ratio()

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the characters that each token stands for; none for what is not in the text."""
        places: list[tuple[int, int]] = []  # bytes of the text for each byte of the tokens
        for kind, first, last, start, stop in self.matcher.get_opcodes():
            for offset in range(stop - start):
                is_same = kind == "equal"
                places.append((first + offset, first + offset + 1) if is_same else (first, last))
        at = 0
        for piece in self.pieces:
            spans = places[at : at + len(piece.spelled)]
            at += len(piece.spelled)
            spans = [span for span in spans if span[0] < span[1]]
            if not spans:
                yield 0, 0
                continue
            first = min(spans)[0]
            last = max(span[1] for span in spans)
            yield self.owners[first], self.owners[last - 1] + 1
