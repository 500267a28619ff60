"""Words and their columns with the published vocabularies of CLIP and Qwen, piece by piece.

The pieces are computed by ``helpers.byte_pairs``, which has byte pair encoding written out.
"""

import pytest
import transformers
from helpers.byte_pairs import clip_vocabulary, published, qwen_vocabulary, write_files
from helpers.odd_prompts import PARTS, odd_prompts
from helpers.tiers import tiered
from helpers.tiny_tokenizers import byte_symbols

from sdattn.prompts.tokenizing import filled
from sdattn.prompts.tokens import read_source
from sdattn.prompts.words import Source

pytestmark = pytest.mark.slow
PROMPTS = odd_prompts(150)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """CLIP's tokenizer, and its byte pairs."""
    folder = tmp_path_factory.mktemp("clip")
    pairs, merges = clip_vocabulary(
        published("open_clip_torch", "open_clip/bpe_simple_vocab_16e6.txt.gz", folder)
    )
    symbols = sorted(byte_symbols())
    entries = [*symbols, *(symbol + "</w>" for symbol in symbols)]
    entries += [line.replace(" ", "") for line in merges]
    entries += ["<|startoftext|>", "<|endoftext|>"]
    assert len(entries) == 49_408
    files = write_files(folder, {entry: i for i, entry in enumerate(entries)}, merges)
    return transformers.CLIPTokenizer(*files, model_max_length=77), pairs


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Qwen2's tokenizer, and its byte pairs."""
    folder = tmp_path_factory.mktemp("qwen")
    data = published("dashscope", "dashscope/resources/qwen.tiktoken", folder)
    pairs, numbers, merges = qwen_vocabulary(data)
    symbols = byte_symbols()

    def spelled(token):
        return "".join(symbols[byte] for byte in token)

    vocabulary = {spelled(token): number for token, number in numbers.items()}
    assert len(vocabulary) == 151_643
    lines = [f"{spelled(left)} {spelled(right)}" for left, right in merges]
    kind = getattr(transformers, "Qwen2TokenizerFast", transformers.Qwen2Tokenizer)
    return kind(*write_files(folder, vocabulary, lines)), pairs


def words_by_pieces(read, pieces, first, end):
    """For each word the columns of the pieces that share a character, not a space, with it."""
    text, expected = read.text, []
    for word in read.words:
        own = {i for i in range(word.start, word.end) if not text[i].isspace()}
        columns = [first + i for i, one in enumerate(pieces) if own & {*range(one.start, one.end)}]
        expected.append(tuple(column for column in columns if column < end))
    return expected


def columns_of(name, tokenizer, prompt):
    """The prompt as sdattn reads it, its first column, and where the columns of its text end."""
    if name == "clip":  # "<|startoftext|>" in front, and 75 columns of the text at the most
        read = read_source(tokenizer, Source.of(prompt), **filled(77))
        return read, 1, 76
    return read_source(tokenizer, Source.of(prompt)), 0, len(tokenizer(prompt)["input_ids"])


@pytest.mark.parametrize("name", tiered(["clip", "qwen"], quick=0))
def test_words_own_the_columns_of_their_pieces(name, request):
    tokenizer, pairs = request.getfixturevalue(name)
    n_words = 0
    for prompt in PROMPTS:
        read, first, end = columns_of(name, tokenizer, prompt)
        pieces = pairs.pieces(prompt)
        spelled = [token.text for token in read.tokens if not token.special]
        assert spelled == [spelling(one.data) for one in pieces][: end - first], prompt
        found = [word.columns for word in read.words]
        assert found == words_by_pieces(read, pieces, first, end), prompt
        # every character that is no space is in one word
        chars = [i for word in read.words for i in range(word.start, word.end)]
        assert len(chars) == len(set(chars))
        assert {i for i, char in enumerate(prompt) if not char.isspace()} <= set(chars)
        n_words += len(found)
    assert n_words > 1000


def spelling(data):
    """How a vocabulary of transformers spells a piece."""
    plain = data.removesuffix(b"</w>")
    return "".join(byte_symbols()[byte] for byte in plain) + "</w>" * (plain != data)


def test_every_odd_part_was_read():
    text = "".join(PROMPTS)
    assert all(part in text for part in PARTS)


# CJK Extension J is of Unicode 17, which the regular expressions of tokenizers do not know as
# letters, so transformers cuts a text before and behind them: the pieces are others than those of
# CLIP's own code, where newer tables call the same text one part. What the model gets is what
# transformers makes, and a word's columns must be those.
NEWER = ("\U00032808", "\U0003285c", "\U00032988", "\U000323b0")


@pytest.mark.parametrize("letter", NEWER, ids=lambda letter: f"U+{ord(letter):X}")
def test_letters_newer_than_the_tokenizer_own_their_own_bytes(clip, letter):
    tokenizer, _ = clip
    read, _, _ = columns_of("clip", tokenizer, f"猫{letter}犬 a")
    for word in read.words:
        data = b"".join(
            bytes(byte_symbols().index(one) for one in read.tokens[i].text.removesuffix("</w>"))
            for i in word.columns
        )
        assert data == word.text.encode()
