"""Columns of lists as people have them: prompts by other names, numbers of pandas, what is kept."""

import csv
import io
import json

import pandas
import pytest
from helpers.batch_draws import SMALL
from helpers.batch_runs import rows_of
from helpers.item_lines import check_message, line_of, read_one
from helpers.tiers import tiered

from sdattn.batch import Request, merge, open_batch, run_batch, verify
from sdattn.batch.input.columns import Columns
from sdattn.batch.input.items import read_items
from sdattn.batch.input.plan import check_items, fingerprint

PARTI = (
    "Prompt\tCategory\tChallenge\tNote\n"
    "bond\tAbstract\tBasic\tBiology-inspired\n"
    '"G I G G L E" painted on a wall, red\tOutdoor Scenes\tWriting & Symbols\t\n'
    'The words "Fly" are written\tOutdoor Scenes\tComplex\t007\n'
)
COCO = {
    "info": {"year": 2017},
    "images": [{"id": 179765, "file_name": "a.jpg", "width": 640, "height": 480}],
    "annotations": [
        {"image_id": 179765, "id": 38, "caption": "A black Honda motorcycle."},
        {"image_id": 179765, "id": 41, "caption": "A red circle.\n"},
    ],
}


@pytest.mark.parametrize("name", ["prompt", "Prompt", "Prompts", "caption", "text"])
def test_the_column_of_the_prompt_is_found_by_its_name(name):
    table = f"{name},seed\na cat,5\n".encode()
    for kind, data in (("csv", table), ("tsv", table.replace(b",", b"\t"))):
        item = read_one(data, kind)
        assert (item.prompt, item.seed, item.options) == ("a cat", 5, {})
    item = read_one(json.dumps({name: "a cat", "seed": 5}).encode())
    assert (item.prompt, item.seed, item.options) == ("a cat", 5, {})


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_the_column_of_the_prompt_can_be_named(kind):
    rows = [{"prompt": "a dog", "Scene": "a cat", "text": "a cow"}]
    data = pandas.DataFrame(rows).to_csv(index=False).encode()
    data = line_of(**rows[0]) if kind == "jsonl" else data
    assert read_one(data, kind, columns=Columns("Scene")).prompt == "a cat"
    for named in (Columns(), Columns("Nothing")):
        try:
            _, [bad] = read_items(data, kind, columns=named)
            reason = bad.reason
        except ValueError as error:
            reason = str(error)
        assert "prompt_column" in reason and "Scene" in reason and "text" in reason


@pytest.mark.parametrize(
    "data",
    [
        PARTI,
        PARTI.replace("\n", "\r\n"),
        PARTI.replace("\n", "\r"),
        "\ufeff" + PARTI,
        PARTI.encode("utf-16"),
    ],
)
@pytest.mark.parametrize("kind", ["tsv", "csv", "auto"])
def test_parti_prompts_are_read(data, kind):
    data = data if isinstance(data, bytes) else data.encode()
    items, bad = read_items(data, kind, columns=Columns(keep="all"))
    assert bad == []
    assert [(item.line, item.prompt) for item in items] == [
        (2, "bond"),
        (3, '"G I G G L E" painted on a wall, red'),
        (4, 'The words "Fly" are written'),
    ]
    assert [item.columns["Note"] for item in items] == ["Biology-inspired", "", "007"]


def test_a_table_of_pandas_with_tabs_comes_back():
    prompts = ['"x"\ty', "two\nlines", 'a "red" cat', "a,b;c", " spaces ", '"', 'a 5" cat']
    table = pandas.DataFrame({"prompt": prompts, "kind": [*map(str, range(7))]})
    for separator, kind in (("\t", "tsv"), (",", "csv"), (";", "csv")):
        for index in (False, True):
            data = table.to_csv(sep=separator, index=index).encode()
            items, bad = read_items(data, kind, columns=Columns(keep=["kind"]))
            assert ([item.prompt for item in items], bad) == (prompts, [])
            assert [item.columns for item in items] == [{"kind": str(n)} for n in range(7)]


def test_rows_of_another_length_are_refused_by_their_lines():
    data = 'Prompts,Category\na cat,Colors\na dog\na, b, c\n"a, b",Colors\n,Colors\na cow,\n'
    items, bad = read_items(data.encode(), "csv")
    assert [(item.line, item.prompt) for item in items] == [(2, "a cat"), (5, "a, b"), (7, "a cow")]
    assert [(one.line, one.reason.split(".")[0]) for one in bad] == [
        (3, "found 1 cells below a header of 2"),
        (4, "found 3 cells below a header of 2"),
        (6, "the prompt is missing; found ['Category']"),
    ]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("kind", ["json", "auto"])
