"""A batch run as a data set of Hugging Face's datasets."""

import pytest
from batch_runs import as_before, draw, new_run, pack, rows_of

from sdattn.batch import open_batch
from sdattn.runs.drawings import PARTS


@pytest.fixture
def load_dataset(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.disable_progress_bars()

    def load(*args, **options):
        found = datasets.load_dataset(*args, **options, cache_dir=str(tmp_path / "cache"))
        assert [*found] == ["train"]
        return found["train"]

    return load


@pytest.fixture(scope="module")
def drawn(model, tmp_path_factory):
    """A run with all that can be kept, pictures of all kinds among it."""
    root = tmp_path_factory.mktemp("drawn") / "run"
    rows = [{"prompt": "a cat"}, {"prompt": "red, a dog", "negative_prompt": "cat", "id": "x.y"}]
    rows += [{"prompt": "dog and cat", "words": ["cat"], "width": 128}]
    assert draw(model, root, *rows, save=PARTS).exit_code == 0
    assert len([*root.rglob("*.png")]) > 15
    return root


def check_rows(found, root):
    run = open_batch(root)
    assert found["id"] == [*run]
    written = rows_of(root / "metadata.jsonl")
    assert set(found.column_names) == {"image", *written[0]} - {"file_name"}
    for row, line in zip(found, written, strict=True):
        one = run[row["id"]]
        assert row["image"].tobytes() == one.image.tobytes()
        assert row["prompt"] == one.info["prompt"]
        assert {name: row[name] for name in line if name != "file_name"} == {
            name: value for name, value in line.items() if name != "file_name"
        }


def test_a_run_is_a_data_set_of_its_pictures(drawn, load_dataset):
    found = load_dataset("imagefolder", data_dir=str(drawn))
    check_rows(found, drawn)
    assert found["negative_prompt"] == [None, "cat", None]
    assert found["words"] == [["a", "cat"], ["red", ",", "a", "dog"], ["cat"]]


@pytest.mark.parametrize("number", [1, 2])
def test_columns_that_are_empty_throughout_are_there(tmp_path, load_dataset, number):
    items = {name: pack(name, line) for line, name in enumerate("ab"[:number], 1)}
    root = new_run(tmp_path / "run", items)
    found = load_dataset("imagefolder", data_dir=str(root))
    check_rows(found, root)
    assert found["negative_prompt"] == found["num_inference_steps"] == [None] * number


def test_rows_with_and_without_numbers_of_words_are_of_one_kind(tmp_path, load_dataset):
    """An item of the version before, maps of 0, and numbers, in each order."""
    zero, plain = pack("a", 1, empty=range(77)), pack("c", 3)
    items = {"a": zero, "b": as_before(pack("b", 2)), "c": plain}
    for order in ("abc", "cba", "bca"):
        root = new_run(tmp_path / order, {name: items[name] for name in order})
        found = load_dataset("imagefolder", data_dir=str(root))
        rows = {row["id"]: row for row in rows_of(root / "metadata.jsonl")}
        assert {row["id"]: row["statistics"] for row in found} == {
            name: rows[name].get("statistics") for name in "abc"
        }


@pytest.fixture(scope="module")
def of_splits(model, tmp_path_factory):
    """A run with ids and words that datasets takes for splits, as it does anywhere in a path."""
    root = tmp_path_factory.mktemp("splits") / "run"
    rows = [{"prompt": "a cat", "id": name} for name in ("train", "test-1", "c_val.2")]
    assert draw(model, root, *rows, {"prompt": "a train, dev"}, save=PARTS).exit_code == 0
    return root


def test_the_files_of_a_data_set_can_be_named(of_splits, load_dataset):
    files = {"train": ["metadata.jsonl", "items/*/*/image.png"]}
    found = load_dataset("imagefolder", data_dir=str(of_splits), data_files=files)
    check_rows(found, of_splits)


def test_a_run_tells_datasets_what_its_files_are(of_splits, load_dataset):
    check_rows(load_dataset(str(of_splits)), of_splits)
