"""The lines of JSON, CSV and text, as fields, and those that cannot be read."""

import csv
import io
import json
import random
import re

import pytest
from helpers.item_lines import check_message, line_of, read_one

from sdattn.batch.input.items import BadLine, read_items
from sdattn.batch.input.lines import kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("prompts.jsonl", "jsonl"),
        ("a.b/prompts.NDJSON", "jsonl"),
        ("prompts.2.Csv", "csv"),
        ("PartiPrompts.TSV", "tsv"),
        ("captions_val2017.json", "json"),
        ("prompts.txt", "txt"),
        ("-", "auto"),
    ],
)
def test_the_name_tells_the_kind(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize("name", ["prompts", "prompts.doc", "", "prompts.csv.gz", "--", ".csv"])
def test_other_names_are_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=r"\.jsonl or \.ndjson .*\.csv .*\.txt .* - for"):
        kind_of(name)


@pytest.mark.parametrize(
    "sign", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r", "\u00a0"]
)
def test_only_a_line_feed_ends_a_line(sign):
    prompt = f"a{sign}cat"
    if sign == "\r":  # may be the end of a line of another computer
        items, [bad] = read_items(f"{prompt}\r\n".encode(), "txt")
        assert items == [] and "carriage return" in bad.reason
    else:
        assert read_one(f"{prompt}\r\n".encode(), "txt").prompt == prompt
    table = f'prompt,seed\n"{prompt}",1\n'
    assert read_one(table.encode(), "csv").prompt == prompt
    if sign not in "\x0b\x0c\x1c\r":  # JSON wants these escaped
        text = json.dumps({"prompt": prompt}, ensure_ascii=False)
        assert read_one(text.encode()).prompt == prompt


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("jsonl", ["", '{"prompt": "a cat"}', " \t", "\u3000", ' {"prompt": "a dog"} ', ""]),
        ("auto", ["", '{"prompt": "a cat"}', " \t", "\u3000", ' {"prompt": "a dog"} ', ""]),
        ("txt", ["", "a cat", " \t", "\u3000", "a dog"]),
        ("auto", ["", "a cat", " \t", "\u3000", "a dog"]),
        ("csv", ["prompt,seed", "a cat,", " \t", "\u3000", '"a dog"," "', "", ""]),
    ],
)
def test_blank_lines_are_counted_and_skipped(kind, lines, mark, end):
    items, bad = read_items((mark + end.join(lines)).encode(), kind, seed=10)
    assert bad == []
    assert [(item.line, item.prompt) for item in items] == [(2, "a cat"), (5, "a dog")]
    assert [(item.id, item.seed) for item in items] == [("000002", 11), ("000005", 14)]


def test_other_kinds_are_refused():
    with pytest.raises(ValueError, match="kind='xml'"):
        read_items(b"", "xml")


def test_standard_input_is_json_only_if_it_begins_so():
    items, bad = read_items(b'\n{"prompt": \na cat', "auto")
    assert items == [] and [one.line for one in bad] == [2, 3]
    items, bad = read_items(b'a cat\n{"prompt": "a dog"}', "auto")
    assert [item.prompt for item in items] == ["a cat"] and [one.line for one in bad] == [2]


@pytest.mark.parametrize(
    "header", ["prompt,id", "id,prompt", " prompt , seed ", "prompt", '"prompt","words"']
)
def test_standard_input_with_a_header_is_a_table(header):
    data = f"\n{header}\r\n".encode() + b",".join([b"cat"] * (header.count(",") + 1)) + b"\n"
    expected = read_items(data, "csv")
    assert read_items(data, "auto") == expected
    assert all(one.prompt != header for one in expected[0])


@pytest.mark.parametrize(
    "text", ["a prompt,id", "prompt engineering, a cat", "prompt: a, b", "id,x"]
)
def test_text_that_only_looks_like_a_header_is_text(text):
    for kind in ("auto", "txt"):
        items, bad = read_items(f"{text}\na cat\n".encode(), kind)
        assert [one.prompt for one in items] == [text, "a cat"] and bad == []


def test_a_json_object_with_a_prompt_is_no_line_of_a_text():
    own = ['{"scene": "a cat"}', "{red|blue} cat", '{"prompt": ', '["prompt"]', '{"a":' * 9_999]
    lines = ['{"prompt": "a cat", "seed": 3}', *own, ' {"seed": 1, "prompt": "a dog"}\r']
    items, bad = read_items("\n".join(lines).encode(), "txt")
    assert [one.prompt for one in items] == own
    assert [one.line for one in bad] == [1, 7]
    assert all("Name the file .jsonl" in one.reason for one in bad)