def test_captions_of_coco_are_read(kind, indent):
    data = json.dumps(COCO, indent=indent).encode()
    items, bad = read_items(data, kind, columns=Columns(keep=["image_id"]))
    assert bad == []
    assert [(item.id, item.prompt) for item in items] == [
        ("38", "A black Honda motorcycle."),
        ("41", "A red circle.\n"),
    ]
    assert all(item.options == {} for item in items)
    assert [item.columns for item in items] == [{"image_id": "179765"}] * 2
    with pytest.raises(ValueError, match="input_format='json'"):
        read_items(data, "txt")


def test_styles_are_read_and_those_for_another_text_refused():
    data = (
        'name,prompt,negative_prompt\nA,"a red circle, video",blurry\nB,"{prompt}, video",\nC,,x\n'
    )
    items, bad = read_items(data.encode(), "csv", columns=Columns(keep=["name"]))
    [item] = items
    assert (item.prompt, item.negative_prompt) == ("a red circle, video", "blurry")
    assert item.columns == {"name": "A"}
    assert [one.line for one in bad] == [3, 4] and "is a style" in bad[0].reason


def test_a_column_that_is_kept_is_not_the_prompt():
    item = read_one(b"prompt,text\na cat,a sign\n", "csv", columns=Columns(keep=["text"]))
    assert (item.prompt, item.columns) == ("a cat", {"text": "a sign"})


NUMBERS = ("seed", "width", "height", "num_frames", "num_inference_steps", "guidance_scale")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [8.0, "8", "8.0", "+08", " 8 ", 8, "8e0"])
def test_numbers_are_read_as_pandas_writes_them(name, value):
    item = read_one(line_of(**{name: value}))
    found = item.seed if name == "seed" else item.options[name]
    assert found == 8
    assert name == "guidance_scale" or type(found) is int
    table = f"prompt,{name}\na red cat,{value}\n".encode()
    assert read_one(table, "csv") == read_one(table.replace(b",", b"\t"), "tsv")
    assert read_one(table, "csv").options == item.options


def test_a_frame_with_holes_comes_back():
    frame = pandas.DataFrame({"prompt": ["a", "b"], "seed": [7, None], "width": [None, 64]})
    for kind, text in (
        ("jsonl", frame.to_json(orient="records", lines=True)),
        ("json", frame.to_json(orient="records")),
        ("csv", frame.to_csv()),
    ):
        items, bad = read_items(text.encode(), kind)
        assert bad == []
        assert items[0].seed == 7 and items[0].options == {}
        assert items[1].options == {"width": 64}


@pytest.mark.parametrize("value", [7.5, "7.5", "7,0", "1_0", "\u0661", "0x8", "", float(2**53)])
def test_other_numbers_are_refused(value):
    _, [bad] = read_items(line_of(seed=value), "jsonl")
    assert "write a whole number" in bad.reason


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *((name, "guidance_scale") for name in ("cfg_scale", "cfg", "CFG scale", "guidance")),
        *((name, "num_inference_steps") for name in ("steps", "Steps", "sampling-steps")),
        *((name, "negative_prompt") for name in ("negative", "Negative prompt", "neg_prompt")),
        *((name, "scheduler") for name in ("sampler", "sampler_name", "Sampler", "scheduler")),
        *((name, "batch_size") for name in ("batch_size", "n_iter")),
        *((name, "width") for name in ("w", "Width")),
        ("noise_seed", "seed"),
        ("Seed", "seed"),
        ("ID", "id"),
        ("positive", "prompt"),
    ],
)
def test_names_of_other_programs_are_told_ours(name, ours):
    for kind, data in (
        ("jsonl", line_of(**{name: "7"})),
        ("csv", f"prompt,{name}\na red cat,7\n".encode()),
    ):
        items, [bad] = read_items(data, kind)
        check_message(bad)
        assert items == [] and repr(name) in bad.reason and ours in bad.reason
        kept = read_one(data, kind, columns=Columns(keep=[name]))
        assert kept.columns == {name: "7"} and kept.options == {}


@pytest.mark.parametrize("value", [-1, "-1", -1.0])
def test_a_seed_at_random_is_told_what_to_do(value):
    _, [bad] = read_items(line_of(seed=value), "jsonl")
    assert "leave seed out" in bad.reason


# What is kept


def test_columns_of_a_table_that_nobody_knows_are_left_out_and_told(tiny_pipe, capsys):
    items, _ = read_items(PARTI.encode(), "tsv")
    jobs, bad = check_items(tiny_pipe, items, {})
    assert bad == [] and len(jobs) == 3
    assert all(not {"Category", "Note"} & job.options.keys() for job in jobs)
    err = capsys.readouterr().err
    assert "'Category', 'Challenge', 'Note'" in err and "keep_columns" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("keep", [(), "all"])
@pytest.mark.parametrize(
    "name", ["guidence_scale", "num_inference_step", "Guidance_Scale", "promt"]
)
def test_a_slip_of_the_pen_is_no_column(tiny_pipe, name, keep):
    data = f"prompt,{name},mood\na cat,5,sad\n".encode()
    items, bad = read_items(data, "csv", columns=Columns(keep=keep))
    jobs, more = check_items(tiny_pipe, items, {})
    assert jobs == [] and len(bad + more) == 1


