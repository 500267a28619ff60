"""Where commands may write: what is not ours stays, inputs stay, what a kill left is cleared."""

import json
import os
import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from helpers.small_runs import saved, small_run
from helpers.trees import tree

from sdattn import diff, load_run
from sdattn.batch.records import FORMAT as BATCH_FORMAT
from sdattn.files.writing import write_files
from sdattn.runs.info import FORMAT
from sdattn.runs.parts import FILES, MAPS
from sdattn.runs.targets import check_target, new_folder, run_around


def make_diff(folder):
    runs = [saved(folder.parent / name, seed) for seed, name in enumerate("ab")]
    diff(*runs, words=["cat"]).save(folder)
    for one in runs:
        shutil.rmtree(one)
    return folder


def make_edit(folder):
    """As ``EditRun.save`` writes it."""
    for name in ("source", "target-1", "target-2"):
        saved(folder / name)
    runs = ["source", "target-1", "target-2"]
    write_files(folder, {"edit.html": b"", "edit.png": b"", "run.json": b"%s" % json.dumps(
        {"format": "sdattn-edit-1", "runs": runs}).encode()})  # fmt: skip
    return folder


CALLED = {"run": "run", "edit": "edit", "diff": "comparison"}
KINDS = {"run": saved, "edit": make_edit, "diff": make_diff}


