"""Lists of prompts as people have them: JSON lines, CSV, TSV, text, Parquet, data sets."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import sys
from types import SimpleNamespace

import pandas
import pyarrow as pa
import pytest
from helpers.item_lines import check_message, line_of, planned, put, read_items, read_one
from helpers.tiers import tiered
from pyarrow import parquet

from sdattn.batch.tables import rows_of, table_rows

TWO = "prompt\na cat\n"
PARTI = (
    "Prompt\tCategory\tNote\n"
    "bond\tAbstract\tBiology-inspired\n"
    '"G I G G L E" painted on a wall, red\tOutdoor Scenes\t\n'
    'The words "Fly" are written\tOutdoor Scenes\t007\n'
)


def prompts(found):
    items, bad = found
    return [item.prompt for item in items], [one.line for one in bad]


@pytest.mark.parametrize("name", ["prompt", "Prompt", "Prompts", "caption", "text", "txt"])
def test_the_column_of_the_prompt_is_found_by_its_name(name):
    table = f"{name},seed\n007,5\n".encode()
    lines = json.dumps({name: "007", "seed": 5}).encode()
    for kind, data in (("csv", table), ("tsv", table.replace(b",", b"\t")), ("jsonl", lines)):
        item = read_one(data, kind)
        assert (item.prompt, item.seed, item.options) == ("007", 5, {})


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_the_column_of_the_prompt_can_be_named(kind):
    rows = [{"prompt": "a dog", "Scene": "5", "text": "a cow"}]
    data = pandas.DataFrame(rows).to_csv(index=False).encode()
    data = line_of(**rows[0]) if kind == "jsonl" else data
    assert read_one(data, kind, prompt_column="Scene", keep_columns=["text"]).prompt == "5"
    for named in (None, "Nothing"):
        try:
            reason = read_items(data, kind, prompt_column=named)[1][0].reason
        except ValueError as error:
            reason = str(error)
        assert "prompt_column" in reason and "Scene" in reason and "text" in reason


@pytest.mark.parametrize("data", [PARTI, PARTI.replace("\n", "\r\n"), "\ufeff" + PARTI])
def test_parti_prompts_are_read(data):
    items, bad = read_items(data.encode(), "tsv", keep_columns="all")
    assert bad == []
    texts = ["bond", '"G I G G L E" painted on a wall, red', 'The words "Fly" are written']
    assert [(item.line, item.prompt) for item in items] == [*enumerate(texts, 2)]
    assert [item.columns["Note"] for item in items] == ["Biology-inspired", "", "007"]


@pytest.mark.parametrize("index", [False, True])
def test_a_table_of_pandas_comes_back(index):
    texts = ['"x"', "two\nlines", 'a "red" cat', "a,b;c", " spaces ", 'a 5" cat']
    table = pandas.DataFrame({"prompt": texts, "kind": [*map(str, range(6))]})
    items, bad = read_items(table.to_csv(index=index).encode(), "csv", keep_columns=["kind"])
    assert ([item.prompt for item in items], bad) == (texts, [])
    assert [item.columns for item in items] == [{"kind": str(n)} for n in range(6)]
    one_line = table.drop(index=1)
    data = one_line.to_csv(sep="\t", index=index).encode()
    assert prompts(read_items(data, "tsv")) == ([*one_line["prompt"]], [])


def test_rows_of_another_length_are_refused_by_their_lines():
    data = 'Prompts,Category\na cat,Colors\na dog\n\na, b, c\n"a, b",Colors\n,Colors\na cow,\n'
    items, bad = read_items(data.encode(), "csv")
    assert [(item.line, item.prompt) for item in items] == [(2, "a cat"), (6, "a, b"), (8, "a cow")]
    assert [(one.line, one.reason.split(".")[0]) for one in bad] == [
        (3, "found 1 cells below a header of 2"),
        (5, "found 3 cells below a header of 2"),
        (7, "the prompt is missing; found ['prompt']"),
    ]


def test_an_open_quote_costs_the_rows_that_it_swallows():
    items, bad = read_items(b'prompt\na cat\n"a dog\na cow\n', "csv")
    assert [item.prompt for item in items] == ["a cat"]
    assert [one.line for one in bad] == [3]
    check_message(bad[0])


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "tsv"])
@pytest.mark.parametrize(
    ("data", "what"),
    [
        *((TWO.encode(code), "UTF-16") for code in ("utf-16", "utf-16-be", "utf-16-le")),
        (codecs.BOM_UTF16_BE + TWO.encode("utf-16-be"), "UTF-16"),
        *((TWO.encode(code), "UTF-") for code in ("utf-32", "utf-32-be")),
        (gzip.compress(TWO.encode(), mtime=0), "compressed"),
        (bz2.compress(TWO.encode()), "compressed"),
        (lzma.compress(TWO.encode()), "compressed with xz"),
        (pa.compress(TWO.encode(), "zstd", asbytes=True), "compressed with zstd"),
        (b"PK\3\4\x14\0", "workbook"),
        (b"PAR1\x15", "Parquet"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\x89PNG\r\n\x1a\n", "image"),
        (b"<!DOCTYPE html>\n<html>404</html>\n", "web page"),
        (b"<html>404</html>\n", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "Git LFS"),
    ],
)
def test_a_file_that_is_no_text_in_utf8_is_told_once(data, what, kind):
    with pytest.raises(ValueError, match=f"^The list is .*{what}.* UTF-8 text"):
        read_items(data, kind)


@pytest.mark.parametrize(
    "text", ['{"seed": 1, "seed": 2}', '{"weights": {"cat": 1, "c\\u0061t": 2}}']
)
def test_a_key_that_is_there_twice_is_a_bad_line(text):
    line = '{"prompt": "a cat", ' + text[1:]
    items, [bad] = read_items(f"{line}\n".encode() + line_of(seed=3))
    assert [item.seed for item in items] == [3]
    assert "is there twice" in bad.reason and ("'seed'" in bad.reason or "'cat'" in bad.reason)


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("a cat <lora:add_detail:0.8>", "<lora:add_detail:0.8>"),
        ("a (red:1.3) cat", "(red:1.3)"),
        ("a ((red)) cat", "((red))"),
        ("a [cat:dog:0.5]", "[cat:dog:0.5]"),
        ("a __colour/warm__ cat", "__colour/warm__"),
        ("a {red|blue} cat", "{red|blue}"),
        ("a cat BREAK a dog", "BREAK"),
    ],
)
def test_signs_of_other_programs_are_drawn_as_text_which_is_told_once(text, sign, capsys):
    found = read_items(f"a cat\n{text}\n{text}\n".encode(), "txt")
    assert prompts(found) == (["a cat", text, text], [])
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"sdattn: line 2: {sign!r}") and "as text" in said


@pytest.mark.parametrize(
    "text", ["a sign (1:30 pm)", "ratio 16:9 (wide)", "my_file__x", "[a, b]", "breakfast", "1 < 2"]
)
def test_of_other_signs_nothing_is_told(text, capsys):
    assert prompts(read_items(text.encode(), "txt")) == ([text], [])
    read_items(line_of(prompt="a (red:1.3) cat"))  # no text of another program
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("prompt;seed", "separated by ';'.* commas in .csv"),
        ('"prompt";"seed"', "separated by ';'"),
        ("prompt;width;guidance,x", "separated by ';'"),
        ("prompt\tseed", r"separated by '.t'"),
        ("prompt|seed", r"separated by '\|'"),
        ("a,b", "it lacks the prompt"),
        ("prompt,prompt", "Name each column, once"),
        ("prompt,,seed", "Name each column, once"),
        ('prompt,"seed', "Close and double quotes"),
        ("prompt,image", "Pass it as `photos`"),
        ("prompt,text", "prompt and text may be the prompt"),
    ],
)
def test_headers_that_are_refused(header, reason):
    with pytest.raises(ValueError, match=reason):
        read_items(f"{header}\na cat,3,1\n".encode(), "csv")


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_header_may_have_other_signs_in_its_names(kind):
    sign = {"csv": ",", "tsv": "\t"}[kind]
    header = sign.join(["prompt", '"a;b;c;d|e"', '"f,g"'])
    item = read_one(f"{header}\na cat{sign}1{sign}2\n".encode(), kind, keep_columns="all")
    assert item.columns == {"a;b;c;d|e": "1", "f,g": "2"}
    assert read_one(b"prompt\na; cat\n", kind).prompt == "a; cat"


def test_cells_are_words_and_json_and_a_typo_is_no_foreign_column():
    data = b'prompt,words,cross_attention_kwargs\na red cat,"cat; red","{""scale"": 0.5}"\n'
    item = read_one(data, "csv")
    assert item.words == ("cat", "red")
    assert item.options == {"cross_attention_kwargs": {"scale": 0.5}}
    [bad] = read_items(b"prompt,guidance_scal\na cat,3\n", "csv")[1]
    assert "Did you mean 'guidance_scale'" in bad.reason


@pytest.mark.parametrize("value", [8.0, "8", "8.0", "+08", " 8 ", 8, "8e0"])
@pytest.mark.parametrize("name", ["seed", "width", "num_inference_steps", "guidance_scale"])
def test_numbers_are_read_as_pandas_writes_them(name, value):
    item = read_one(line_of(**{name: value}))
    found = item.seed if name == "seed" else item.options[name]
    assert found == 8
    assert name == "guidance_scale" or type(found) is int
    table = f"prompt,{name}\na red cat,{value}\n".encode()
    assert read_one(table, "csv").options == item.options


@pytest.mark.parametrize("value", [7.5, "7.5", "7,0", "1_0", "\u0661", "0x8", "", float(2**53)])
def test_other_numbers_are_refused(value):
    _, [bad] = read_items(line_of(seed=value))
    assert "write a whole number" in bad.reason


def test_a_frame_with_holes_comes_back(tmp_path):
    frame = pandas.DataFrame({"prompt": ["a", "b"], "seed": [7, None], "width": [None, 64]})
    frame.to_json(tmp_path / "p.jsonl", orient="records", lines=True)
    frame.to_csv(tmp_path / "p.csv")
    frame.to_parquet(tmp_path / "p.parquet")
    for kind in ("jsonl", "csv", "parquet"):
        (one, other), bad = planned(source=tmp_path / f"p.{kind}")
        assert bad == []
        assert (one.seed, one.options, other.options) == (7, {}, {"width": 64})


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *((name, "guidance_scale") for name in ("cfg_scale", "CFG scale", "guidance")),
        *((name, "num_inference_steps") for name in ("steps", "Steps", "sampling-steps")),
        *((name, "negative_prompt") for name in ("negative", "Negative prompt", "neg_prompt")),
        *((name, "scheduler") for name in ("sampler", "Sampler name")),
        *((name, "width") for name in ("w", "Width")),
        *(("noise_seed", "seed"), ("Seed", "seed"), ("ID", "id"), ("positive", "prompt")),
    ],
)
def test_names_of_other_programs_are_told_ours(name, ours):
    table = f"prompt,{name}\na red cat,7\n".encode()
    for kind, data in (("jsonl", line_of(**{name: "7"})), ("csv", table)):
        items, [bad] = read_items(data, kind)
        check_message(bad)
        assert items == [] and repr(name) in bad.reason and ours in bad.reason
        kept = read_one(data, kind, keep_columns=[name])
        assert kept.columns == {name: "7"} and kept.options == {}


def test_columns_of_a_table_that_are_no_options_are_left_out_with_a_note(capsys):
    item = read_one(b"prompt,Challenge,seed\na cat,Basic,4\n", "csv")
    assert (item.options, item.columns, item.seed) == ({}, {}, 4)
    assert "'Challenge'" in capsys.readouterr().err
    _, [bad] = read_items(line_of(Challenge="Basic"))
    assert "no option 'Challenge'" in bad.reason


def test_all_columns_are_kept_in_all_items():
    lines = [line_of(a=1), line_of(b="x", seed=3), line_of()]
    items, bad = read_items(b"\n".join(lines), keep_columns="all")
    assert bad == []
    assert [[*item.columns.items()] for item in items] == [
        [("a", a), ("b", b)] for a, b in (("1", ""), ("", "x"), ("", ""))
    ]


@pytest.mark.parametrize("cell", ["NaN", "007", "1e999", "[1", " x"])
def test_a_kept_cell_is_text_whatever_it_holds(cell):
    item = read_one(f"prompt,note\na cat,{cell}\n".encode(), "csv", keep_columns=["note"])
    assert item.columns == {"note": cell}


def test_columns_to_keep_that_are_missing_are_refused():
    for data, kind in ((line_of(a=1), "jsonl"), (b"prompt,a\nx,1\n", "csv")):
        with pytest.raises(ValueError, match="no such column"):
            read_items(data, kind, keep_columns=["b"])
    with pytest.raises(ValueError, match="Rename yours"):
        read_items(line_of(), keep_columns=["statistics"])


def test_a_text_has_a_prompt_a_line():
    found = read_items(b"\xef\xbb\xbfa cat\r\n\n  \n{a|b} dog\nweiss \xff\n", "txt")
    assert prompts(found) == (["a cat", "{a|b} dog"], [5])
    assert "UTF-8" in found[1][0].reason
    _, bad = read_items(b'prompt,seed\n{"prompt": "a cat"}', "txt")
    assert all("input_format" in one.reason for one in bad) and len(bad) == 2


def test_what_is_not_utf8_is_a_bad_line_of_every_kind():
    lines = line_of() + b'\n{"prompt": "wei\xdf"}\n' + line_of()
    table = b"prompt\na\nwei\xdf\nb\n"
    for kind, data in (("jsonl", lines), ("csv", table), ("tsv", table)):
        items, [bad] = read_items(data, kind)
        assert len(items) == 2
        assert "UTF-8" in bad.reason and bad.text.isprintable()


def test_standard_input_is_read_and_left_open(monkeypatch):
    stream = io.BytesIO(line_of())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
    assert prompts(planned(source="-")) == (["a red cat"], [])
    assert not stream.closed
    table = io.BytesIO()
    parquet.write_table(pa.table({"prompt": ["a dog"]}), table)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(table.getvalue())))
    assert prompts(planned(source="-", input_format="parquet")) == (["a dog"], [])


def test_a_parquet_file_is_read_without_its_other_columns(tmp_path):
    table = {"caption": ["a cat", None], "words": [["cat"], None], "vector": [[0.5] * 9] * 2}
    parquet.write_table(pa.table(table), tmp_path / "p.parquet")
    [item], [bad] = planned(source=tmp_path / "p.parquet")
    assert (item.prompt, item.words, item.options) == ("a cat", ("cat",), {})
    assert "prompt is missing" in bad.reason
    put(tmp_path, "q.parquet", "PAR1 is not enough")
    with pytest.raises(ValueError, match="not a readable Parquet"):
        planned(source=tmp_path / "q.parquet")


# Of a few kilobytes each, as the columns of a table and the options of the writer
EXPANDING = {
    "zeros": ({"prompt": ["a" * 2**26]}, {}),
    "plain": ({"prompt": ["a" * 2**17] * 300}, {"use_dictionary": False, "compression": "gzip"}),
    "shared": (
        {"prompt": ["a" * 2**26] * 2},
        {"use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}},
    ),
    "words": ({"prompt": ["a"], "words": [["a"] * 2**23]}, {}),
    "nested": ({"prompt": ["a"], "weights": [{"a": "b" * 2**26}]}, {}),
}


@pytest.mark.parametrize("name", tiered(EXPANDING, quick=3))
def test_a_small_parquet_file_of_gigabytes_is_refused_before_it_is_decoded(
    tmp_path, monkeypatch, name
):
    columns, options = EXPANDING[name]
    options = {"compression": "zstd", **options}
    parquet.write_table(pa.table(columns), tmp_path / "p.parquet", **options)
    assert (tmp_path / "p.parquet").stat().st_size < 2**20
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", None)
    with pytest.raises(ValueError, match="bytes in the Parquet file, and .* in memory"):
        planned(source=tmp_path / "p.parquet")


def test_of_a_text_that_a_parquet_file_holds_once_few_are_in_memory(tmp_path):
    """Its pages are small, and nothing but decoding tells how large a batch of rows is."""
    parquet.write_table(pa.table({"prompt": ["a" * 2**20] * 150}), tmp_path / "p.parquet")
    before = pa.total_allocated_bytes()
    found = table_rows(tmp_path / "p.parquet", None, lambda names, _: names)
    for row, _ in zip(found, range(100), strict=False):
        assert "1,048,576 characters" in row.reason and not row.fields
        assert pa.total_allocated_bytes() - before < 50 * 2**20


def test_fewer_rows_are_in_memory_if_each_may_be_large(tmp_path, monkeypatch):
    monkeypatch.setattr("sdattn.batch.parquet._MEMORY", 2**22)
    parquet.write_table(pa.table({"prompt": ["a" * 2**20] * 40}), tmp_path / "p.parquet")
    before = pa.total_allocated_bytes()
    for row in table_rows(tmp_path / "p.parquet", None, lambda names, _: names):
        assert pa.total_allocated_bytes() - before < 10 * 2**20, row.line


def test_what_packs_well_is_read(tmp_path):
    """A million equal cells, and a text near the longest."""
    n = 10**5
    columns = {"prompt": ["a cat"] * n, "words": [["cat"]] * n, "negative_prompt": ["b" * 400] * n}
    parquet.write_table(pa.table(columns), tmp_path / "p.parquet")
    found = list(table_rows(tmp_path / "p.parquet", None, lambda names, _: names))
    assert len(found) == n and not any(row.reason for row in found)
    parquet.write_table(
        pa.table({"prompt": ["a" * 2**17, "a" * (2**17 + 1)]}), tmp_path / "p.parquet"
    )
    found = table_rows(tmp_path / "p.parquet", None, lambda names, _: names)
    assert [bool(row.reason) for row in found] == [False, True]


def test_a_column_that_is_not_read_may_be_large_and_one_that_hardly_packs_too(tmp_path):
    columns = {"prompt": ["a cat"], "zeros": ["a" * 2**26]}
    parquet.write_table(pa.table(columns), tmp_path / "p.parquet", compression="zstd")
    [row] = table_rows(tmp_path / "p.parquet", None, lambda names, _: ["prompt"])
    assert row.fields == {"prompt": "a cat"}
    for columns in ({"prompt": ["a" * 2**17] * 9}, {"prompt": ["a" * 2**26]}):  # 1 MB; 21 times
        options = {"use_dictionary": False, "compression": "snappy"}
        parquet.write_table(pa.table(columns), tmp_path / "p.parquet", **options)
        assert list(table_rows(tmp_path / "p.parquet", None, lambda names, _: names))
    table = pa.table({"prompt": ["a" * 2**20]})  # a thousand times, but small
    parquet.write_table(table, tmp_path / "p.parquet", compression="zstd")
    assert list(table_rows(tmp_path / "p.parquet", None, lambda names, _: names))


@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "none"])
def test_a_parquet_file_with_a_broken_page_is_refused_in_words(tmp_path, compression):
    path = tmp_path / "p.parquet"
    rows = pa.table({"prompt": [f"a cat {n * n}" for n in range(9999)]})
    parquet.write_table(rows, path, compression=compression)
    data = path.read_bytes()
    path.write_bytes(data[:60] + b"\xff" * 900 + data[960:])
    with pytest.raises(ValueError, match="not a readable Parquet file"):
        list(table_rows(path, None, lambda names, _: names))


def test_a_folder_of_lists_is_one_list(tmp_path):
    put(tmp_path, "data/a.jsonl", line_of(prompt="one"))
    put(tmp_path, "data/b.csv", "prompt\ntwo\nthree\n")
    put(tmp_path, "README.md", "# not a list")
    train = tmp_path / "data/train-00000-of-00001.parquet"
    parquet.write_table(pa.table({"text": ["four"]}), train)
    items, _ = planned(source=tmp_path)
    assert [item.prompt for item in items] == ["one", "two", "three", "four"]
    assert [item.line for item in items] == [1, 2, 3, 4]
    parquet.write_table(pa.table({"text": ["five"]}), tmp_path / "data/test-00000-of-00001.parquet")
    with pytest.raises(ValueError, match="the splits test, train"):
        planned(source=tmp_path)


@pytest.mark.slow
def test_a_saved_data_set_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"prompt": ["a cat", "a dog"], "extra": [1, 2]})
    rows.save_to_disk(str(tmp_path / "one"))
    assert prompts(planned(source=tmp_path / "one")) == (["a cat", "a dog"], [])
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "train"))
    assert prompts(planned(source=tmp_path / "train"))[0] == ["a cat", "a dog"]
    datasets.DatasetDict({"a": rows, "b": rows}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ValueError, match="the splits a, b"):
        planned(source=tmp_path / "two")


def test_a_list_in_a_storage_is_read():
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe_file("/lists/p.jsonl", line_of())
    assert prompts(planned(source="memory://lists/p.jsonl")) == (["a red cat"], [])
    files.pipe_file("/lists/sub/q.jsonl", line_of(prompt="a dog"))
    assert prompts(planned(source="memory://lists")) == (["a red cat", "a dog"], [])


@pytest.mark.parametrize("name", ["p.json", "p.tar", "p.jpg", "p.docx", "p"])
def test_other_files_are_refused(tmp_path, name):
    put(tmp_path, name, "[]")
    with pytest.raises(ValueError, match=r"ends in .jsonl.*photos"):
        planned(source=tmp_path / name)


@pytest.mark.parametrize("name", ["nothere", "nothere.jsonl", "nothere.tar"])
@pytest.mark.parametrize("kind", ["source", "photos"])
def test_a_source_that_is_not_there_is_told_so(tmp_path, kind, name):
    with pytest.raises(FileNotFoundError, match=f"There is no file or folder .*{name}"):
        planned(**{kind: tmp_path / name})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Prompt\tCategory\tChallenge", "of a table"),
        ("Prompt,Category", "of a table"),
        ('--prompt "a red heart" --steps 1', "another program"),
        ("Negative prompt: blurry", "another program"),
    ],
)
def test_what_is_no_prompt_in_a_text_file_is_a_bad_line(text, reason):
    [row] = rows_of(io.BytesIO(f"{text}\n".encode()), "txt", lambda names, images: names)
    assert reason in row.reason and not row.fields
    [row] = rows_of(io.BytesIO(b"steps: a cat -- and a dog\n"), "txt", lambda *_: [])
    assert row.fields == {"prompt": "steps: a cat -- and a dog"} and not row.reason
