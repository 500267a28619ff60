"""A prompt from a tokenizer's pieces alone, without the tokenizer and without the text."""

from collections.abc import Sequence

from .tokenizing import EOS, PAD, SOS, Token
from .tokens import Prompt, place

_SPECIAL = dict.fromkeys((SOS, "<|startoftext|>", "<s>", "<bos>"), SOS)
_SPECIAL |= dict.fromkeys((EOS, "<|endoftext|>", "</s>"), EOS) | dict.fromkeys((PAD, ""), PAD)
# Characters for bytes in byte-level vocabularies (CLIP, GPT-2, Qwen)
_OWN = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _OWN)
_BYTES = {chr(byte): byte for byte in _OWN} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


def read_pieces(pieces: Sequence[str]) -> Prompt:
    """Return the prompt that a tokenizer's pieces spell, one per token column: CLIP's
    (``"cat</w>"``), SentencePiece's or byte-level ones; without any mark, each is a word.

    Columns from an end token to the next start are padding. CLIP's pieces do not tell "8k" from
    "8 k", which it cuts alike. Raise ValueError for no word.

    >>> read_pieces(["<|startoftext|>", "a</w>", "zeb", "ra</w>", "<|endoftext|>"]).find("zebra")
    [(2, 3)]
    """
    mark = next((mark for mark in ("</w>", "\u2581", "\u0120") if mark in "".join(pieces)), "")
    data, tokens, ended = b"", [], False
    for piece in pieces:
        special = _SPECIAL.get(piece, "")
        special = PAD if ended and special != SOS else special
        ended = (ended or special == EOS) and special != SOS
        start = end = len(data.decode(errors="ignore"))
        if not special:
            data = (data + _spelled(piece, mark)).lstrip()
            end = len(data.decode(errors="replace")) + (piece == "\u2581")  # before its word
        tokens.append(Token(-1, piece, *((0, 0) if special else (start, end)), special))
    return place(data.decode(errors="replace"), tokens)


def _spelled(piece: str, mark: str) -> bytes:
    if mark in ("", "\u2581"):  # a space after each word, or where the mark is
        return (piece.replace(mark, " ") if mark else f"{piece} ").encode()
    letters = piece.removesuffix("</w>")
    spelled = (bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in letters)
    return b"".join(spelled) + b" " * (letters != piece)