def test_a_header_in_a_text_is_refused():
    with pytest.raises(
        ValueError, match=r"a table with the header 'prompt,id'.*input_format='csv'"
    ):
        read_items(b"prompt,id\na cat,x\n", "txt")
    with pytest.raises(ValueError, match="a table with the header 'Prompts'"):
        read_items(b"\nPrompts\na cat\n", "txt")
    for data in (b"a cat\nprompt\n", b"prompt\n"):  # which may be meant
        items, _ = read_items(data, "txt")
        assert [one.prompt.encode() for one in items] == data.splitlines()


def test_a_document_of_json_is_a_list_of_its_rows():
    for data in (b'[{"prompt": "a cat"}, {"prompt": "a dog"}]', b' [\n"a cat",\n"a dog"]\n'):
        for kind in ("auto", "json"):
            items, bad = read_items(data, kind)
            assert [(one.line, one.prompt) for one in items] == [(1, "a cat"), (2, "a dog")]
            assert bad == []
        with pytest.raises(ValueError, match="JSON document.*input_format='json'"):
            read_items(data, "txt")
    assert read_items(b"[]", "auto") == ([], [])
    items, [bad] = read_items(b'[5, {"prompt": "a cat"}]', "json")
    assert [one.line for one in items] == [2] and bad.line == 1 and "found 5" in bad.reason


@pytest.mark.parametrize("data", [b'[\n  {"prompt": "a cat"},', b'["a cat", "a dog"'])
def test_an_array_that_is_broken_is_no_prompt(data):
    with pytest.raises(ValueError, match="begins like a JSON array"):
        read_items(data, "auto")
    with pytest.raises(ValueError, match="not a JSON list"):
        read_items(data, "json")
    items, _ = read_items(b"[a cat] on a sofa\n", "auto")
    assert [one.prompt for one in items] == ["[a cat] on a sofa"]


@pytest.mark.parametrize(
    "data", [b'{"prompt": {"0": "a cat"}}', b'{\n"prompt": "a cat"\n}', b"5", b"", b"a cat"]
)
def test_json_that_is_no_list_is_refused(data):
    with pytest.raises(ValueError, match="JSON"):
        read_items(data, "json")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "txt", "auto"])
@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_read_by_its_mark(kind, code):
    text = {"jsonl": '{"prompt": "größer 🦊"}\n'}.get(kind, "größer 🦊\n")
    text = f"prompt\n{text}" if kind in ("csv", "tsv") else text
    mark = "" if code == "utf-16" else "\ufeff"
    assert read_one((mark + text).encode(code), kind).prompt == "größer 🦊"
    with pytest.raises(ValueError, match="UTF-16 and cannot be read"):
        read_items((mark + text).encode(code)[:-1], kind)


def test_text_that_is_not_utf8_is_shown_escaped():
    data = "ein Bär\n".encode() + "ein Bär\n".encode("latin-1") + b"a\0c\n" + b"\xff" * 900 + b"\n."
    items, bad = read_items(data, "txt")
    assert [item.line for item in items] == [1, 5]
    assert [one.line for one in bad] == [2, 3, 4]
    assert [one.text for one in bad] == ["ein B\\xe4r", "a\\x00c", "\\xff" * 50]
    assert "byte 6 of the line, 0xe4" in bad[0].reason


@pytest.mark.parametrize("char", ["a", "ä", "猫", "\U0001f408", "\x01"])
def test_a_bad_line_shows_its_beginning(char):
    line = "x" + char * 5000
    _, [bad] = read_items(f'prompt\n"{line}'.encode(), "csv")
    check_message(bad)
    shown = "\\x01" if char == "\x01" else char
    assert bad.text == ('"x' + shown * 200)[:200]


