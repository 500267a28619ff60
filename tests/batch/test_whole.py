"""What is whole in a batch run and what is not: found, named, mended, and never at others' cost."""

import io
import json
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.tiny_pipelines import make_pipeline

from sdattn.batch import Request, merge, open_batch, run_batch, status, verify
from sdattn.batch.input.items import Item
from sdattn.batch.input.plan import Job, fingerprint
from sdattn.batch.merging import merge_runs
from sdattn.batch.storage.folder import BatchFolder
from sdattn.files.records import sealed

pytestmark = pytest.mark.slow

FORMATS = ("folder", "webdataset")
PROMPTS = ("a cat", "a dog", "red", "a red cat")
SMALL = {"num_inference_steps": 1, "height": 64, "width": 64, "guidance_scale": 2.0}


def draw(model, out, prompts=PROMPTS, **request):
    source = Path(f"{model}.jsonl")
    rows = [{"prompt": one} if isinstance(one, str) else one for one in prompts]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {"save": ("image", "maps"), "options": SMALL, "batch_size": 1, "device": "cpu"}
    return run_batch(Request(source, out, str(model), **{**usual, **request}))


@pytest.fixture(scope="module")
def drawn(model, tmp_path_factory):
    """A finished run of each format."""
    root = tmp_path_factory.mktemp("drawn")
    for format in FORMATS:
        assert draw(model, root / format, format=format).whole == len(PROMPTS)
    return root


@pytest.fixture
def run(drawn, tmp_path):
    """Copies them: a function of the format."""
    return lambda format="folder": Path(shutil.copytree(drawn / format, tmp_path / format))


def kept_of(root):
    paths = [path for path in Path(root).rglob("*") if path.is_file()]
    found = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    return {name: data for name, data in found.items() if not name.startswith(".batch/")}


def rows_of(root):
    return [json.loads(line) for line in (root / "metadata.jsonl").read_bytes().splitlines()]


def item(root, number):
    return root / f"items/0000/{number:06d}"


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def without(shard, *names):
    """Write a tar again without some of its files."""
    with tarfile.open(shard) as tar:
        files = [(one, tar.extractfile(one).read()) for one in tar if one.name not in names]
    with tarfile.open(shard, "w") as tar:
        for one, data in files:
            tar.addfile(one, io.BytesIO(data))


# Gutted items


@pytest.mark.weekly
def test_items_that_lack_a_file_or_its_end_are_drawn_again(model, run, capsys):
    root = run()
    before = kept_of(root)
    (item(root, 1) / "image.png").unlink()
    (item(root, 2) / "run.json").unlink()
    cut(item(root, 3) / "maps.safetensors")
    assert status(root).whole == 1
    outcome = draw(model, root)
    assert (outcome.before, outcome.whole, outcome.exit_code) == (1, 4, 0)
    assert kept_of(root) == before
    told = capsys.readouterr().err
    for number, name in enumerate(("image.png", "run.json", "maps.safetensors"), 1):
        assert f"item 00000{number} is not whole: {name} is missing or cut short" in told


def test_an_item_that_lacks_a_file_in_a_shard_is_drawn_again(model, run):
    root = run("webdataset")
    [shard] = (root / "shards").iterdir()
    expected = {name: one.image.tobytes() for name, one in open_batch(root).items()}
    without(shard, "000002.png")
    assert status(root).whole == 3
    outcome = draw(model, root, format="webdataset")
    assert (outcome.before, outcome.whole, outcome.exit_code) == (3, 4, 0)
    assert {name: one.image.tobytes() for name, one in open_batch(root).items()} == expected
    assert verify(root) == (4, [])


def test_a_file_of_ones_own_in_a_gutted_item_is_not_lost(model, run):
    root = run()
    (item(root, 1) / "image.png").unlink()
    (item(root, 1) / "notes.txt").write_text("mine")
    before = {name: data for name, data in kept_of(root).items() if name.startswith("items/")}
    with pytest.raises(ValueError, match=r"000001 is to be drawn again, but holds notes\.txt"):
        draw(model, root)
    after = {name: data for name, data in kept_of(root).items() if name.startswith("items/")}
    assert after == before


def test_items_of_other_inputs_are_left_as_they_are(model, run, capsys):
    root = run()
    (item(root, 4) / "image.png").unlink()
    assert draw(model, root, PROMPTS[:3], force=True).whole == 3
    assert "item 000004 is not whole" in capsys.readouterr().err
    assert sorted(os.listdir(item(root, 4))) == ["maps.safetensors", "run.json"]
    assert [row["id"] for row in rows_of(root)] == ["000001", "000002", "000003", "000004"]


