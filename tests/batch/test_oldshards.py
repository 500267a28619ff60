"""Batch runs that earlier versions wrote with `--format shard`: read, checked, merged, gone on."""

import json

import pytest
from batch_runs import draw, kept_of, new_run, rows_of, three
from old_shards import NAME, as_old
from safetensors import safe_open
from safetensors.torch import save_file

from sdattn.batch import Request, merge, open_batch, status, verify
from sdattn.batch.merging import merge_runs
from sdattn.batch.storage.folder import BatchFolder
from sdattn.batch.storage.manifest import FIRST_FORMAT
from sdattn.files.writing import to_json


@pytest.fixture
def old(tmp_path):
    """An old run of three items, with their files."""
    root = new_run(tmp_path / "old", three(), format="webdataset")
    return root, as_old(root)


def test_it_is_read_as_it_was(old):
    root, items = old
    run = open_batch(root)
    assert [*run] == ["a", "b", "c"] and "format shard" in repr(run)
    assert status(root).whole == 3
    assert verify(root) == (3, [])
    layout = BatchFolder(root).layout
    for item, files in items.items():
        assert layout.read(item, NAME) == files
        assert layout.read(item, NAME, ["run.json", "x"]) == {"run.json": files["run.json"]}
        assert run[item].image.size == (96, 64)


def test_a_merge_makes_a_webdataset_of_it(old, tmp_path):
    root, items = old
    before = kept_of(root)
    new = new_run(tmp_path / "new", three(), format="webdataset")
    for sources in ([root], [root, new], [new, root]):
        out = tmp_path / f"merged-{len(sources)}-{sources[0].name}"
        assert merge(sources, out) == (3, 3)
        assert verify(out) == (3, [])
        layout = BatchFolder(out).layout
        assert {i: layout.read(i, location) for i, location in layout.find()} == items
        assert [path.suffix for path in (out / "shards").iterdir()] == [".tar"]
    assert kept_of(root) == before


def test_one_of_the_first_format_is_merged_too(old, tmp_path):
    root, _ = old
    manifest = json.loads((root / "batch.json").read_bytes())
    del manifest["digest"]
    (root / "batch.json").write_bytes(to_json({**manifest, "format": FIRST_FORMAT}))
    rows = rows_of(root / "metadata.jsonl")
    for row in rows:
        del row["run_sha256"], row["files"]
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert status(root).whole == 3 and verify(root) == (3, [])
    assert merge([root], tmp_path / "merged") == (3, 3)
    assert verify(tmp_path / "merged") == (3, [])


def damage(root, harm):
    path = root / NAME
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-1])
        return
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        head = file.metadata()
    if harm == "a file":
        del tensors["b/image.png"]
    elif harm == "a bit":
        tensors["b/image.png"][99] ^= 4
    elif harm == "a map":
        tensors["b/maps/up.b"][0, 0, 0] += 1
    elif harm == "another's":
        tensors["d/image.png"] = tensors["b/image.png"].clone()
    else:
        head = {"sdattn": head["sdattn"].replace("sdattn-", "sdattm-")}
    save_file(tensors, path, metadata=head)


@pytest.mark.parametrize(
    ("harm", "problems"),
    [
        ("cut", [f"{item}: metadata.jsonl names {NAME}, where it is not" for item in "abc"]),
        ("a file", ["b: image.png is missing"]),
        ("a bit", ["b: image.png is not what was written"]),
        ("a map", ["b: maps.safetensors is not what was written"]),
        ("another's", [f"{NAME}: what lies between its files is not what was written"]),
        ("the format", [f"{NAME}: what lies between its files is not what was written"]),
    ],
)
def test_verify_finds_what_is_wrong_in_it(old, tmp_path, harm, problems):
    root, _ = old
    damage(root, harm)
    found = verify(root)[1]
    assert len(found) == len(problems)
    assert all(one.startswith(told) for one, told in zip(found, problems, strict=True))
    if harm in ("cut", "a file"):
        lost = ["b"] if harm == "a file" else ["a", "b", "c"]
        assert merge_runs([root], tmp_path / "merged").missing == lost


def test_the_same_command_goes_on_in_what_was_merged(model, tmp_path):
    root, rows = tmp_path / "run", [{"prompt": "a cat"}, {"prompt": "a dog"}]
    draw(model, root, *rows, format="webdataset", part=(1, 2))
    as_old(root)
    before = kept_of(root)
    with pytest.raises(ValueError, match=r"run was made by an earlier version.*merge_runs\(\)"):
        draw(model, root, *rows, format="webdataset", part=(1, 2), force=True)
    assert kept_of(root) == before
    merge([root], tmp_path / "new")
    outcome = draw(model, tmp_path / "new", *rows, format="webdataset")
    assert (outcome.before, outcome.whole) == (1, 2)
    assert verify(tmp_path / "new") == (2, [])


def test_what_lost_its_batch_json_is_not_adopted_as_something_else(old, model):
    root, _ = old
    (root / "batch.json").unlink()
    before = kept_of(root)
    with pytest.raises(ValueError, match="format 'shard'. Adopt them with the version that wrote"):
        draw(model, root, {"prompt": "a cat"}, format="webdataset", adopt=True)
    assert kept_of(root) == before


@pytest.mark.filterwarnings("always")
def test_the_old_name_of_the_format_is_taken_by_the_command(sdattn):
    code, _, err = sdattn("batch", "none.txt", "--out", "run", "--format", "shard")
    assert code == 1
    warned, failed = err.splitlines()
    assert warned.startswith("sdattn: warning: --format shard was safetensors of many items")
    assert "none.txt" in failed


def test_the_old_name_of_the_format_warns():
    with pytest.warns(UserWarning, match="This run is written as 'webdataset': pass that"):
        request = Request("in.txt", "run", format="shard")
    assert request.format == "webdataset"
    request.check()
