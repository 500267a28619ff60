"""A batch run as a data set of Hugging Face's datasets, of webdataset and of pandas."""

import gc
import io
import json

import pytest
from helpers.batch_draws import SMALL, draw
from helpers.batch_runs import FORMATS, new_run, pack, rows_of, without_columns
from PIL import Image
from safetensors.torch import load

from sdattn.batch import open_batch
from sdattn.batch.formats import format_of
from sdattn.batch.records import read_manifest
from sdattn.files.place import Place
from sdattn.runs.parts import PARTS, USUAL_OF_IMAGES


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
def test_a_run_tells_datasets_what_its_files_are(drawn, load_dataset, streaming):
    found = load_dataset(str(drawn), streaming=streaming)
    check_rows(found, drawn)
    assert [row["negative_prompt"] for row in found] == [None, None, "cat", None]
    assert [row["words"] for row in found][2:] == [["red", ",", "a", "dog"], ["cat"]]


def test_columns_that_are_empty_throughout_are_there(tmp_path, load_dataset):
    root = new_run(tmp_path / "run", {"a": pack("a")})
    found = load_dataset("imagefolder", data_dir=str(root))
    check_rows(found, root)
    assert found["negative_prompt"] == found["num_inference_steps"] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_items_with_and_without_numbers_of_words_are_of_one_kind(tmp_path, load_dataset, kind):
    """An item without words, maps of 0, and numbers, in each order."""
    zero, plain = pack("a", 1, empty=range(77)), pack("c", 3)
    items = {"a": zero, "b": without_columns(pack("b", 2)), "c": plain}
    for order in ("abc", "cba", "bca"):
        root = new_run(tmp_path / order, {name: items[name] for name in order}, format=kind)
        found, rows = load_dataset(str(root)), rows_of(root / "metadata.jsonl")
        found = found["json"] if kind == "webdataset" else found
        numbers = {row["id"]: row["statistics"] for row in found}
        for row in rows:
            said = [word["peak"] for word in numbers[row["id"]] or ()]
            assert said == [word["peak"] for word in row["statistics"]]
        assert [bool(numbers[item]) for item in "abc"] == [True, False, True]
        assert [numbers[item][0]["entropy"] is None for item in "ac"] == [True, False]


@pytest.mark.parametrize(
    ("kind", "there", "lacking"),
    [
        ("folder", {"id"}, {"image"}),
        ("webdataset", {"json", "maps.safetensors"}, {"png"}),
        ("parquet", {"run", "prompt", "maps"}, {"image"}),
    ],
)
def test_what_was_not_saved_is_no_column(tmp_path, load_dataset, kind, there, lacking):
    items = {name: pack(name, line, parts=("maps",)) for line, name in enumerate("ab", 1)}
    found = load_dataset(str(new_run(tmp_path / "run", items, format=kind, save=["maps"])))
    assert there <= {*found.column_names} and lacking.isdisjoint(found.column_names)


# Tar files


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """A run of several tars; its items have other options and other files than the first."""
    more = [{"guidance_scale": 5}, {"negative_prompt": "x", "num_inference_steps": 3}, {}]
    names, parts = ("train", "b.c", "B", "test-1", "a_b.json"), [("image", "maps"), PARTS]
    items = {n: pack(n, i, parts=parts[i > 3], **more[i % 3]) for i, n in enumerate(names)}
    return new_run(tmp_path_factory.mktemp("tars") / "run", items, format="webdataset"), items


@pytest.mark.parametrize("streaming", [False, True])
def test_tars_are_a_data_set_of_images_maps_and_settings(tars, load_dataset, streaming):
    root, items = tars
    found = {row["json"]["id"]: row for row in load_dataset(str(root), streaming=streaming)}
    assert found.keys() == items.keys()
    for item, row in found.items():
        files = items[item]
        assert row.keys() == {"png", "maps.safetensors", "json"}
        assert row["png"].tobytes() == Image.open(io.BytesIO(files["image.png"])).tobytes()
        assert row["maps.safetensors"] == files["maps.safetensors"]
        info = json.loads(files["run.json"])
        assert all(row["json"][key] == info[key] for key in ("line", "prompt", "seed", "size"))
        assert [word["text"] for word in row["json"]["words"]] == ["a", "red", "cat"]
        assert row["json"]["statistics"] == info["statistics"] and info["statistics"]
        options = {key: one for key, one in row["json"]["options"].items() if one is not None}
        assert options == info["options"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # it leaves files open
def test_webdataset_reads_every_file_of_an_item(tars):
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    root, items = tars
    paths = sorted(str(path) for path in root.glob("shards/*.tar"))
    samples = webdataset.WebDataset(paths, shardshuffle=False, empty_check=False)
    found = {json.loads(one["json"])["id"]: one for one in samples}
    gc.collect()
    assert found.keys() == items.keys()
    assert {one["__key__"] for one in found.values()} >= {"b%2Ec", "a_b%2Ejson", "B"}
    short = {"image.png": "png", "run.json": "json"}
    for item, sample in found.items():
        files = {name: data for name, data in sample.items() if not name.startswith("__")}
        assert files == {short.get(n, n.replace("/", ".")): d for n, d in items[item].items()}


# Parquet


@pytest.fixture(scope="module")
def parquets(tmp_path_factory):
    """A run of several files, of which one has options that the others lack."""
    parts, more = ("image", "maps", "grid"), [{}, {"guidance_scale": 5}]
    names = ("train", "b.c", "B", "test-1", "e")
    items = {n: pack(n, i, parts=parts, **more[i > 3]) for i, n in enumerate(names, 1)}
    root = tmp_path_factory.mktemp("parquets") / "run"
    return new_run(root, items, format="parquet", save=list(parts)), items


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_is_a_data_set_of_images_rows_and_maps(parquets, load_dataset, streaming):
    root, items = parquets
    rows = {row["id"]: row for row in rows_of(root / "metadata.jsonl")}
    found = {row["id"]: row for row in load_dataset(str(root), streaming=streaming)}
    assert found.keys() == items.keys() == rows.keys()
    for item, row in found.items():
        files = items[item]
        assert row["image"].tobytes() == Image.open(io.BytesIO(files["image.png"])).tobytes()
        same = rows[item].keys() - {"place", "run_sha256", "files"}
        assert row.keys() == {*same, "image", "maps", "files", "run"}
        assert {name: row[name] for name in same} == {name: rows[item][name] for name in same}
        assert json.loads(row["run"]) == json.loads(files["run.json"])
        assert row["files"] == [{"name": "grid.png", "bytes": files["grid.png"]}]
        maps = {one["layer"]: (one["shape"], one["values"]) for one in row["maps"]}
        for layer, held in load(files["maps.safetensors"]).items():
            shape, values = maps.pop(layer)
            assert shape == list(held.shape) and values == held.flatten().tolist()
        assert not maps


def test_a_byte_that_changed_in_a_page_is_not_read_as_if_it_were_right(parquets, tmp_path):
    """Of an image, which is stored as it is: nothing but the page's checksum knows of it."""
    root, items = parquets
    image = items["e"]["image.png"]
    [shard] = [path for path in root.glob("shards/*.parquet") if image in path.read_bytes()]
    data = bytearray(shard.read_bytes())
    data[data.index(image) + len(image) // 2] ^= 1
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / shard.name).write_bytes(data)
    format = format_of(Place(tmp_path), read_manifest(Place(root)))
    with pytest.raises(ValueError, match="CRC"):
        format.read(f"shards/{shard.name}", "e", ["image.png"])