@pytest.mark.parametrize("kind", KINDS)
def test_force_replaces_what_such_a_run_wrote(tmp_path, kind):
    folder = KINDS[kind](tmp_path / "x")
    (folder / ".DS_Store").write_bytes(b"a look into the folder")
    with pytest.raises(FileExistsError, match="exists already"):
        check_target(folder, kind=kind)
    for other in KINDS.keys() - {kind}:
        with pytest.raises(FileExistsError, match=f"{CALLED[other]}.*folder"):
            check_target(folder, force=True, kind=other)
    with new_folder(folder, force=True, kind=kind) as made:
        (made / "new").write_bytes(b"")
    assert tree(tmp_path) == {"x/new": b""}
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(FileExistsError, match="is a link"):
        check_target(tmp_path / "link", force=True, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("foreign", ["precious.txt", "heatmaps/mine.png", "data/a/b.csv", "link"])
def test_what_is_not_ours_is_named_and_stays(tmp_path, kind, foreign):
    folder = KINDS[kind](tmp_path / "x")
    (folder / foreign).parent.mkdir(parents=True, exist_ok=True)
    if foreign == "link":
        (folder / foreign).symlink_to(tmp_path)
    else:
        (folder / foreign).write_text("years of work")
    before = tree(folder)
    with pytest.raises(FileExistsError, match=f"did not write, .*: {re.escape(foreign)}. Move"):
        check_target(folder, force=True, kind=kind)
    with pytest.raises(FileExistsError), new_folder(folder, force=True, kind=kind):
        pass
    assert tree(folder) == before


OTHERS = {  # the files of folders that no run of ours wrote
    "no JSON": {"run.json": "{"},
    "no format": {"run.json": "{}"},
    "a list": {"run.json": "[]"},
    "another's format": {"run.json": '{"format": "their-run-1"}'},
    "a run that names what none writes": {"run.json": json.dumps(
        {"format": FORMAT, "files": {"precious.txt": "", "../precious.txt": ""}}
    )},
    "an item of a batch": {"run.json": json.dumps({"format": FORMAT, "fingerprint": "f"})},
    "a batch beside it": {
        "run.json": json.dumps({"format": FORMAT, "files": {}}), "batch.json": "{}"
    },
}  # fmt: skip
COMMANDS = {
    "generate": ("a cat", "--model", "nowhere"),
    "edit": ("a cat", "a dog", "--model", "nowhere"),
    "explain": ("image.png", "a cat", "--model", "nowhere"),
    "diff": ("a", "b"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("files", OTHERS.values(), ids=OTHERS)
def test_no_command_replaces_a_folder_for_its_run_json(invoke, command, files):
    small_run().image.save("image.png")
    Path("mine").mkdir()
    Path("mine/precious.txt").write_text("years of work")
    for name, text in files.items():
        Path("mine", name).write_text(text)
    before = tree("mine")
    code, _, err = invoke(command, *COMMANDS[command], "--out", "mine", "--force")
    assert code == 2
    assert re.search(r"no (run|edit|comparison)'s folder|item of a batch|precious\.txt", err)
    assert "not replaced" in err and "mine" in err
    assert tree("mine") == before


def test_a_folder_that_another_made_meanwhile_stays(tmp_path):
    with pytest.raises(OSError, match="run"), new_folder(tmp_path / "run") as made:
        (made / "new").write_bytes(b"")
        saved(tmp_path / "run")
    assert load_run(tmp_path / "run")
    assert os.listdir(tmp_path) == ["run"]


# Inputs


@pytest.mark.parametrize("out", ["a", "b", "a/x", ".", "link"])
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_diff_leaves_its_inputs(invoke, out, force):
    for seed, name in enumerate("ab"):
        saved(name, seed)
    Path("link").symlink_to("b")
    before = tree(".")
    code, _, err = invoke("diff", "a", "b", "--out", out, *force)
    assert code == 2 and "the input" in err
    assert tree(".") == before
    with pytest.raises(FileExistsError, match="no comparison's folder"):
        diff("a", "b").save("b", force=True)
    assert tree(".") == before


@pytest.mark.parametrize("command", ["explain", "edit"])
def test_an_image_that_is_read_is_not_replaced(invoke, command):
    saved("run")
    before = tree("run")
    texts = ("run/image.png", "a cat") if command == "explain" else ("a cat", "a dog")
    more = ("--image", "run/image.png") if command == "edit" else ()
    code, _, err = invoke(command, *texts, *more, "--out", "run", "--force", "--model", "nowhere")
    assert code == 2 and "contains the input run/image.png" in err
    assert tree("run") == before


# show


@pytest.mark.slow
def test_show_asks_before_it_replaces_files(invoke):
    saved("run")
    Path("project").mkdir()
    Path("project/report.html").write_text("years of work")
    code, _, err = invoke("show", "run", "--out", "project")
    assert code == 2 and "project has report.html already" in err and "--force" in err
    assert tree("project") == {"report.html": b"years of work"}
    assert invoke("show", "run", "--out", "project", "--force")[0] == 0
    assert invoke("show", "run", "--out", "new/x")[0] == 0
    assert tree("new/x") == tree("project")
    assert b"red" in tree("new/x")["report.html"]


@pytest.mark.parametrize("out", ["other", "other/x", "link", "batch", "batch/items/0000", "run/x"])
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_show_leaves_the_folders_of_runs(invoke, out, force):
    saved("run", 0)
    saved("other", 1)
    Path("link").symlink_to("other")
    Path("batch").mkdir()
    Path("batch/batch.json").write_text(json.dumps({"format": BATCH_FORMAT}))
    before = tree(".")
    code, _, err = invoke("show", "run", "--out", out, *force)
    assert code == 2 and "the folder of a run" in err
    code, _, err = invoke("show", "run", "--figure", "words", "--out", f"{out}/x.svg")
    assert code == 2 and "the folder of a run" in err
    assert tree(".") == before
    assert run_around(Path("link/x/y")) == Path("other").resolve()
    assert run_around(Path("nothing")) is None


@pytest.mark.slow
def test_show_writes_through_no_link(invoke):
    for name in ("run", "linked"):
        saved(name)
    Path("elsewhere").mkdir()
    for path in Path("linked/heatmaps").iterdir():
        path.unlink()
    Path("linked/heatmaps").rmdir()
    Path("linked/heatmaps").symlink_to(Path("elsewhere").resolve())
    Path("out").mkdir()
    Path("out/heatmaps").symlink_to(Path("elsewhere").resolve())
    for arguments in (("linked",), ("run", "--out", "out"), ("run", "--out", "out", "--force")):
        code, _, err = invoke("show", *arguments)
        assert (code == 2 and "heatmaps is a link" in err) or "heatmaps" in err
    assert os.listdir("elsewhere") == []


def test_what_show_draws_is_the_runs_own(invoke, tmp_path):
    """Drawn in the run's folder: run.json tells of it, so that force knows it and checks hold."""
    saved("run")
    Path("run/note.txt").write_text("mine")
    Path("run/heatmaps/04-red-cat.png").write_text("mine")
    code, _, err = invoke("show", "run", "cat", "red cat")
    assert code == 2 and "has heatmaps/04-red-cat.png already" in err
    Path("run/heatmaps/04-red-cat.png").unlink()
    assert invoke("show", "run", "cat", "red cat")[0] == 0
    files = load_run("run").info["files"]
    assert {"heatmaps/04-red-cat.png", "heatmaps/03-cat.png"} < files.keys()
    for name, digest in files.items():
        assert sha256(Path("run", name).read_bytes()).hexdigest() == digest
    with pytest.raises(FileExistsError, match="note.txt"):
        check_target("run", force=True)
    Path("run/note.txt").unlink()
    check_target("run", force=True)


def test_further_maps_have_a_file_of_each_kind_that_is_drawn_from_maps():
    drawn = {file.path for file in FILES if file.part in ("overlays", "grid", "masks")}
    assert {file.path for file in FILES if file.is_further} == {MAPS, *drawn}
