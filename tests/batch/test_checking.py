"""What `verify` finds in the items of a batch run."""

import json
import shutil
import tarfile

import pytest
import torch
from helpers.batch_runs import FORMATS, files_of, new_run, pack, three
from helpers.tiers import tiered
from safetensors.torch import load, save

from sdattn.batch import verify
from sdattn.batch.storage.folder import BatchFolder
from sdattn.files.records import sealed
from sdattn.files.writing import sha256
from sdattn.runs.info import FORMAT as RUN_FORMAT


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


def flip(path, location=-9):
    data = bytearray(path.read_bytes())
    data[location] ^= 16
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def retold(path, change):
    """Another document in its place, as if it had been written so."""
    info = json.loads(path.read_bytes())
    change(info)
    path.write_bytes(sealed(info))


DAMAGES = {  # of item b, whose folder is given
    "an image's byte": (lambda b: flip(b / "image.png"), ["b: image.png is not what was written"]),
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
        ["b: items/0000/b/run.json is not what a run wrote"],
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
            "x: run.json names item 'b'",
        ],
    ),
    "another item's files": (
        lambda b: [shutil.rmtree(b), shutil.copytree(b.parent / "a", b)],
        ["b: run.json names item 'a'"],
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


@pytest.mark.parametrize("damage", tiered(DAMAGES, 2))
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


@pytest.mark.parametrize("format", tiered(FORMATS, 2))
@pytest.mark.parametrize(
    ("tamper", "problem"),
    [
        (with_nan, "b: maps.safetensors holds values that are not finite, in up.b"),
        (lambda b: pack("other"), "b: run.json names item 'other'"),
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
    root = new_run(tmp_path / "run", three(), format="webdataset")
    assert verify(root) == (3, [])
    [shard] = (root / "shards").iterdir()
    whole = shard.read_bytes()
    image = three()["b"]["image.png"]
    flip(shard, whole.index(image) + len(image) // 2)
    number, [problem] = verify(root)
    assert number == 3 and problem.startswith("b: image.png is not what was written")
    shard.write_bytes(whole[:-1])
    number, problems = verify(root)
    assert number == 0
    assert [one[:31] for one in problems] == [f"{i}: metadata.jsonl names shards/" for i in "abc"]


@pytest.mark.slow
def test_verify_finds_every_byte_around_the_files_of_a_shard(tmp_path):
    items = {"a": pack("a", parts=("maps",))}
    root = new_run(tmp_path / "run", items, format="webdataset", save=["maps"])
    assert verify(root) == (1, [])
    [shard] = (root / "shards").iterdir()
    whole = shard.read_bytes()
    with tarfile.open(shard) as tar:
        ends = [(one.offset, one.offset_data, one.offset_data + one.size) for one in tar]
    header, _, end = ends[0]
    last = ends[-1][2]
    locations = [
        *range(header, header + 512, 5),
        155,
        end,
        end + 9,
        last,
        last + 700,
        len(whole) - 1,
    ]
    assert not any(whole[location] for location in locations[-5:])  # what fills up
    for location in locations:
        flip(shard, location)
        assert verify(root)[1], location
        shard.write_bytes(whole)
    assert verify(root) == (1, [])


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