def test_a_table_that_python_wrote_comes_back():
    rows = [
        {"prompt": 'a "red" cat, asleep', "id": "0012", "words": "red;cat , asleep"},
        {"prompt": "two\nlines\r\nand three\n", "seed": 0, "words": '["two lines", "three"]'},
        {"prompt": "=1+1", "width": 512, "height": 768, "guidance_scale": 7.5, "eta": "0.5"},
        {"prompt": "5", "negative_prompt": "null", "num_inference_steps": "+020"},
        {"prompt": "\u2028cat", "guidance_scale": -1e-3, "eta": '{"a": [1, null]}'},
        {"prompt": "cat", "guidance_scale": "07.5", "eta": "true"},
        {"prompt": "cat", "seed": "null", "eta": "null"},
        {"prompt": "cat", "eta": "0x10"},
    ]
    names = ["id", "prompt", "negative_prompt", "seed", "words", "width", "height"]
    names += ["num_inference_steps", "guidance_scale", "eta"]
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows(rows)
    items, bad = read_items(file.getvalue().encode(), "csv")
    assert bad == []
    assert [item.prompt for item in items] == [row["prompt"] for row in rows]
    assert [item.line for item in items] == [2, 3, 7, 8, 9, 10, 11, 12]
    assert [item.id for item in items[:2]] == ["0012", "000003"]
    assert [item.seed for item in items] == [1, 0, 6, 7, 8, 9, 10, 11]
    assert items[0].words == ("red", "cat , asleep") and items[1].words == ("two lines", "three")
    assert items[3].negative_prompt == "null"
    assert [dict(item.options) for item in items] == [
        {},
        {},
        {"width": 512, "height": 768, "guidance_scale": 7.5, "eta": 0.5},
        {"num_inference_steps": 20},
        {"guidance_scale": -0.001, "eta": {"a": [1, None]}},
        {"guidance_scale": 7.5, "eta": True},
        {},
        {"eta": "0x10"},
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("a cat", "found 1 cells below a header of 9"),
        ("a cat,,,,,,,,,", "found 10 cells"),
        (",,,,,,,,", "the prompt is missing"),
        ("  ,,1,,,,,,", r"the prompt is missing; found \['seed'\]"),
        ("a cat,a/b,,,,,,,", "it names a folder"),
        ("a cat,,1.5,,,,,,", r"seed=1\.5"),
        ("a cat,,one,,,,,,", "seed='one'"),
        ("a cat,,1_0,,,,,,", "seed='1_0'"),
        ("a cat,,\u0661,,,,,,", "seed='\u0661'"),
        ("a cat,," + "9" * 5000 + ",,,,,,", "5000 digits"),
        ("a cat,,,512.5,,,,,", r"width=512\.5"),
        ("a cat,,,-8,,,,,", "width=-8"),
        ("a cat,,,true,,,,,", "width=True"),
        ("a cat,,,,nan,,,,", "guidance_scale='nan'"),
        ("a cat,,,,NaN,,,,", "NaN is not a number"),
        ("a cat,,,,1e999,,,,", "too large for a number"),
        ('a cat,,,,"7,5",,,,', "guidance_scale='7,5'"),
        ("a cat,,,,,dog,,,", "'dog' is not in the prompt"),
        ("a cat,,,,,;,,,", "write a list of words"),
        ('a cat,,,,,"[""cat""; ""a""]",,,', "write a list of words"),
        ("a cat,,,,,,Infinity,,", "Infinity is not a number"),
        ('a cat,,,,,,"{""a"":1,""a"":2}",,', "'a' occurs twice"),
        ('a cat,,,,,,"""\\ud800""",,', "half a character"),
        ("a cat,,,,,," + "[" * 9999 + ",,", "too deep|half"),
        ("a cat,,,,,,,2,", "one image"),
        ("a cat,,,,,,,,x", "'guidance scale' is not an option"),
        ("a \0cat,,,,,,,,", "zero byte"),
        ('"a cat"x,,,,,,,,', "no row of a table: ',' expected after '\"'.*double those"),
        ('"a ""red"" "cat"",,,,,,,,', "no row of a table"),
        ("a\rcat,,,,,,,,", "no row of a table: new-line"),
        ("x" * 140_000 + ",,,,,,,,", "field larger than field limit"),
    ],
)
def test_rows_that_are_bad(row, reason):
    names = "prompt,id,seed,width,guidance_scale,words,eta,num_images_per_prompt,guidance scale"
    good = "a cat,,,,,,,,"
    items, [bad] = read_items("\n".join([names, good, row, good]).encode(), "csv")
    assert [item.line for item in items] == [2, 4] and bad.line == 3
    check_message(bad)
    assert re.search(reason, bad.reason)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("seed,width", r"the prompt is missing; found \['seed', 'width'\].*prompt_column"),
        ("a cat", r"the prompt is missing; found \['a cat'\]"),
        ("prompt,text", r"prompt and text may be the prompt; .*prompt_column"),
        ("caption\tPrompt", r"Prompt and caption may be"),
        ("prompt,seed,seed", "each once"),
        ("prompt, prompt", "each once"),
        ("prompt,", "Name every column"),
        ('"prompt,seed', "line 1: no row of a table"),
        ("prompt\rcat", "line 1: no row of a table"),
        ("\nprompt,größe".encode("latin-1"), "line 2: .* is not UTF-8"),
    ],
)
def test_headers_that_cannot_be_read(header, reason):
    data = header if isinstance(header, bytes) else header.encode()
    with pytest.raises(ValueError, match=f"The header of the table.*{reason}"):
        read_items(data + b"\na cat,1\n", "csv")