# A lost batch.json


@pytest.mark.parametrize("harm", ["gone", "empty", "a bit"])
def test_a_folder_whose_batch_json_is_lost_is_left_alone(model, run, harm):
    root = run()
    path = root / "batch.json"
    path.unlink() if harm == "gone" else path.write_bytes(
        b"" if harm == "empty" else path.read_bytes().replace(b'"dtype"', b'"dtypd"')
    )
    before = kept_of(root)
    for force in (False, True):
        with pytest.raises((OSError, ValueError), match=r"batch\.json.*another `folder`"):
            draw(model, root, force=force)
    with pytest.raises((OSError, ValueError), match=r"batch\.json"):
        status(root)
    assert kept_of(root) == before


def test_a_byte_between_the_files_of_a_shard_is_found_and_mended(model, run):
    root = run("webdataset")
    before = kept_of(root)
    [shard] = (root / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    data[-1] = 1
    shard.write_bytes(data)
    told = "what lies between its files is not what was written"
    assert verify(root) == (4, [f"shards/{shard.name}: {told}"])
    assert draw(model, root, format="webdataset").before == 4  # every item is whole
    shard.unlink()
    assert draw(model, root, format="webdataset").before == 0
    assert kept_of(root) == before


# What --verify says


def test_an_item_that_names_no_files_is_a_problem(run):
    root = run()
    path = item(root, 2) / "run.json"
    info = json.loads(path.read_bytes())
    path.write_bytes(sealed({**info, "files": {}}))
    (root / "metadata.jsonl").unlink()  # which has its checksum
    problems = [one for one in verify(root)[1] if one.startswith("000002: run.json")]
    assert any("run.json names no image.png" in one for one in problems)


@pytest.mark.parametrize("format", FORMATS)
def test_items_that_are_gone_with_their_rows_are_a_problem(run, format):
    root = run(format)
    for name in ("items", "shards"):
        shutil.rmtree(root / name, ignore_errors=True)
    (root / "metadata.jsonl").unlink()
    number, problems = verify(root)
    assert number == 0
    gone = [one[:6] for one in problems if "was there when the last run ended" in one]
    assert gone == ["000001", "000002", "000003", "000004"]


def test_a_damaged_batch_json_is_named_and_the_items_are_read(run):
    root = run()
    text = (root / "batch.json").read_text()
    (root / "batch.json").write_text(text.replace('"format": "folder"', '"format": "fnlder"'))
    (item(root, 3) / "image.png").unlink()
    number, problems = verify(root)
    assert number == 4 and len(problems) == 2
    assert "checksum differs" in problems[0] and "another `folder`" in problems[0]
    assert problems[1].startswith("000003: image.png is missing")


def test_batch_json_may_be_replaced_while_it_is_read(run, monkeypatch):
    """By the run itself, which writes it anew when it begins and when it ends."""
    folder = BatchFolder(run())
    folder.temporary.mkdir(parents=True, exist_ok=True)
    told, read = folder.manifest, Path.read_bytes
    later = replace(told, ended=None)

    def read_then_replaced(path):
        data = read(path)
        folder.write_manifest(later)
        return data

    monkeypatch.setattr(Path, "read_bytes", read_then_replaced)
    assert folder.manifest == told
    monkeypatch.undo()
    assert told.ended is not None and folder.manifest.ended is None


def test_a_run_that_was_killed_is_no_problem(run):
    root = run()
    told = BatchFolder(root).manifest
    for name in ("index.html", "errors.jsonl"):
        (root / name).unlink()
    assert len(verify(root)[1]) == 2
    BatchFolder(root).temporary.mkdir(parents=True, exist_ok=True)
    BatchFolder(root).write_manifest(replace(told, ended=None))
    assert verify(root) == (4, [])


def test_one_byte_in_a_row_costs_no_item(model, run):
    """The rows are made again from the items."""
    root = run()
    before = kept_of(root)
    rows = (root / "metadata.jsonl").read_bytes()
    (root / "metadata.jsonl").write_bytes(rows.replace(b'"prompt": "red"', b'"prompu": "red"'))
    outcome = draw(model, root)
    assert (outcome.before, outcome.whole, outcome.exit_code) == (4, 4, 0)
    assert kept_of(root) == before


def test_a_bad_header_in_a_shard_costs_no_other(model, tmp_path, capsys):
    root = tmp_path / "run"
    draw(model, root, format="webdataset", shard_bytes=1)
    before = kept_of(root)
    locations = {row["id"]: row["place"] for row in rows_of(root)}
    harms = [(b"000001.json", b"000001.jzon"), (b"ustar", b"uztar")]
    for number, (old, new) in enumerate(harms, 1):
        path = root / locations[f"00000{number}"]
        data = path.read_bytes()
        assert data.count(old) >= 1
        path.write_bytes(data.replace(old, new, 1))
    number, problems = verify(root)
    assert number == 2
    for name in ("000001", "000002"):
        assert any(one.startswith(name) and locations[name] in one for one in problems)
    merged = merge_runs([root], tmp_path / "merged")
    assert (merged.items, merged.missing) == (2, ["000001", "000002"])
    assert len(open_batch(tmp_path / "merged")) == 2
    assert draw(model, root, format="webdataset", shard_bytes=1).before == 2
    assert f"{locations['000001']} cannot be read" in capsys.readouterr().err
    assert kept_of(root) == before


def test_one_bad_run_json_costs_no_other(model, run, tmp_path, capsys):
    root = run()
    before = kept_of(root)
    path = item(root, 2) / "run.json"
    path.write_bytes(path.read_bytes().replace(b'"preset"', b'"prfset"'))
    (root / "metadata.jsonl").unlink()
    [problem] = [one for one in verify(root)[1] if one.startswith("000002: ") and "row" not in one]
    assert "run.json" in problem
    merged = merge_runs([root], tmp_path / "merged")
    assert (merged.items, merged.missing) == (3, ["000002"])
    assert draw(model, root).before == 3
    assert "item 000002 is not whole" in capsys.readouterr().err
    assert kept_of(root) == before


# Links


def test_no_link_is_written_through(model, run, tmp_path):
    root, outside = run(), tmp_path / "outside"
    (root / ".batch").rename(outside)
    for name in ("tmp", "done"):
        (outside / name / "mine.txt").write_text("mine")
    (root / ".batch").symlink_to(outside)
    with pytest.raises(ValueError, match=r"\.batch is a link"):
        draw(model, root)
    assert (outside / "tmp/mine.txt").read_text() == (outside / "done/mine.txt").read_text()
    (root / ".batch").unlink()
    (root / "items").rename(tmp_path / "items")
    (root / "items").symlink_to(tmp_path / "items")
    with pytest.raises(ValueError, match="items is a link"):
        draw(model, root)


# Formats of other versions


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": "sdattn-batch-1"}, r"batch.json is not of this .* found 'sdattn-batch-1'"),
        ({"settings": {"format": "shard"}}, r"holds items of the format 'shard', and this version"),
    ],
)
def test_runs_of_another_format_are_refused_with_what_to_do(model, run, change, problem):
    root = run()
    found = json.loads((root / "batch.json").read_bytes())
    found |= {**change, "settings": {**found["settings"], **change.get("settings", {})}}
    (root / "batch.json").write_bytes(sealed(found, "digest"))
    before = kept_of(root)
    for read in (status, verify, open_batch):
        with pytest.raises(
            ValueError, match=problem + ".*Draw the run again into another `folder`"
        ):
            read(root)
    with pytest.raises(ValueError, match=problem):
        merge([root], root.parent / "merged")
    with pytest.raises(ValueError, match=f"{problem}|belongs to another run: format shard is now"):
        draw(model, root)
    assert kept_of(root) == before