def test_all_that_is_no_option_is_kept(tiny_pipe):
    data = b"prompt,eta,clip_skip,mood\na cat,0.5,1.0,1e5\na dog,,,\n"
    items, _ = read_items(data, "csv", columns=Columns(keep="all"))
    jobs, bad = check_items(tiny_pipe, items, {})
    assert bad == []
    assert [dict(job.item.columns) for job in jobs] == [{"mood": "1e5"}, {"mood": ""}]
    assert jobs[0].options["eta"] == 0.5 and type(jobs[0].options["clip_skip"]) is int


def test_an_item_with_another_column_is_another_item(tiny_pipe):
    def made(note, **asked):
        items, _ = read_items(f"prompt,note\na cat,{note}\n".encode(), "csv", **asked)
        [job], _ = check_items(tiny_pipe, items, {})
        return fingerprint(job, "")

    keep = {"columns": Columns(keep=["note"])}
    assert made("x") == made("y") != made("x", **keep) != made("y", **keep)


def test_fields_of_json_that_nobody_knows_are_refused_unless_kept(tiny_pipe):
    data = b'{"prompt": "a cat", "mood": {"x": [1, null]}, "n": 7}\n{"prompt": "a dog", "n": "7"}'
    items, _ = read_items(data, "jsonl")
    jobs, bad = check_items(tiny_pipe, items, {})
    assert jobs == [] and "keep_columns" in bad[0].reason
    for keep in ("all", ("mood", "n")):
        items, _ = read_items(data, "jsonl", columns=Columns(keep=keep))
        jobs, bad = check_items(tiny_pipe, items, {})
        assert bad == []
        found = [dict(job.item.columns) for job in jobs]
        assert found == [{"mood": '{"x": [1, null]}', "n": "7"}, {"mood": "", "n": "7"}]


@pytest.mark.parametrize("name", ["seed", "line", "maps", "image", "word", "peak", "file_name"])
def test_names_of_rows_of_ours_cannot_be_kept(name, tmp_path):
    with pytest.raises(ValueError, match="rows have columns"):
        run_batch(Request("in.csv", tmp_path / "run", keep_columns=[name]))
    if name != "seed":
        data = f"prompt,{name}\na cat,5\n".encode()
        items, [bad] = read_items(data, "csv", columns=Columns(keep="all"))
        assert items == [] and name in bad.reason


def test_columns_to_keep_that_are_not_there_are_refused():
    for data, kind in ((PARTI.encode(), "tsv"), (line_of(Category="x"), "jsonl")):
        with pytest.raises(ValueError, match=r"keep_columns=\['Nope'\].*Category"):
            read_items(data, kind, columns=Columns(keep=["Category", "Nope"]))


@pytest.mark.parametrize("format", tiered(["folder", "webdataset", "parquet"], daily=3))
@pytest.mark.slow
def test_what_is_kept_is_read_again(model, tmp_path, monkeypatch, format):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [["a cat", "Abstract", ""], ["a dog", '5" \U0001f98a, "x"', ""], ["red", "007", ""]]
    text = io.StringIO()
    csv.writer(text).writerows([["Prompts", "Category", "The note"], *rows])
    (tmp_path / "in.csv").write_text(text.getvalue(), encoding="utf-8")
    kept = [{"Category": category, "The note": note} for _, category, note in rows]
    asked = {"model": model, "options": SMALL, "device": "cpu", "format": format, "batch_size": 1}
    asked |= {"shard_bytes": 1, "save": ("image", "maps"), "progress": False}
    for part in (1, 2):
        out = tmp_path / f"part-{part}"
        request = Request(tmp_path / "in.csv", out, **asked, part=(part, 2), keep_columns="all")
        assert run_batch(request).exit_code == 0
    merge([tmp_path / "part-1", tmp_path / "part-2"], tmp_path / "run")
    assert verify(tmp_path / "run") == (3, [])

    def of(row):
        return {name: row[name] for name in kept[0]}

    assert [of(row) for row in rows_of(tmp_path / "run/metadata.jsonl")] == kept
    batch = open_batch(tmp_path / "run")
    assert [run.info["list_columns"] for run in batch.values()] == kept
    table = batch.to_dataframe()
    assert [*table.groupby("id")["Category"].first()] == [row["Category"] for row in kept]
    found = datasets.load_dataset(
        str(tmp_path / "run"), split="train", cache_dir=str(tmp_path / "cache")
    )
    found = [
        row["json"]["list_columns"] | {"id": row["json"]["id"]} if "json" in row else row
        for row in found
    ]
    assert [of(row) for row in sorted(found, key=lambda row: row["id"])] == kept
