import pytest
from helpers.tiny_tokenizers import tiny_qwen, tiny_t5, tiny_tokenizer

from sdattn.prompts.pieces import read_pieces
from sdattn.prompts.tokens import read_prompt

TEXTS = ["a red cat", "a cat, on the sofa", "Zebra!! on a café", "naïve 猫 a dog", "ÅåÅ cat"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [tiny_tokenizer, tiny_qwen], ids=["CLIP", "Qwen"])
def test_words_own_the_columns_that_the_tokenizer_gives_them(make, text):
    tokenizer = make()
    right = read_prompt(tokenizer, text, max_length=77)
    pieces = tokenizer.convert_ids_to_tokens([token.id for token in right.tokens])
    read = read_pieces(pieces)
    assert [word.columns for word in read.words] == [word.columns for word in right.words]
    words = [word.text.casefold() for word in right.words]
    assert [word.text.casefold() for word in read.words] == words


def test_sentencepiece_marks_the_beginning_of_a_word():
    pieces = tiny_t5().convert_ids_to_tokens(tiny_t5()("a red zebra, cat")["input_ids"])
    read, right = read_pieces([*pieces, "<pad>"]), read_prompt(tiny_t5(), "a red zebra, cat")
    for word in ("a", "red", "zebra", "cat"):
        assert read.find(word) == right.find(word)
    assert read.find("<pad>") == [(len(pieces),)]


def test_plain_words_are_one_column_each_and_the_end_begins_the_padding():
    read = read_pieces(["<sos>", "a", "café", "<eos>", "!", "!", "<sos>", "cat", "<eos>"])
    assert [word.text for word in read.words] == ["a", "café", "cat"]
    assert read.find("café") == [(2,)] and read.find("cat") == [(7,)]
    assert read.find("<eos>") == [(3, 8)] and read.find("<pad>") == [(4, 5)]


def test_no_word_is_refused():
    with pytest.raises(ValueError, match="empty"):
        read_pieces(["<sos>", "<eos>", "!"])
