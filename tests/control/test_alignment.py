"""Alignment of prompts, against words tokenized on their own and counting by hand."""

import pytest
import torch
from helpers.tiny_tokenizers import tiny_tokenizer

from sdattn.control.alignment import refine, swap
from sdattn.prompts.tokenizing import PAD, TEMPLATE, Token
from sdattn.prompts.tokens import Prompt, Word, join_prompts, read_labels, read_prompt


def read(text, max_length=24):
    return read_prompt(tiny_tokenizer(max_length), text)


# "cat", "dog" and "red" are one token each; any other word is one token a letter.
SOURCE, LONGER = "a red cat", "a pale cat"


def test_a_prompt_swapped_for_itself_is_the_identity():
    assert torch.equal(swap(read(SOURCE), read(SOURCE)), torch.eye(24))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (SOURCE, LONGER),
        (LONGER, SOURCE),
        ("a red cat", "o dog dog"),
        ("cat cat", "dog cat"),
        ("a cat", "a " + "x" * 40),  # the target is cut off
        ("a " + "x" * 40, "a cat"),
        ("a " + "x" * 40 + " cat", "a dog cat"),
    ],
)
@pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")
def test_swapping_neither_makes_nor_loses_attention(source, target):
    dealt = swap(read(source), read(target))
    torch.testing.assert_close(dealt.sum(1), torch.ones(24))
    assert dealt.ge(0).all()


def test_a_word_goes_to_all_pieces_of_the_word_in_its_place():
    dealt = swap(read(SOURCE), read(LONGER))  # columns: sos a red cat eos / sos a p a l e cat eos
    assert torch.equal(dealt[0].nonzero().flatten(), torch.tensor([0]))
    assert torch.equal(dealt[2, 2:6], torch.full((4,), 0.25))
    assert dealt[2].sum() == 1
    assert dealt[3].argmax() == 6
    assert dealt[4].argmax() == 7  # the end
    assert dealt[5].argmax() == 8  # padding follows the end
    assert dealt[23].argmax() == 23
    back = swap(read(LONGER), read(SOURCE))
    assert torch.equal(back[2:6, 2], torch.ones(4))  # all pieces add up in the one column
    assert dealt[:, 23].sum() == 4  # three paddings have no like
    assert back[:, 21:].sum() == 0


def in_a_chat(words, pads=0):
    """A prompt of one token a word between two template columns and three, then padding."""
    kinds = [*[TEMPLATE] * 2, *[""] * len(words), *[TEMPLATE] * 3, *[PAD] * pads]
    tokens = tuple(Token(i, str(i), 0, 0, kind) for i, kind in enumerate(kinds))
    named = tuple(Word(word, 0, 0, (2 + i,)) for i, word in enumerate(words))
    return Prompt(" ".join(words), named, tokens)


def test_the_template_of_a_chat_stands_for_itself():
    source, target = in_a_chat(["red", "cat"]), in_a_chat(["red", "dog"])
    assert torch.equal(swap(source, target), torch.eye(7))
    assert refine(source, target).tolist() == [0, 1, 2, -1, 4, 5, 6]
    # a longer prompt moves the part behind it: 0 and 1, a word, 3 to 5, a column of padding
    shorter = in_a_chat(["cat"], pads=1)
    assert refine(shorter, source).tolist() == [0, 1, -1, 2, 3, 4, 5]
    assert refine(source, shorter).tolist() == [0, 1, 3, 4, 5, 6, -1]


def test_a_second_encoders_padding_stands_for_itself():
    """SD3: CLIP's columns and padding, then T5's; a piece more of CLIP moves CLIP's alone."""

    def both(text):
        return join_prompts([read(text, 12), read(text, 12)])

    dealt = swap(both("a red cat"), both("a pale cat"))
    assert dealt[5:12].argmax(1).tolist() == [8, 9, 10, 11, 11, 11, 11]
    assert dealt[17:].argmax(1).tolist() == [20, 21, 22, 23, 23, 23, 23]
    assert refine(both("a pale cat"), both("a red cat"))[17:].tolist() == [
        20,
        21,
        22,
        23,
        -1,
        -1,
        -1,
    ]


def test_a_token_of_two_words_is_shared_between_the_words_in_their_places():
    """A row is a distribution: half of the token's attention goes to each word's own."""
    source = read_labels({"cat": [0, 1], "dog": [1, 2]}, 4)
    target = read_labels({"red": [0], "owl": [2, 3]}, 4)
    expected = [[1, 0, 0, 0], [0.5, 0, 0.5, 0], [0, 0, 0, 1], [0, 0, 0, 1]]
    torch.testing.assert_close(swap(source, target), torch.tensor(expected))


def test_swapping_wants_as_many_words():
    with pytest.raises(ValueError, match="'a cat'.*2.*'a red cat'"):
        swap(read("a cat"), read("a red cat"))
    with pytest.raises(ValueError, match=r"24 token columns and .* has 12"):
        swap(read("a cat"), read("a dog", max_length=12))
    with pytest.raises(ValueError, match=r"24 token columns and .* has 12"):
        refine(read("a cat"), read("a dog", max_length=12))


def test_refining_takes_shared_words_from_where_they_were():
    taken = refine(read("a cat"), read("a red cat"))
    # sos a cat eos pad... -> sos a red cat eos pad...
    assert taken[:6].tolist() == [0, 1, -1, 2, 3, 4]
    assert taken[6:].tolist() == list(range(5, 23))
    assert refine(read("a red cat"), read("a cat")).tolist() == [0, 1, 3, 4, *range(5, 24), -1]
    assert torch.equal(refine(read(SOURCE), read(SOURCE)), torch.arange(24))
