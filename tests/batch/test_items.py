"""Fields of a line as an item, and what each bad line is."""

import json
import pickle
import re

import pytest
from helpers.item_lines import check_message, line_of, read_items, read_one

from sdattn.batch.items import Item

LARGEST = 2**63 - 1


def reason_of(line, kind="jsonl"):
    """Why a line is bad, which its neighbours are not."""
    good = b"a cat" if kind == "txt" else b'{"prompt": "a cat"}'
    items, [bad] = read_items(b"\n".join([good, line, good]), kind)
    assert [item.line for item in items] == [1, 3]
    assert bad.line == 2
    check_message(bad)
    return bad.reason


def test_an_item_of_json_has_what_was_given():
    own = {"id": "cat.01_a-b", "prompt": " a red cat ", "negative_prompt": "", "seed": LARGEST}
    options = {"width": 16384, "height": 8, "num_inference_steps": 1, "guidance_scale": 7.5}
    options |= {"num_images_per_prompt": 1, "cross_attention_kwargs": {"scale": 0.5}}
    words = ("Red  cat", "<eos>", "<|endoftext|>")
    item = read_one(json.dumps({**own, **options, "words": words, "eta": None}).encode())
    assert item == Item(line=1, options=options, words=words, **own)
    assert pickle.loads(pickle.dumps(item)) == item


def test_what_is_not_given_has_its_default():
    nothing = dict.fromkeys(("id", "negative_prompt", "seed", "words", "width"))
    lines = [line_of(), line_of(**nothing), line_of(seed=5), b"", line_of(id=7)]
    items, bad = read_items(b"\n".join(lines), "jsonl", seed=40)
    assert bad == []
    assert [item.id for item in items] == ["000001", "000002", "000003", "7"]
    assert [item.seed for item in items] == [40, 41, 5, 44]
    assert all(item.negative_prompt is item.words is None for item in items)
    assert all(item.options == {} for item in items)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a cat"', "broken JSON at character 19: Expecting ',' delimiter"),
        (b"a cat", "broken JSON at character 1"),
        (b'["a cat"]', "found \\['a cat'\\]. Write an object"),
        (b"null", "found None"),
        (b'{"prompt": "a cat", "width": NaN}', "'NaN' is not a number"),
        (b'{"prompt": "a cat", "x": -1e999}', "'-1e999' is not a number"),
        (b'{"prompt": "a cat", "x": ' + b"[" * 99_999 + b"]" * 99_999 + b"}", "too deep"),
        (b'{"prompt": "a cat", "x": ' + b'{"x": ' * 99_999, "too deep|broken JSON"),
        (b'{"prompt": "a \\ud83d cat"}', r"\\ud83d"),
        (b'{"prompt": "a cat", "x": {"\\udc00": 1}}', "has no option|half a character"),
        (b'{"prompt": "a \xff cat"}', r"udcff.* Save the list as UTF-8"),
        (b'{"prompt": "a \xed\xa0\xbd cat"}', "Save the list as UTF-8"),
        ('{"prompt": "a cat"}'.encode("utf-16-be"), r"x00.*UTF-8"),
        (b"{}", r"it lacks the prompt; found \[\]"),
        (b'{"Positive": "a cat"}', r"lacks the prompt; found \['Positive'\].*prompt_column"),
        (b'{"prompt": "a cat", "text": "a dog"}', "prompt and text may be the prompt"),
        (b'{"prompt": null, "seed": 1}', "the prompt is missing"),
    ],
)
def test_lines_that_are_no_object_with_a_prompt(line, reason):
    assert re.search(reason, reason_of(line))


BAD_FIELDS = [
    *(("prompt", value, r"prompt=.*: write a text") for value in ("", " \n\u3000", 5, ["a"], {})),
    *(("negative_prompt", value, "write a text") for value in (5, True, ["a dog"])),
    *(("seed", value, r"from 0 to 2\*\*63 - 1") for value in (-1, 2**63, 1.5, True, "1.5", [1])),
    *(("width", value, "multiple of 8 pixels") for value in (0, -8, 16385)),
    *(("width", value, "whole number of pixels") for value in (512.5, True, "512px")),
    ("height", 10**99, "multiple of 8 pixels, at most 16,384"),
    *(("height", value, "whole number of pixels") for value in (0.5, False, {}, [512])),
    *(("num_inference_steps", value, "pass 1 to 1000") for value in (0, -1, 1.5, True, "2O")),
    *(("guidance_scale", value, "finite number") for value in (True, "7,5", [7.5])),
    *(("words", value, "list of words") for value in ("cat", [], [""], [" "], [5], {"cat": 1})),
    ("words", ["dog"], r"'dog' is not in the prompt\. Its words are: a, red, cat\."),
    ("words", ["cat", "ca"], "'ca' is only a part of"),
    ("image", "cat.jpg", "Pass the list as `photos`"),
    ("num_images_per_prompt", 2, "an item is one image or video. Write a line for each"),
    *(("num_images_per_prompt", value, "one image") for value in (2.0, "2")),
    *(("num_images_per_prompt", value, "whole number from 1") for value in (0, True)),
    *(("num_frames", value, "whole number from 1") for value in (0, -1, 1.5, True, "8.5")),
    *((name, None, "is not an option") for name in ("", "guidance scale", "1st", "a.b", "a\n")),
    *(
        (name, "x", "cannot be chosen here")
        for name in ("prompt_embeds", "generator", "output_type", "return_dict")
    ),
    *(
        ("id", value, "it names a folder")
        for value in (
            *("", " ", "a/b", "a\\b", "/a", ".", "..", "../a", "a..b", ".a", "a.", "-a", "_a"),
            *("a b", "a\n", "\n", "a\0", "a" * 101, "a" * 5000, "ä", "\U0001f408", "a:b", "\u0661"),
            "prn.",
            *(True, 1.0, -1, ["a"], {"a": 1}),
        )
    ),
]


@pytest.mark.parametrize(("name", "value", "reason"), BAD_FIELDS)
def test_fields_that_cannot_be(name, value, reason):
    if value is None:
        value = 1  # it is the name that is bad
    assert re.search(reason, reason_of(line_of(**{name: value})))


@pytest.mark.parametrize(
    "name", ["a", "0", 0, 12, "a" * 100, "A.b-C_d", "console", "com", "com10", "nul-1", "v1.2"]
)
def test_ids_that_are_folders_everywhere(name):
    assert read_one(line_of(id=name)).id == str(name)


def test_an_id_belongs_to_the_first_good_line_that_has_it():
    lines = [line_of(id="Cat", width=0)]  # bad for another reason: the id stays free
    lines += [*map(lambda name: line_of(id=name), ("cat", "CAT", "000005"))]
    lines += [line_of(), line_of(id="cat")]
    items, bad = read_items(b"\n".join(lines), "jsonl")
    assert [item.line for item in items] == [2, 4]
    taken = [(one.line, re.findall(r"in line (\d)", one.reason)) for one in bad]
    assert taken == [(1, []), (3, ["2"]), (5, ["4"]), (6, ["2"])]


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_first_seeds_that_cannot_be(seed):
    with pytest.raises(ValueError, match=f"seed={seed}"):
        read_items(b"", "txt", seed=seed)


def test_default_seeds_that_run_out_are_bad_lines():
    items, bad = read_items(b"a cat\na dog", "txt", seed=LARGEST)
    assert [item.seed for item in items] == [LARGEST]
    assert [one.line for one in bad] == [2] and f"seed={2**63}" in bad[0].reason
