"""The folder of a batch run: how items lie in it, what is whole, whose it is, what is wrong."""

import errno
import fcntl
import io
import json
import os
import pty
import random
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_pipeline, tiny_tokenizer
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load, save

from sdattn import Heatmaps, read_prompt
from sdattn.batch import Request, merge, open_batch, run_batch, status, verify
from sdattn.batch.drawing import Writer
from sdattn.batch.folder import BatchFolder, layout_of
from sdattn.batch.locks import Lock
from sdattn.batch.manifest import FORMAT
from sdattn.batch.progress import Progress, Tally
from sdattn.batch.whole import settle
from sdattn.files.writing import sha256, write_files
from sdattn.maps.aggregation import aggregate
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.maps.presets import PRESETS, Preset
from sdattn.runs.drawings import PARTS
from sdattn.runs.folder import pack_with_page
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.info import FORMAT as RUN_FORMAT
from sdattn.runs.info import RunSettings, sealed

FORMATS = ("folder", "shard")
TOKENIZER = tiny_tokenizer()
PROMPT = "a red cat"
BOTH = Preset("both", ("down", "up"))  # of the layers that items have here


def pack(item, line=1, **more):
    """The files of an item with maps and a picture of its own."""
    return dict(_pack(item, line, **more))


@cache
def _pack(item, line, *, fingerprint=None, parts=("image", "overlays", "maps"), **options):
    numbers = torch.Generator().manual_seed(line)
    maps = {
        "down.a": torch.rand(4, 6, 77, generator=numbers).softmax(-1),
        "up.b": torch.rand(2, 3, 77, generator=numbers).softmax(-1),
    }
    noise = np.random.default_rng(line).integers(0, 256, (64, 96, 3), np.uint8)
    layers = as_layers(maps)
    own = {"id": item, "line": line, "fingerprint": fingerprint or f"of-{item}"}
    info = RunSettings(**own, prompt=PROMPT, seed=line, options=options, size=(96, 64))
    prompt = read_prompt(TOKENIZER, PROMPT)
    heatmaps = Heatmaps(prompt, aggregate(layers, BOTH)[0], preset=BOTH)
    return pack_with_page(ImageRun(Image.fromarray(noise), heatmaps, layers, info), parts).files


def as_layers(maps):
    """Layers of one image, from ``[rows, cols, tokens]`` each."""
    layers = {
        name: LayerMap(name.split(".")[0], level, 2, one[None])
        for level, (name, one) in enumerate(maps.items())
    }
    return LayerMaps(layers, tuple(range(77)), passes=2)


def changed(files, name, data):
    """The files with another content of one, as if it had been written so."""
    info = json.loads(files["run.json"])
    info["files"][name] = sha256(data)
    return {**files, name: data, "run.json": sealed(info)}


def with_nan(files):
    maps = load(files["maps.safetensors"])
    maps["up.b"][1, 2, 3] = torch.nan
    return changed(files, "maps.safetensors", to_maps(maps))


def to_maps(maps):
    return save(maps, metadata={"format": RUN_FORMAT})


def manifest(**changes):
    """A batch.json; changes of ``input`` and ``settings`` by name."""
    settings = {"model": "tiny", "weights": "w", "pipeline": "P", "dtype": "float32"}
    settings |= {"save": ["image", "maps"], "options": {}, "format": "folder"}
    settings |= {"shard_bytes": 10**9, "fingerprint": "f", "preset": BOTH.to_json()}
    made = {"source": "in.txt", "digest": "d", "part": "1/1", "items": 3, "all_items": 3}
    made |= {"bad_lines": 0}
    settings |= {name: one for name, one in changes.items() if name in settings}
    made |= {name: one for name, one in changes.items() if name in made}
    return {"format": FORMAT, "settings": settings, "input": made, "batch_size": 1}


def new_run(root, items, /, unread=(), failed=(), **changes):
    """A finished run of these items, name to files; the changes are the manifest's."""
    folder = BatchFolder(root)
    folder.open("job")
    folder.write_manifest(manifest(**changes))
    layout = folder.layout
    for line, (item, files) in enumerate(items.items(), 1):
        layout.add(item, line, files, lambda *whole: folder.note_whole("job-0", *whole))
    layout.flush()
    for row in failed:
        folder.journals.note("failed", "job-0", row)
    folder.journals.gather()
    folder.journals.gather_errors(unread, items)
    folder.lock.release()
    return Path(root)


def three(parts=("image", "overlays", "maps")):
    return {name: pack(name, line, parts=parts) for line, name in enumerate("abc", 1)}