def test_rows_over_several_lines_stay_together_beside_bad_ones():
    lines = [
        b" prompt , seed",  # 1
        b'"a cat\non two lines",5',  # 2, 3
        b'"not \xff UTF-8\nin two lines",6',  # 4, 5
        b'"a dog\n\n",7',  # 6, 7, 8
        b'a 5" wide cat,8',  # 9
        b'"three\nlines\n""here""",10',  # 10, 11, 12
        b'"closed\nwrongly" x,11',  # 13, 14
        b'"zero\n\0",13',  # 15, 16
        b'"the\nlast",14',  # 17, 18
        b'"never closed,8',  # 19
        b"after it,9",  # 20
    ]
    items, bad = read_items(b"\r\n".join(lines), "csv")
    assert [(item.line, item.options, item.seed) for item in items] == [
        (2, {}, 5),
        (6, {}, 7),
        (9, {}, 8),
        (10, {}, 10),
        (17, {}, 14),
    ]
    assert items[2].prompt == 'a 5" wide cat' and items[3].prompt == 'three\nlines\n"here"'
    assert [one.line for one in bad] == [4, 13, 15, 19]
    assert bad[0].text == '"not \\xff UTF-8\\nin two lines",6'
    assert "1 lines below the quote that opened" in bad[3].reason


def hostile_lines(chance):
    """Lines that are bad, each for a reason of its own, without an end."""
    names = [
        "a/b",
        "..",
        "../x",
        "a\0b",
        "x" * 5000,
        "\U0001f408",
        "",
        ["a"],
        "taken",
        "TAKEN",
    ]
    sizes = [True, False, -8, 0, 512.5, 1e9, "wide", [512], {"w": 1}, 2**40]
    digits = b"1" * 6000
    deep = b"[" * 50_000
    make = [
        lambda: line_of()[: chance.randrange(1, 20)],
        lambda: line_of() + chance.choice([b"}", b",", b" x", b"{}"]),
        lambda: chance.choice([b"1", b"[]", b'"a cat"', b"null", b"true", b"\x0b\xff"]),
        lambda: line_of(id=chance.choice(names)),
        lambda: line_of(**{chance.choice(["width", "height"]): chance.choice(sizes)}),
        lambda: line_of(**{chance.choice(["width", "eta"]): chance.choice([float("nan"), 1e400])}),
        lambda: line_of(prompt=chance.choice(["", " ", "\n\t", None, 5, [], {}, "\ud83d cat"])),
        lambda: line_of(seed=chance.choice([-1, 2**63, 0.5, "x", True, 10**90])),
        lambda: line_of(negative_prompt=chance.choice([0, [], "\udcff"])),
        lambda: line_of(words=chance.choice([[], "cat", ["dog"], [None], [""], 5])),
        lambda: b'{"prompt": "a cat", "prompt": "a cat"}',
        lambda: b'{"prompt": "a cat", "eta": ' + deep + b"]" * len(deep) + b"}",
        lambda: b'{"prompt": "a cat", "eta": ' + chance.choice([b"", b"-"]) + digits + b"}",
        lambda: b'{"prompt": "a ' + chance.choice([b"\xff", b"\xc3", b"\xed\xa0\x80"]) + b'"}',
    ]
    while True:
        yield chance.choice(make)()


def test_a_thousand_hostile_lines_stop_no_good_one():
    chance = random.Random(0)
    hostile = hostile_lines(chance)
    lines, good, bad_lines = [line_of(id="taken")], [1], []
    while len(bad_lines) < 1000:
        ours = chance.random() < 0.3
        lines.append(line_of(seed=len(lines), width=8) if ours else next(hostile))
        (good if ours else bad_lines).append(len(lines))
    items, bad = read_items(b"\n".join(lines), "jsonl")
    assert [item.line for item in items] == good
    assert [item.seed for item in items[1:]] == [line - 1 for line in good[1:]]
    assert [one.line for one in bad] == bad_lines
    for one in bad:
        check_message(one)
    assert isinstance(bad[0], BadLine)