# Merging what is not whole


@pytest.fixture(scope="module")
def parts(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("parts")
    for which in (1, 2, 3):
        draw(model, root / str(which), part=(which, 3))
    return root


def test_the_items_of_a_part_that_is_not_given_are_named(parts, tmp_path):
    merged = merge_runs([parts / "1", parts / "3"], tmp_path / "all")
    assert (merged.items, merged.wanted, merged.missing, merged.lacks) == (3, 4, ["000002"], 1)
    merged = merge_runs([parts / "1", parts / "2", parts / "3"], tmp_path / "all")
    assert (merged.items, merged.wanted, merged.missing, merged.lacks) == (4, 4, [], 0)
    assert verify(tmp_path / "all") == (4, [])


@pytest.mark.parametrize(
    ("out", "how"),
    [("folder", "is the input"), (".", "contains the input"), ("folder/m", "is inside the input")],
)
def test_a_merge_stays_apart_from_what_it_reads(run, out, how):
    root = run()
    before = kept_of(root)
    with pytest.raises(FileExistsError, match=how):
        merge([root], root.parent / out)
    assert kept_of(root) == before
    assert not (root.parent / "batch.json").exists()


def test_an_item_without_a_row_is_merged_too(parts, tmp_path):
    one = Path(shutil.copytree(parts / "1", tmp_path / "1"))
    (one / "metadata.jsonl").unlink()
    merged = merge_runs([one, parts / "2", parts / "3"], tmp_path / "all")
    assert (merged.items, merged.missing) == (4, [])


def test_an_item_that_is_not_whole_is_not_merged(parts, tmp_path):
    one = Path(shutil.copytree(parts / "1", tmp_path / "1"))
    (item(one, 4) / "image.png").unlink()
    merged = merge_runs([one, parts / "2", parts / "3"], tmp_path / "all")
    assert (merged.items, merged.missing) == (3, ["000004"])
    assert merge_runs([parts / "1", parts / "2", parts / "3"], tmp_path / "all").items == 4
    assert verify(tmp_path / "all") == (4, [])


def test_merge_exits_with_1_where_items_are_missing(parts, invoke):
    code, out, err = invoke("merge", parts / "1", parts / "2", "--out", "all")
    assert code == 1
    assert "all/: 3 of 4 items, from 2 run(s)" in out
    assert "1 item(s) are missing: 000003" in err and "--partial" in err
    code, out, err = invoke("merge", parts / "1", parts / "2", "--out", "all", "--partial")
    assert code == 0
    assert "1 item(s) are missing: 000003" in err
    code, _, err = invoke("merge", *(parts / one for one in "123"), "--out", "all")
    assert (code, err) == (0, "")


# What is counted, and what makes another item


def test_an_item_that_was_drawn_since_it_failed_is_not_counted_as_failed(run):
    root = run()
    failed = [{"id": name, "line": int(name), "reason": "boom"} for name in ("000002", "000009")]
    text = "".join(json.dumps(one) + "\n" for one in failed)
    (root / "errors.jsonl").write_text(text)  # as a run leaves it that is killed before its end
    assert status(root).failed == 1


def one_job(**changes):
    made = {"id": "a", "line": 1, "prompt": "a cat", "seed": 1, "negative_prompt": None}
    made |= {"words": None, "options": {}, **changes}
    return Job(Item(**made), made["options"], 0)


def test_a_fingerprint_tells_every_field_and_setting_apart():
    other = [
        {"prompt": "a dog"},
        {"seed": 2},
        {"negative_prompt": ""},
        {"negative_prompt": "red"},
        {"words": ("cat",)},
        {"words": ("a",)},
        {"options": {"width": 64}},
        {"options": {"width": 128}},
    ]
    found = [fingerprint(one_job(**one), "settings") for one in ({}, *other)]
    found.append(fingerprint(one_job(), "other settings"))
    assert len(set(found)) == len(other) + 2
    alike = [one_job(id="b", line=7)]  # which an item's files do not follow from
    assert fingerprint(alike[0], "settings") == found[0]


def test_force_with_other_weights_keeps_no_old_image(model, run, tmp_path):
    root = run()
    before = {name: one.image.tobytes() for name, one in open_batch(root).items()}
    pipe = make_pipeline()
    pipe.unet.conv_in.bias.data[0] += 1
    pipe.save_pretrained(tmp_path / "model")
    outcome = draw(tmp_path / "model", root, force=True)
    assert (outcome.before, outcome.whole) == (0, 4)
    after = {name: one.image.tobytes() for name, one in open_batch(root).items()}
    assert all(after[name] != before[name] for name in before)


def test_items_that_force_moves_to_another_shard_are_noted_there(model, run):
    root = run("webdataset")
    [old] = {row["place"] for row in rows_of(root)}
    changed = [PROMPTS[0], {"prompt": PROMPTS[1], "seed": 77}, *PROMPTS[2:]]
    outcome = draw(model, root, changed, format="webdataset", force=True)
    assert (outcome.before, outcome.whole) == (3, 4)
    assert not (root / old).exists()
    locations = dict(BatchFolder(root).layout.find())
    assert {row["id"]: row["place"] for row in rows_of(root)} == locations
    assert len(locations) == 4
    assert verify(root) == (4, [])


# Images of nothing


def test_an_item_of_nan_is_an_error_of_its_own(model, tmp_path):
    """Alone, and among others that run together with it."""
    rows = [*PROMPTS, {"prompt": "a dog", "guidance_scale": 1e30}]
    outcome = draw(model, tmp_path / "run", rows, batch_size=4)
    assert (outcome.whole, outcome.failed, outcome.exit_code) == (4, 1, 1)
    [row] = [
        json.loads(line) for line in (tmp_path / "run" / "errors.jsonl").read_bytes().splitlines()
    ]
    assert row["id"] == "000005" and row["reason"].startswith("NotFiniteError: ")
    assert [*open_batch(tmp_path / "run")] == ["000001", "000002", "000003", "000004"]
    assert verify(tmp_path / "run") == (4, [])
