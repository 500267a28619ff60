"""A batch run as a data set of Hugging Face's datasets and of webdataset."""

import gc
import io
import json

import pytest
from helpers.batch_draws import SMALL, draw
from helpers.batch_runs import FORMATS, new_run, pack, rows_of, without_columns
from PIL import Image

from sdattn.batch import open_batch
from sdattn.runs.parts import PARTS, USUAL_OF_IMAGES


@pytest.fixture
def load_run(monkeypatch, tmp_path):
    """The run's items as docs/batches.md reads them."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.disable_progress_bars()
    features = {"png": datasets.Image(), "json": datasets.Json()}
    features["maps.safetensors"] = datasets.Value("binary")

    def load(root, kind="folder", **options):
        if kind == "folder":
            files = [f"{root}/{row['file_name']}" for row in rows_of(root / "metadata.jsonl")]
            options["data_files"] = [*files, f"{root}/metadata.jsonl"]
            options["path"] = "imagefolder"
        else:
            options["data_files"] = tars_of(root)
            options |= {"path": "webdataset", "features": datasets.Features(features)}
        return datasets.load_dataset(split="train", cache_dir=str(tmp_path / "cache"), **options)

    return load


def tars_of(root):
    return sorted({f"{root}/{row['place']}" for row in rows_of(root / "metadata.jsonl")})


@pytest.fixture(scope="module")
def drawn(model, tmp_path_factory):
    """A run with images of all kinds, and ids and words that datasets takes for splits, as it does
    anywhere in a path."""
    root = tmp_path_factory.mktemp("splits") / "run"
    rows = [{"prompt": "a cat", "id": "train"}, {"prompt": "a train, dev", "id": "test-1"}]
    rows += [{"prompt": "red, a dog", "negative_prompt": "cat", "id": "x.y"}]
    rows += [{"prompt": "dog and cat", "words": ["cat"], "width": 128, "id": "c_val.2"}]
    options = {**SMALL, "guidance_scale": 2.0}
    save = (*USUAL_OF_IMAGES, "masks")
    assert draw(model, root, rows, options=options, save=save).exit_code == 0
    return root


def check_rows(found, root):
    run = open_batch(root)
    found, written = [*found], rows_of(root / "metadata.jsonl")
    assert [row["id"] for row in found] == [*run]
    for row, line in zip(found, written, strict=True):
        line.pop("file_name")
        assert row.pop("image").tobytes() == run[row["id"]].image.tobytes()
        assert row == line and row["prompt"] == run[row["id"]].info["prompt"]


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_reads_images_and_rows(drawn, load_run, streaming):
    found = load_run(drawn, streaming=streaming)
    check_rows(found, drawn)
    assert [row["negative_prompt"] for row in found] == [None, None, "cat", None]
    assert [row["words"] for row in found][2:] == [["red", ",", "a", "dog"], ["cat"]]


def test_columns_that_are_empty_throughout_are_there(tmp_path, load_run):
    root = new_run(tmp_path / "run", {"a": pack("a")})
    found = load_run(root)
    check_rows(found, root)
    assert found["negative_prompt"] == found["num_inference_steps"] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_items_with_and_without_numbers_of_words_are_of_one_kind(tmp_path, load_run, kind):
    """An item without words, maps of 0, and numbers, in each order."""
    zero, plain = pack("a", 1, empty=range(77)), pack("c", 3)
    items = {"a": zero, "b": without_columns(pack("b", 2)), "c": plain}
    for order in ("abc", "cba", "bca"):
        root = new_run(tmp_path / order, {name: items[name] for name in order}, format=kind)
        found, rows = load_run(root, kind), rows_of(root / "metadata.jsonl")
        found = found["json"] if kind == "webdataset" else found
        numbers = {row["id"]: row["statistics"] for row in found}
        for row in rows:
            said = [word["peak"] for word in numbers[row["id"]] or ()]
            own = [word["peak"] for word in row["statistics"]]
            assert said == pytest.approx(own, rel=1e-14)  # datasets' JSON parser may lose a bit
        assert [bool(numbers[item]) for item in "abc"] == [True, False, True]
        assert [numbers[item][0]["entropy"] is None for item in "ac"] == [True, False]


# Tar files


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """A run of several tars; its items have other options and other files than the first."""
    more = [{"guidance_scale": 5}, {"negative_prompt": "x", "num_inference_steps": 3}, {}]
    names, parts = ("train", "b.c", "B", "test-1", "a_b.json"), [("image", "maps"), PARTS]
    items = {n: pack(n, i, parts=parts[i > 3], **more[i % 3]) for i, n in enumerate(names)}
    return new_run(tmp_path_factory.mktemp("tars") / "run", items, format="webdataset"), items


@pytest.mark.parametrize("streaming", [False, True])
def test_tars_are_a_data_set_of_images_maps_and_settings(tars, load_run, streaming):
    root, items = tars
    found = {row["json"]["id"]: row for row in load_run(root, "webdataset", streaming=streaming)}
    assert found.keys() == items.keys()
    for item, row in found.items():
        files = items[item]
        assert row.keys() == {"png", "maps.safetensors", "json"}
        assert row["png"].tobytes() == Image.open(io.BytesIO(files["image.png"])).tobytes()
        assert row["maps.safetensors"] == files["maps.safetensors"]
        expected = json.loads(files["run.json"])
        # its Json type reads numbers to 15 digits
        for word, known in zip(row["json"]["statistics"], expected["statistics"], strict=True):
            assert word["word"] == known["word"]
            assert word["peak"] == pytest.approx(known["peak"], rel=1e-14)
        rest = row["json"].keys() - {"statistics"}
        assert rest == expected.keys() - {"statistics"} and expected["statistics"]
        assert all(row["json"][name] == expected[name] for name in rest)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # it leaves files open
def test_webdataset_reads_every_file_of_an_item(tars):
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    root, items = tars
    samples = webdataset.WebDataset(tars_of(root), shardshuffle=False, empty_check=False)
    found = {json.loads(one["json"])["id"]: one for one in samples}
    gc.collect()
    assert found.keys() == items.keys()
    assert {one["__key__"] for one in found.values()} >= {"b%2Ec", "a_b%2Ejson", "B"}
    short = {"image.png": "png", "run.json": "json"}
    for item, sample in found.items():
        files = {name: data for name, data in sample.items() if not name.startswith("__")}
        assert files == {short.get(n, n.replace("/", ".")): d for n, d in items[item].items()}
