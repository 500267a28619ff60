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
from sdattn.files.records import sealed
from sdattn.files.writing import write_files
from sdattn.runs.info import FORMAT
from sdattn.runs.parts import FURTHER, RUN_FILE
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


def not_json(folder):
    (folder / "run.json").write_text("{")


def no_format(folder):
    (folder / "run.json").write_text("{}")


def a_list(folder):
    (folder / "run.json").write_text("[]")


def anothers_format(folder):
    (folder / "run.json").write_text('{"format": "their-run-1"}')


def names_what_no_run_writes(folder):
    found = {"format": FORMAT, "files": {"precious.txt": "", "../precious.txt": ""}}
    (folder / "run.json").write_text(json.dumps(found))


def an_item_of_a_batch(folder):
    (folder / "run.json").write_text(json.dumps({"format": FORMAT, "fingerprint": "f"}))


def batch_beside_it(folder):
    (folder / "run.json").write_text(json.dumps({"format": FORMAT, "files": {}}))
    (folder / "batch.json").write_text("{}")


COMMANDS = {
    "generate": ("a cat", "--model", "nowhere"),
    "edit": ("a cat", "a dog", "--model", "nowhere"),
    "explain": ("image.png", "a cat", "--model", "nowhere"),
    "diff": ("a", "b"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "make",
    [not_json, no_format, a_list, anothers_format, names_what_no_run_writes, an_item_of_a_batch,
     batch_beside_it],
)  # fmt: skip
def test_no_command_replaces_a_folder_for_its_run_json(invoke, command, make):
    small_run().image.save("image.png")
    Path("mine").mkdir()
    Path("mine/precious.txt").write_text("years of work")
    make(Path("mine"))
    before = tree("mine")
    code, _, err = invoke(command, *COMMANDS[command], "--out", "mine", "--force")
    assert code == 2
    assert re.search(r"no (run|edit|comparison)'s folder|item of a batch|precious\.txt", err)
    assert "not replaced" in err and "mine" in err
    assert tree("mine") == before


def test_a_link_is_not_replaced(tmp_path):
    folder = saved(tmp_path / "run")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(FileExistsError, match="replaced"):
        check_target(tmp_path / "link", force=True)


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
    Path("run/heatmaps/02-red-cat.png").write_text("mine")
    code, _, err = invoke("show", "run", "cat", "red cat")
    assert code == 2 and "has heatmaps/02-red-cat.png already" in err
    Path("run/heatmaps/02-red-cat.png").unlink()
    assert invoke("show", "run", "cat", "red cat")[0] == 0
    files = load_run("run").info["files"]
    assert {"heatmaps/02-red-cat.png", "heatmaps/03-cat.png"} < files.keys()
    for name, digest in files.items():
        assert sha256(Path("run", name).read_bytes()).hexdigest() == digest
    with pytest.raises(FileExistsError, match="note.txt"):
        check_target("run", force=True)
    Path("run/note.txt").unlink()
    check_target("run", force=True)


# Killed


def test_a_foreign_document_may_not_name_files_for_force(tmp_path):
    folder = saved(tmp_path / "run")
    info = json.loads((folder / "run.json").read_bytes())
    info["files"]["notes/mine.txt"] = "0" * 64
    (folder / "run.json").write_bytes(sealed(info))
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="notes/mine.txt"):
        check_target(folder, force=True)


def test_every_folder_of_further_maps_is_a_runs_own():
    assert all(RUN_FILE.fullmatch(f"{name}/grid.png") for name in FURTHER)