def rows_of(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def files_of(folder):
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def kept_of(root):
    return {name: data for name, data in files_of(root).items() if not name.startswith(".batch")}


# How items lie on the disk


@pytest.fixture(params=FORMATS)
def layout(request, tmp_path):
    (tmp_path / "tmp").mkdir()
    settings = {"format": request.param, "shard_bytes": 10**9}
    return layout_of(settings, tmp_path, tmp_path / "tmp")


def add(layout, items):
    """Add items; returns those that were told to be whole, id to place."""
    told = {}

    def whole(item, place, files):
        assert item not in told
        assert files["run.json"] == items[item]["run.json"]
        told[item] = place

    for line, (item, files) in enumerate(items.items(), 1):
        layout.add(item, line, files, whole)
    layout.flush()
    return told


ALIKE = ("a", "a1", "a.b", "A-", "maps", "a" * 100)  # names of which one begins another


def test_bytes_come_back_as_they_were(layout):
    items = {name: pack(name, line, parts=PARTS) for line, name in enumerate(ALIKE, 1)}
    told = add(layout, items)
    assert dict(layout.find()) == told and told.keys() == items.keys()
    for item, place in told.items():
        assert layout.read(item, place) == items[item]
        names = ["run.json", "maps.safetensors", "none.png", "heatmaps/03-cat.png"]
        some = layout.read(item, place, names)
        assert some == {name: items[item][name] for name in names if name != "none.png"}
    assert not [*(layout.temporary).iterdir()]


def test_what_is_discarded_is_gone_and_nothing_else(layout):
    items = {name: pack(name, line) for line, name in enumerate("abcd", 1)}
    told = add(layout, items)
    layout.discard({"b": told["b"], "d": told["d"]})
    left = dict(layout.find())
    assert left.keys() == {"a", "c"}
    assert all(layout.read(item, place) == items[item] for item, place in left.items())
    layout.discard(left)
    assert [*layout.find()] == []
    assert not [*(layout.temporary).iterdir()]


def test_threads_that_add_at_once_lose_nothing(tmp_path, layout):
    items = {f"i{n}": {"run.json": b"%d" % n, "note.txt": bytes(range(n + 1))} for n in range(60)}
    layout.nbytes = 100  # many shards
    told = []
    with ThreadPoolExecutor(8) as pool:
        for item, files in items.items():
            pool.submit(layout.add, item, 1, files, lambda *whole: told.append(whole))
    layout.flush()
    assert sorted(item for item, _, _ in told) == sorted(items)
    assert dict(layout.find()) == {item: place for item, place, _ in told}
    for item, place, _ in told:
        assert layout.read(item, place) == items[item]
    assert not [*(layout.temporary).iterdir()]


def test_a_folder_holds_a_thousand_items_at_most(tmp_path):
    layout = layout_of({"format": "folder"}, tmp_path, tmp_path)
    places = []
    for line in (1, 999, 1000, 123_456):
        layout.add(f"i{line}", line, {"run.json": b""}, lambda *whole: places.append(whole[1]))
    assert places == [
        "items/0000/i1", "items/0000/i999", "items/0001/i1000", "items/0123/i123456",
    ]  # fmt: skip


def test_a_write_that_fails_leaves_nothing(tmp_path, layout):
    (tmp_path / "items").write_text("")  # in the way
    (tmp_path / "shards").write_text("")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        add(layout, {"a": pack("a")})
    assert not [*(layout.temporary).iterdir()]


def test_shards_are_of_bounded_size_and_whole_only_when_written(tmp_path):
    items = {f"i{n}": pack(f"i{n}", n) for n in range(1, 8)}
    most = max(sum(map(len, files.values())) for files in items.values())
    layout = layout_of({"format": "shard", "shard_bytes": 2 * most + 1}, tmp_path, tmp_path)
    told = []
    for line, (item, files) in enumerate(items.items(), 1):
        layout.add(item, line, files, lambda *whole: told.append(whole[:2]))
        assert len(told) == line // 3 * 3
    layout.flush()
    shards = [*(tmp_path / "shards").iterdir()]
    assert len(shards) == len({place for _, place in told}) == 3
    assert all(shard.stat().st_size <= 3 * most + 10_000 for shard in shards)
    assert [item for item, _ in told] == [*items]
    layout.flush()
    assert len(told) == 7


def test_any_reader_of_safetensors_reads_a_shard(tmp_path):
    files = pack("a.b")
    root = new_run(tmp_path / "run", {"a.b": files, "c": pack("c", 2)}, format="shard")
    [shard] = (root / "shards").iterdir()
    with safe_open(shard, framework="pt") as file:
        names = {name for name in file.keys() if name.startswith("a.b/")}  # noqa: SIM118
        assert {"a.b/maps/down.a", "a.b/maps/up.b", "a.b/image.png", "a.b/run.json"} <= names
        expected = load(files["maps.safetensors"])
        for name, maps in expected.items():
            found = file.get_tensor(f"a.b/maps/{name}")
            assert found.dtype == torch.float16 and torch.equal(found, maps)
        image = file.get_tensor("a.b/image.png").numpy().tobytes()
        assert image == files["image.png"]


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_broken_shard_holds_nothing(tmp_path, cut):
    root = new_run(tmp_path / "run", three(), format="shard", shard_bytes=1)
    shard = sorted((root / "shards").iterdir())[0]
    shard.write_bytes(shard.read_bytes()[:cut])
    foreign = root / "shards" / "foreign.safetensors"
    foreign.write_bytes(save({"weight": torch.zeros(3)}))
    assert len([*BatchFolder(root).layout.find()]) == 2


# What is whole

ROWS = {
    "id", "line", "prompt", "negative_prompt", "seed", "width", "height", "num_inference_steps",
    "guidance_scale", "words", "truncated", "blanked", "place", "fingerprint", "run_sha256",
    "files",
}  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_tells_of_an_item(tmp_path, format):
    items = three()
    items["b"] = pack("b", 2, negative_prompt="dog", guidance_scale=3, num_inference_steps=7)
    root = new_run(tmp_path / "run", items, format=format)
    first, second, _ = rows_of(root / "metadata.jsonl")
    assert first.keys() - {"file_name"} == ROWS
    assert second["id"] == "b" and second["line"] == second["seed"] == 2
    assert (second["width"], second["height"]) == (96, 64)
    assert (second["negative_prompt"], second["guidance_scale"]) == ("dog", 3.0)
    assert second["num_inference_steps"] == 7
    assert second["prompt"] == PROMPT and second["words"] == ["a", "red", "cat"]
    assert first["negative_prompt"] is first["guidance_scale"] is None
    if format == "folder":
        assert (root / second["file_name"]).read_bytes() == items["b"]["image.png"]
    else:
        assert "file_name" not in second


def test_an_item_without_a_picture_names_none(tmp_path):
    root = new_run(tmp_path / "run", three(parts=("maps",)))
    assert all("file_name" not in row for row in rows_of(root / "metadata.jsonl"))


def settled(root):
    folder = BatchFolder(root)
    folder.open("later")
    try:
        return settle(folder)
    finally:
        folder.lock.release()


@pytest.mark.parametrize("format", FORMATS)
def test_the_rows_are_read_from_the_items_where_they_are_lost(tmp_path, format):
    root = new_run(tmp_path / "run", three(), format=format, shard_bytes=1)
    made = kept_of(root)
    (root / "metadata.jsonl").unlink()
    assert settled(root).keys() == {"a", "b", "c"}
    assert kept_of(root) == made
    data = made["metadata.jsonl"]
    (root / "metadata.jsonl").write_bytes(data[: len(data) // 2])
    assert settled(root).keys() == {"a", "b", "c"}
    assert kept_of(root) == made


@pytest.mark.parametrize("left", ["newline", "a byte more", "half", "nothing"])
def test_a_torn_line_costs_no_other(tmp_path, left):
    """A process that is killed, or a disk that is full, can leave any part of a line."""
    root = new_run(tmp_path / "run", three())
    made = kept_of(root)
    first, second, third = made["metadata.jsonl"].splitlines(keepends=True)
    torn = {"newline": first[:-1], "a byte more": first[:-2], "half": first[:99], "nothing": b""}
    (root / "metadata.jsonl").unlink()
    done = root / ".batch" / "done"
    (done / "killed-0.jsonl").write_bytes(second + torn[left])
    (done / "killed-1.jsonl").write_bytes(third)
    assert settled(root).keys() == {"a", "b", "c"}
    assert kept_of(root) == made
    assert not [*done.iterdir()]


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_items_that_are_gone_go(tmp_path, format):
    root = new_run(tmp_path / "run", three(), format=format, shard_bytes=1)
    place = root / rows_of(root / "metadata.jsonl")[1]["place"]
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert settled(root).keys() == {"a", "c"}
    assert [row["id"] for row in rows_of(root / "metadata.jsonl")] == ["a", "c"]


def test_a_foreign_folder_among_the_items_is_named(tmp_path):
    root = new_run(tmp_path / "run", three())
    (root / "items" / "0000" / "mine").mkdir()
    with pytest.raises(ValueError, match="items/0000/mine is no item: it has no run.json"):
        settled(root)


def test_rows_follow_the_input_not_the_time(tmp_path):
    folder = BatchFolder(tmp_path / "run")
    folder.open("job")
    folder.write_manifest(manifest())
    lines = [*range(1, 30)]
    random.Random(0).shuffle(lines)
    for line in lines:
        row = {"id": f"i{line}", "line": line, "place": f"p{line}", "fingerprint": "f"}
        folder.journals.note("done", f"job-{line % 3}", row)
    folder.journals.note("done", "job-0", {**row, "fingerprint": "later"})  # one more of the last
    assert folder.journals.gather() == 29
    folder.lock.release()
    rows = rows_of(folder.root / "metadata.jsonl")
    assert [row["line"] for row in rows] == [*range(1, 30)]
    assert rows[lines[-1] - 1]["fingerprint"] == "later"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_pipeline().save_pretrained(folder)
    return folder


def draw(model, out, *rows, **request):
    source = Path(f"{out}.jsonl")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"num_inference_steps": 1, "height": 64, "width": 64, "guidance_scale": 2.0}
    request = {"save": ("image", "maps"), "options": options, "batch_size": 1, **request}
    return run_batch(Request(source, out, str(model), device="cpu", **request))


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_broken_or_gone_is_made_anew(model, tmp_path, format):
    root = tmp_path / "run"
    rows = [{"prompt": prompt} for prompt in ("a cat", "a dog", "red")]
    draw(model, root, *rows, format=format, shard_bytes=1)
    made = kept_of(root)
    place = root / rows_of(root / "metadata.jsonl")[1]["place"]
    if format == "folder":
        shutil.rmtree(place)
    else:
        place.write_bytes(place.read_bytes()[:1000])
    (root / "metadata.jsonl").unlink()
    outcome = draw(model, root, *rows, format=format, shard_bytes=1)
    assert (outcome.before, outcome.whole, outcome.exit_code) == (2, 3, 0)
    assert kept_of(root) == made
    assert verify(root) == (3, [])


# Whose folder


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="file is a file"):
        BatchFolder(tmp_path / "file").open("job")
    with pytest.raises(FileExistsError, match=r"no batch\.json, but chapter\.txt"):
        BatchFolder(tmp_path / "thesis").open("job")
    assert files_of(tmp_path) == {"file": b"mine", "thesis/chapter.txt": b"mine"}


def test_a_folder_that_was_begun_is_gone_on_with(tmp_path):
    root = tmp_path / "run"
    folder = BatchFolder(root)
    folder.open("killed")  # before it wrote anything
    (folder.temporary / "half").mkdir()
    (root / ".batch" / "stop").write_text("SIGTERM")
    folder.lock.release()
    again = BatchFolder(root)
    again.open("next")
    assert again.is_new and again.stopped is None
    assert not [*again.temporary.iterdir()]
    again.lock.release()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, FileNotFoundError, "no batch.json, so it is no batch run's folder"),
        ("{", ValueError, "batch.json is corrupt"),
        ("[]", ValueError, "not of this version's format 'sdattn-batch-2'"),
        ('{"format": "sdattn-batch-9"}', ValueError, "not of this version's format"),
    ],
)
@pytest.mark.parametrize("ask", [open_batch, status, verify])
def test_what_is_no_batch_run_is_told(tmp_path, ask, text, error, message):
    if text is not None:
        (tmp_path / "batch.json").write_text(text)
    with pytest.raises(error, match=message):
        ask(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == (["batch.json"] if text else [])


def test_every_process_hears_that_a_run_is_to_stop(tmp_path):
    folder, other = BatchFolder(tmp_path / "run"), BatchFolder(tmp_path / "run")
    folder.open("job")
    assert other.stopped is None
    folder.stop("SIGINT")
    assert folder.stopped == other.stopped == "SIGINT"
    folder.lock.release()


# Read again


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_is_a_mapping_of_its_items(tmp_path, format):
    items = {name: pack(name, line) for line, name in enumerate(("z", "m", "a"), 1)}
    root = new_run(tmp_path / "run", items, format=format)
    run = open_batch(root)
    assert [*run] == ["z", "m", "a"] and len(run) == 3  # the order of the input
    assert "m" in run and "x" not in run
    for item, one in run.items():
        picture = Image.open(io.BytesIO(items[item]["image.png"]))
        assert one.image.tobytes() == picture.tobytes()
        assert one.info == json.loads(items[item]["run.json"])
        maps = load(items[item]["maps.safetensors"])
        saved = as_layers({name: maps[name].float() for name in ("down.a", "up.b")})
        assert torch.equal(one.heatmaps.maps, aggregate(saved, BOTH)[0])
        assert one.heatmaps.words == ("a", "red", "cat")
    with pytest.raises(KeyError, match="holds no item 'x'"):
        run["x"]


@pytest.mark.parametrize("place", ["../other", "items/../../other", "/etc", "items/0000/link"])
def test_a_place_outside_of_the_run_is_not_read(tmp_path, place):
    root = new_run(tmp_path / "run", {"a": pack("a", 1)})
    write_files(tmp_path / "other", pack("a", 1))
    (root / "items" / "0000" / "link").symlink_to(tmp_path / "other")
    rows = root / "metadata.jsonl"
    assert "items/0000/a" in rows.read_text()
    rows.write_text(rows.read_text().replace("items/0000/a", place))
    with pytest.raises(ValueError, match="no place inside it|is a link"):
        open_batch(root)["a"]


def test_status_tells_how_far_a_run_is(tmp_path):
    failed = [{"id": "d", "line": 4}, {"id": "a", "line": 1}]  # the second was drawn later
    root = new_run(tmp_path / "run", three(), failed=failed, items=6, bad_lines=2)
    (root / "errors.jsonl").write_text("".join(json.dumps(one) + "\n" for one in failed))
    now = status(root)
    assert (now.items, now.whole, now.failed, now.bad_lines, now.running) == (6, 3, 1, 2, None)
    folder = BatchFolder(root)
    folder.open("job")
    shutil.rmtree(root / open_batch(root)["b"].folder.relative_to(root))  # by hand
    now = status(root)
    assert now.whole == 2
    assert now.running is not None and f"(process {os.getpid()}, since 20" in now.running
    folder.journals.gather()
    folder.lock.release()
    assert status(root).running is None


def flip(path, place=-9):
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def retold(path, change):
    """Another document in its place, as if it had been written so."""
    info = json.loads(path.read_bytes())
    change(info)
    path.write_bytes(sealed(info))


DAMAGES = {  # of item b, whose folder is given
    "a picture's byte": (lambda b: flip(b / "image.png"), ["b: image.png is not what was written"]),
    "a drawing's byte": (
        lambda b: flip(b / "heatmaps/01-a.png"),
        ["b: heatmaps/01-a.png is not what was written"],
    ),
    "a map's byte": (
        lambda b: flip(b / "maps.safetensors"),
        ["b: maps.safetensors is not what was written"],
    ),
    "the maps": (lambda b: (b / "maps.safetensors").unlink(), ["b: maps.safetensors is missing"]),
    "half of run.json": (lambda b: cut(b / "run.json"), ["items/0000/b/run.json is corrupt"]),
    "another's run.json": (
        lambda b: (b / "run.json").write_text('{"format": "x"}'),
        ["b: items/0000/b/run.json is not of this version's format"],
    ),
    "a preset of another version": (
        lambda b: retold(b / "run.json", lambda info: info["preset"].update(kernel=3)),
        ["b: items/0000/b/run.json: 'preset' cannot be read: "],
    ),
    "a run.json without words": (
        lambda b: retold(b / "run.json", lambda info: info.pop("words")),
        ["b: items/0000/b/run.json: 'words' is missing"],
    ),
    "a letter of run.json": (
        lambda b: (b / "run.json").write_bytes(
            (b / "run.json").read_bytes().replace(b'"seed": 2', b'"seed": 3')
        ),
        ["b: items/0000/b/run.json is not what this run wrote"],
    ),
    "an empty run.json": (
        lambda b: (b / "run.json").write_text(f'{{"format": "{RUN_FORMAT}"}}'),
        ["b: "],
    ),
    "run.json": (lambda b: (b / "run.json").unlink(), ["b: items/0000/b has no run.json"]),
    "the item": (shutil.rmtree, ["b: metadata.jsonl names items/0000/b, where it is not"]),
    "its name": (
        lambda b: b.rename(b.parent / "x"),
        [
            "b: metadata.jsonl names items/0000/b, where it is not",
            "x: metadata.jsonl has no row",
            "x: run.json is that of item 'b'",
        ],
    ),
    "another item's files": (
        lambda b: [shutil.rmtree(b), shutil.copytree(b.parent / "a", b)],
        ["b: run.json is that of item 'a'"],
    ),
    "a copy": (
        lambda b: shutil.copytree(b, b.parents[1] / "0001" / "b"),
        ["1 item(s) are there twice", "b: metadata.jsonl names items/0000/b, where it is not"],
    ),
    "unfinished": (
        lambda b: (b.parents[2] / ".batch/tmp/left").mkdir(),
        ["left: unfinished, in "],
    ),
    "the rows": (
        lambda b: (b.parents[2] / "metadata.jsonl").unlink(),
        [f"{item}: metadata.jsonl has no row" for item in "abc"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_finds_what_is_wrong(tmp_path, damage):
    root = new_run(tmp_path / "run", three())
    assert verify(root) == (3, [])
    break_it, expected = DAMAGES[damage]
    break_it(root / "items" / "0000" / "b")
    before = files_of(root)
    _, problems = verify(root)
    assert len(problems) == len(expected), problems
    for found, text in zip(sorted(problems), sorted(expected), strict=True):
        assert text in found and "\n" not in found
    assert files_of(root) == before  # it only reads


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("tamper", "problem"),
    [
        (with_nan, "b: maps.safetensors holds values that are not finite, in up.b"),
        (lambda b: pack("other"), "b: run.json is that of item 'other'"),
        (lambda b: changed(b, "image.png", b["image.png"][:-200]), "b: image.png does not open"),
        (
            lambda b: changed(
                b, "maps.safetensors", to_maps({"up.b": torch.zeros(2, 3, 77).half()})
            ),
            "b: maps.safetensors has other layers or sizes than run.json says",
        ),
        (lambda b: {n: d for n, d in b.items() if n != "image.png"}, "b: image.png is missing"),
    ],
)
def test_verify_reads_more_than_checksums(tmp_path, format, tamper, problem):
    items = three()
    items["b"] = tamper(items["b"])
    root = new_run(tmp_path / "run", items, format=format)
    if json.loads(items["b"]["run.json"])["id"] != "b":  # its row is that of its name
        text = (root / "metadata.jsonl").read_text()
        (root / "metadata.jsonl").write_text(text.replace('"id": "other"', '"id": "b"'))
    number, [found] = verify(root)
    assert number == 3
    assert found.startswith(problem)


def test_verify_finds_what_is_wrong_in_a_shard(tmp_path):
    root = new_run(tmp_path / "run", three(), format="shard")
    assert verify(root) == (3, [])
    [shard] = (root / "shards").iterdir()
    whole = shard.read_bytes()
    picture = three()["b"]["image.png"]
    flip(shard, whole.index(picture) + len(picture) // 2)
    number, [problem] = verify(root)
    assert number == 3 and problem.startswith("b: image.png is not what was written")
    shard.write_bytes(whole[:-1])
    number, problems = verify(root)
    assert number == 0
    assert [one[:31] for one in problems] == [f"{i}: metadata.jsonl names shards/" for i in "abc"]


def test_verify_minds_no_files_of_a_run_at_work(tmp_path):
    root = new_run(tmp_path / "run", three())
    folder = BatchFolder(root)
    folder.open("job")
    (folder.temporary / "half").mkdir()
    shutil.copytree(root / "items/0000/a", root / "items/0000/d")  # written, not yet noted
    run = json.loads((root / "items/0000/d/run.json").read_bytes())
    (root / "items/0000/d/run.json").write_bytes(sealed({**run, "id": "d"}))
    assert verify(root) == (4, [])
    folder.lock.release()
    assert len(verify(root)[1]) == 2


# As a data set


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


# One job at a time


@pytest.fixture
def lock(tmp_path):
    made = [Lock(tmp_path / "lock", tmp_path / "run") for _ in range(3)]
    yield made
    for one in made:
        one.release()


def test_a_lock_is_one_jobs(lock):
    first, second, third = lock
    assert first.free() and first.holder == {}
    first.take("one")
    assert not second.free()
    assert second.holder["job"] == "one" and second.holder["process"] == os.getpid()
    with pytest.raises(OSError, match=rf"run is being written by another job: .*{os.getpid()}, "):
        second.take("two")
    assert second.holder["job"] == "one"  # the refused one says nothing
    assert not second.join("two")
    assert second.join("one")
    with pytest.raises(OSError, match="being written by another job"):
        third.take("three")
    first.release()
    assert not third.free()  # the second holds it still
    second.release()
    assert third.free()
    third.take("three")
    assert not first.join("one")


def test_a_lock_dies_with_its_process(lock, tmp_path):
    lock[0].path.touch()
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.flock(file, fcntl.LOCK_SH);"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-S", "-c", program, str(lock[0].path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        assert not lock[0].free()
        with pytest.raises(OSError, match=r"another job: \? on \? \(process \?, since \?\)"):
            lock[0].take("mine")
        other.kill()
    assert lock[0].free()
    lock[0].take("mine")


def test_a_broken_note_of_the_holder_stops_nobody(lock):
    lock[0].path.with_suffix(".json").write_text("{")
    assert lock[0].holder == {}
    assert not lock[0].join("one")
    lock[0].take("one")
    assert lock[1].join("one")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_told(lock, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="run lies on a disk without locks"):
        lock[0].take("one")
    with pytest.warns(UserWarning, match="no other job writes there"):
        assert lock[1].join("one")
    assert lock[2].free()


def test_other_errors_of_a_lock_are_raised(lock, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="input/output error"):
        lock[0].take("one")


def test_a_lock_holds_on_nfs_too(lock, monkeypatch):
    """There a shared lock needs a file open to read and an exclusive one a file open to write."""
    real = fcntl.flock

    def flock(file, kind):
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        refused = os.O_WRONLY if kind & fcntl.LOCK_SH else os.O_RDONLY
        if mode == refused:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock[0].take("one")
    assert lock[1].join("one")
    assert not lock[2].free()
    with pytest.raises(OSError, match="another job"):
        lock[2].take("two")


# Several into one


def part(root, which, of, names, **changes):
    """One part of a run over all names; items have the lines and bits of the whole."""
    of_all = {name: pack(name, line) for line, name in enumerate("abcd", 1)}
    items = {name: of_all[name] for name in names}
    made = {"part": f"{which}/{of}", "items": len(items), "all_items": 4, **changes}
    return new_run(root, items, **made)


@pytest.mark.parametrize("format", FORMATS)
def test_parts_become_the_run_of_the_whole(tmp_path, format):
    roots = [part(tmp_path / "1", 1, 2, "ac", format=format)]
    roots += [part(tmp_path / "2", 2, 2, "bd", format=format)]
    before = [files_of(root) for root in roots]
    assert merge(roots, tmp_path / "all")[0] == 4
    assert [files_of(root) for root in roots] == before
    run = open_batch(tmp_path / "all")
    assert [*run] == ["a", "b", "c", "d"]
    for item, one in run.items():
        source = open_batch(roots[item in "bd"])
        assert one.info == source[item].info
        assert torch.equal(one.heatmaps.maps, source[item].heatmaps.maps)
    assert verify(tmp_path / "all") == (4, [])
    made = json.loads((tmp_path / "all" / "batch.json").read_bytes())["input"]
    assert (made["part"], made["items"], made["all_items"]) == ("1/1", 4, 4)
    kept = kept_of(tmp_path / "all")
    assert merge(roots, tmp_path / "all")[0] == 4  # nothing more to do
    assert kept_of(tmp_path / "all") == kept
    now = status(tmp_path / "all")
    assert (now.items, now.whole, now.running) == (4, 4, None)


def test_runs_of_other_inputs_become_one(tmp_path):
    roots = [tmp_path / "1", tmp_path / "2"]
    new_run(roots[0], {"a": pack("a", 1), "b": pack("b", 2)}, digest="x", items=2, bad_lines=1)
    new_run(roots[1], {"b": pack("b", 2), "c": pack("c", 1)}, digest="y", source="o.csv", items=2)
    assert merge(roots, tmp_path / "all")[0] == 3  # b is the same in both
    made = json.loads((tmp_path / "all" / "batch.json").read_bytes())["input"]
    assert (made["source"], made["items"], made["bad_lines"]) == ("in.txt, o.csv", 4, 1)
    assert made["digest"] not in ("x", "y")
    assert merge(reversed(roots), tmp_path / "again")[0] == 3
    digest = json.loads((tmp_path / "again" / "batch.json").read_bytes())["input"]["digest"]
    assert digest == made["digest"]


def test_two_items_of_one_name_are_refused(tmp_path):
    roots = [tmp_path / "1", tmp_path / "2"]
    new_run(roots[0], three())
    new_run(roots[1], {"z": pack("z"), "B": pack("B", fingerprint="another")})
    with pytest.raises(ValueError, match=r"Item 'B' of .*2 is not that of .*1\. Give the items"):
        merge(roots, tmp_path / "all")
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fingerprint": "g", "dtype": "float16"}, "float16"),
        ({"format": "shard"}, "shard"),
        ({"fingerprint": "g", "preset": PRESETS["daam"].to_json()}, "daam"),
    ],
)
def test_runs_that_differ_in_settings_are_refused(tmp_path, changes, told):
    roots = [part(tmp_path / "1", 1, 2, "ac"), part(tmp_path / "2", 2, 2, "bd", **changes)]
    with pytest.raises(ValueError, match=f"different models or settings: .*{told}.* and .*float32"):
        merge(roots, tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_folder_of_other_runs_is_no_target(tmp_path):
    roots = [part(tmp_path / "1", 1, 2, "ac"), part(tmp_path / "2", 2, 2, "bd")]
    new_run(tmp_path / "all", {"z": pack("z")}, digest="other")
    before = kept_of(tmp_path / "all")
    with pytest.raises(ValueError, match="the folder of other runs"):
        merge(roots, tmp_path / "all")
    assert kept_of(tmp_path / "all") == before
    assert BatchFolder(tmp_path / "all").lock.free()


def test_what_is_no_run_is_not_merged(tmp_path):
    with pytest.raises(FileNotFoundError, match="no batch run's folder"):
        merge([part(tmp_path / "1", 1, 2, "ac"), tmp_path], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def inodes(root):
    return {str(path.relative_to(root)): path.stat().st_ino for path in root.rglob("*.*")}


def test_items_are_linked_where_the_disk_can(tmp_path, monkeypatch):
    roots = [part(tmp_path / "1", 1, 2, "ac"), part(tmp_path / "2", 2, 2, "bd")]
    merge(roots, tmp_path / "linked")
    old, new = inodes(roots[0] / "items"), inodes(tmp_path / "linked" / "items")
    files = [name for name in old if name.endswith((".png", ".safetensors", ".json"))]
    assert len(files) >= 10
    assert {name: new[name] for name in files} == {name: old[name] for name in files}

    def refuse(*_, **__):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    merge(roots, tmp_path / "copied")
    assert kept_of(tmp_path / "copied") == kept_of(tmp_path / "linked")
    new = inodes(tmp_path / "copied" / "items")
    assert not {new[name] for name in files} & {old[name] for name in files}


def test_a_merge_that_was_stopped_is_gone_on_with(tmp_path, monkeypatch):
    roots = [part(tmp_path / "1", 1, 2, "ac"), part(tmp_path / "2", 2, 2, "bd")]
    merge(roots, tmp_path / "whole")
    real, left = os.link, [7]  # files: in the midst of the second item

    def link(*names):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        real(*names)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(KeyboardInterrupt):
        merge(roots, tmp_path / "all")
    assert len([*(tmp_path / "all" / "items" / "0000").iterdir()]) == 1
    assert BatchFolder(tmp_path / "all").lock.free()
    left[0] = -1
    assert merge(roots, tmp_path / "all")[0] == 4
    assert kept_of(tmp_path / "all") == kept_of(tmp_path / "whole")
    assert verify(tmp_path / "all") == (4, [])


def test_what_failed_in_the_parts_is_told_in_the_whole(tmp_path):
    bad = [{"line": 9, "reason": "no prompt", "text": "{}"}]
    failed = [
        [{"id": "b", "line": 2, "reason": "boom"}, {"id": "e", "line": 5, "reason": "boom"}],
        [{"id": "f", "line": 6, "reason": "boom"}],
    ]
    items = {name: pack(name, line) for line, name in enumerate("abcd", 1)}
    roots = [
        new_run(tmp_path / str(n), {x: items[x] for x in names}, bad, failed[n], part=f"{n + 1}/2")
        for n, names in enumerate(("ac", "bd"))
    ]
    merge(roots, tmp_path / "all")
    rows = rows_of(tmp_path / "all" / "errors.jsonl")
    assert rows == [bad[0], failed[0][1], failed[1][0]]  # b is whole in the other part
    assert status(tmp_path / "all").failed == 2


# How far it is


def note(hidden, kind, name, number):
    (hidden / kind).mkdir(exist_ok=True)
    with (hidden / kind / f"{name}.jsonl").open("a") as file:
        file.write('{"id": 1}\n' * number)


def test_the_line_counts_what_all_processes_noted(tmp_path, monkeypatch):
    now = SimpleNamespace(monotonic=lambda: now.time, time=100.0)
    monkeypatch.setattr("sdattn.batch.progress.time", now)
    progress = Progress(tmp_path, total=1200, before=80)
    now.time += 1
    assert progress.text() == "80 of 1,200 items (80 were there)"
    note(tmp_path, "done", "a-0", 30)
    note(tmp_path, "done", "a-1", 10)
    now.time += 11.5
    assert progress.text() == "120 of 1,200 items (80 were there), 3.2 items/s, 5:38 left"
    note(tmp_path, "done", "a-1", 1080 - 1)
    note(tmp_path, "failed", "a-0", 1)
    now.time += 12.5
    text = progress.text()
    assert text.startswith("1,199 of 1,200 items (80 were there), 44.8 items/s, 0:00 left")
    assert text.endswith(", 1 failed")
    new = Progress(tmp_path / "none", total=5, before=0)
    now.time += 1
    assert new.text() == "0 of 5 items"


def test_a_tally_reads_each_byte_once_and_no_half_line(tmp_path):
    tally = Tally(tmp_path)
    assert tally.count("done") == 0
    note(tmp_path, "done", "a", 3)
    with (tmp_path / "done" / "a.jsonl").open("a") as file:
        file.write('{"id":')
    assert tally.count("done") == 3
    with (tmp_path / "done" / "a.jsonl").open("a") as file:
        file.write(" 4}\n")
    assert [tally.count("done"), tally.count("done")] == [4, 4]
    note(tmp_path, "done", "b", 2)
    assert [tally.count("done"), tally.count("failed")] == [6, 0]


def test_lines_are_written_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sdattn.batch.progress._LINE_EVERY", 0.01)
    note(tmp_path, "done", "a", 2)
    with Progress(tmp_path, total=5, before=1):
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("sdattn: 3 of 5 items (1 were there)") for line in lines)


def test_a_terminal_has_a_bar(tmp_path, monkeypatch):
    master, slave = pty.openpty()
    note(tmp_path, "done", "a", 2)
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with Progress(tmp_path, total=5, before=1):
            pass
        monkeypatch.undo()
    shown = b""
    with suppress(OSError):  # at the end of what was written
        while True:
            shown += os.read(master, 100_000)
    os.close(master)
    assert b"3 of 5 items" in shown


# Threads that write


def wait_until(true, seconds=5.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_writer_is_never_further_ahead():
    gate, begun, waiting = threading.Event(), [], []

    def call(number):
        begun.append(number)
        assert gate.wait(5)

    def submit(writer):
        for number in range(9):
            writer.submit(call, number)
            waiting.append(number)

    with Writer(threads=2, ahead=4) as writer:
        thread = threading.Thread(target=submit, args=(writer,))
        thread.start()
        wait_until(lambda: len(waiting) == 4)
        time.sleep(0.05)
        assert len(waiting) == 4  # the fifth waits for one to end
        assert len(begun) == 2
        gate.set()
        thread.join(5)
    assert sorted(begun) == [*range(9)]


def test_the_first_error_of_a_writer_is_raised_and_nothing_begun_after_it():
    gate, begun = threading.Event(), []

    def call(number):
        begun.append(number)
        assert gate.wait(5)
        if number == 1:
            raise OSError(f"disk {number} is full")

    with pytest.raises(OSError, match="disk 1 is full"):
        with Writer(threads=1, ahead=5) as writer:
            for number in (0, 1, 2, 3):
                writer.submit(call, number)
            gate.set()
            wait_until(lambda: writer._error is not None)
            writer.submit(call, 4)
            pytest.fail("the error was not raised")
    assert begun == [0, 1]


def test_an_error_of_the_last_call_is_raised_on_leaving():
    def call():
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        with Writer(threads=2, ahead=4) as writer:
            writer.submit(call)


@pytest.mark.parametrize("also", [False, True])
def test_an_error_in_the_block_waits_for_what_was_begun(also):
    done = []

    def call(number):
        time.sleep(0.01)
        if also and number == 3:
            raise OSError("the disk is full too")
        done.append(number)

    with pytest.raises(KeyboardInterrupt):
        with Writer(threads=1, ahead=9) as writer:
            for number in range(4):
                writer.submit(call, number)
            raise KeyboardInterrupt
    assert done == [0, 1, 2] + [3] * (not also)


# What a second reading found


def test_a_row_that_a_crash_tore_takes_no_other_with_it(tmp_path):
    root = new_run(tmp_path / "run", three())
    (root / "metadata.jsonl").unlink()
    (root / ".batch/done/settled.jsonl").write_text('{"id": "a", "li')
    assert settled(root).keys() == {"a", "b", "c"}


def test_whether_an_item_is_there_is_known_without_reading_it(tmp_path):
    run = open_batch(new_run(tmp_path / "run", three(parts=("image",))))
    assert "a" in run and "x" not in run


def test_a_holder_that_is_not_written_yet_is_told(tmp_path):
    root = new_run(tmp_path / "run", three())
    holder = Lock(root / ".batch/lock", root)
    holder.take("job")
    (root / ".batch/lock.json").write_text("")
    assert status(root).running == "? on ? (process ?, since ?)"
    holder.release()


def test_a_user_without_a_name_can_lock(tmp_path, monkeypatch):
    def fail():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", fail)
    lock = Lock(tmp_path / "lock", tmp_path)
    lock.take("job")
    assert lock.holder["user"] == str(os.getuid())
    lock.release()


def test_maps_that_are_not_finite_are_no_item():
    maps = torch.full((4, 6, 77), torch.nan)
    heatmaps = Heatmaps(read_prompt(TOKENIZER, PROMPT), maps)
    with pytest.raises(ValueError, match="up.b hold values that are not finite.*bfloat16"):
        layers = as_layers({"up.b": maps})
        settings = RunSettings(prompt=PROMPT, seed=0)
        pack_with_page(ImageRun(Image.new("RGB", (96, 64)), heatmaps, layers, settings), ("maps",))


def test_drawing_anew_in_a_merged_run_leaves_its_sources_alone(tmp_path):
    root = new_run(tmp_path / "run", three())
    merge([root], tmp_path / "merged")
    write_files(tmp_path / "merged/items/0000/b", {"image.png": b"another"})
    assert verify(root) == (3, [])
