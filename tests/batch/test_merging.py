"""Several batch runs in one folder."""

import errno
import json
import os

import pytest
import torch
from helpers.batch_runs import FORMATS, files_of, kept_of, new_run, pack, rows_of, three

from sdattn.batch import merge, open_batch, status, verify
from sdattn.batch.storage.folder import BatchFolder
from sdattn.files.writing import write_files
from sdattn.maps.presets import PRESETS


def part(root, which, of, names, **changes):
    """One part of a run over all names; items have the lines and bits of the whole."""
    of_all = {name: pack(name, line) for line, name in enumerate("abcd", 1)}
    items = {name: of_all[name] for name in names}
    made = {"part": f"{which}/{of}", "items": len(items), "all_items": 4, **changes}
    return new_run(root, items, **made)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.slow
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
    with pytest.raises(ValueError, match=r"Item 'B' of .*2 differs from .*1's"):
        merge(roots, tmp_path / "all")
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fingerprint": "g", "dtype": "float16"}, "float16"),
        ({"format": "webdataset"}, "webdataset"),
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
    with pytest.raises(FileNotFoundError, match="batch run's folder"):
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


def test_drawing_anew_in_a_merged_run_leaves_its_sources_alone(tmp_path):
    root = new_run(tmp_path / "run", three())
    merge([root], tmp_path / "merged")
    write_files(tmp_path / "merged/items/0000/b", {"image.png": b"another"})
    assert verify(root) == (3, [])
