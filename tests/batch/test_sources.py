"""Where the prompts of a batch come from."""

import io
import sys

import datasets
import huggingface_hub
import pandas
import pytest

from sdattn.batch.input.items import read_items
from sdattn.batch.input.sources import read_source

ROWS = [
    {"prompt": "a cat", "id": "x", "seed": 2**60, "words": ["cat"], "guidance_scale": 5.5},
    {"prompt": 'a "dog",\nred', "id": None, "seed": None, "words": None, "guidance_scale": None},
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def to_parquet(path):
    datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    return path


def check(source, kind=None):
    items, bad = read_items(*read_source(str(source), kind), seed=3)
    assert bad == []
    first, second = items
    assert (first.id, first.seed, first.words, first.prompt) == ("x", 2**60, ("cat",), "a cat")
    assert first.options == {"guidance_scale": 5.5}
    assert (second.id, second.seed, second.line) == ("000002", 4, 2)
    assert (second.prompt, second.words, second.options) == ('a "dog",\nred', None, {})


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # datasets leaves files open
@pytest.mark.parametrize("form", ["parquet", "ending", "stdin", "saved", "split", "folder"])
def test_rows_are_items_wherever_they_come_from(tmp_path, monkeypatch, form):
    path = tmp_path / ("in.data" if form == "ending" else "in.parquet")
    found = datasets.Dataset.from_list(ROWS)
    if form == "saved":
        found.save_to_disk(tmp_path / "set")
    elif form == "split":
        datasets.DatasetDict({"test": found}).save_to_disk(tmp_path / "set")
    elif form == "folder":
        (tmp_path / "set").mkdir()
        to_parquet(tmp_path / "set" / "train.parquet")
    elif form == "stdin":
        data = io.BytesIO(to_parquet(path).read_bytes())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
        return check("-", "parquet")
    else:
        to_parquet(path)
    folders = ("saved", "split", "folder")
    check(tmp_path / "set" if form in folders else path, "parquet" if form == "ending" else None)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("id", b"x", "id={'type': 'bytes'}: it names a folder"),
        ("prompt", b"a cat", "prompt={'type': 'bytes'}: write a text"),
        ("seed", float("inf"), "Infinity is not a number"),
        ("seed", 7.5, "seed=7.5: write a whole number"),
    ],
)
def test_what_cannot_be_a_field_is_refused_by_its_line(tmp_path, column, value, reason):
    rows = pandas.DataFrame({"prompt": ["a cat"], column: [value]})
    rows.to_parquet(tmp_path / "in.parquet")
    items, [bad] = read_items(*read_source(str(tmp_path / "in.parquet")))
    assert items == [] and bad.line == 1
    assert bad.reason.startswith(reason)


def refuse(source, error, message):
    with pytest.raises(error, match=message):
        read_source(str(source))


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "in.parquet").write_bytes(b"PAR1 no more")
    refuse(tmp_path / "in.parquet", ValueError, "not a readable Parquet file: ")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.parquet").write_text("mine")
    refuse(tmp_path / "photos", ValueError, "datasets cannot read the folder")
    two = {name: datasets.Dataset.from_list(ROWS) for name in ("train", "test")}
    datasets.DatasetDict(two).save_to_disk(tmp_path / "two")
    refuse(tmp_path / "two", ValueError, r"has the splits train, test\. Write one of them")


def test_a_hub_that_cannot_be_reached_is_told_before_a_model_is_loaded(invoke, tmp_path):
    refuse("hf://datasets/owner/name/in.csv", OSError, "hf://datasets/owner/name/in.csv cannot be")
    code, _, err = invoke("batch", "hf://datasets/owner/name/in.csv", "--out", "run")
    assert code == 1 and len(err.splitlines()) == 1
    assert err.startswith("sdattn: hf://datasets/owner/name/in.csv cannot be reached: ")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("library", ["pyarrow", "pyarrow.parquet", "datasets"])
def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, invoke, library):
    path = to_parquet(tmp_path / "in.parquet")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "in.csv").touch()
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    if library == "datasets":
        code, _, err = invoke("batch", "set", "--out", "run")
        assert "needs datasets: pip install 'sdattn[datasets]'" in err
    else:
        code, _, err = invoke("batch", path.name, "--out", "run")
        assert "Parquet needs pyarrow: pip install 'sdattn[parquet]'" in err
        assert code == 1 and len(err.splitlines()) == 1
        (tmp_path / "in.txt").write_text("a cat\n")
        code, _, err = invoke("batch", "in.txt", "--out", "run", "--format", "parquet")
        assert "Parquet needs pyarrow: pip install 'sdattn[parquet]'" in err
    assert code == 1 and len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()
