"""The options of `sdattn batch` reach the run, and paths and seeds that cannot be are refused."""

import errno
import json
import os
import re
import sys
from dataclasses import fields
from pathlib import Path

import fsspec
import pytest
from helpers.command_lines import said
from helpers.demo_words import THING
from helpers.storages import clear_memory
from helpers.tiers import tiered

from sdattn.batch.request import Outcome, Request
from sdattn.cli import options
from sdattn.cli.batch import _REQUEST
from sdattn.cli.options import LOADING
from sdattn.errors import DeniedError, InvalidValueError


def test_what_the_command_line_is_given_is_asked_of_the_run(invoke, asked):
    given = "--refine self --strict --max-errors 3 --force --part 2/3 --seed 7 --limit 9"
    given += " --retry-failed --workers 2 --shard-items 5 --save masks --words cat,sofa"
    given += " --mask-threshold 0.3"
    assert invoke("batch", "in", "--out", "run", *given.split(), "--input-format", "csv")[0] == 0
    [request] = asked
    assert request.preset.refine == "self"
    assert (request.strict, request.force) == (True, True)
    assert (request.max_errors, request.part, request.seed) == (3, (2, 3), 7)
    assert request.input_format == "csv"
    assert (request.limit, request.retry_failed, request.workers) == (9, True, 2)
    assert (request.shard_items, request.mask_words) == (5, ("cat", "sofa"))
    assert request.mask_threshold == 0.3
    assert invoke("batch", "in.txt", "--out", "run")[0] == 0
    assert asked[1].preset.refine is None and asked[1].max_errors is None
    assert (asked[1].strict, asked[1].force) == (False, False)


def test_every_field_of_a_request_has_its_option_and_its_default():
    held = {field.name: field for field in fields(Request)}
    named = {**_REQUEST, **options.MODEL}
    of_others = {"source", "out", "options", "preset", "progress", "loading"}
    assert named.keys() - LOADING.keys() == held.keys() - of_others
    for name in named.keys() & held.keys():
        default = named[name][1]
        assert (() if name == "keep_columns" else default) == held[name].default


def test_candidates_are_for_every_item(invoke, tmp_path, asked):
    (tmp_path / "in.txt").write_text(f"a red {THING}\n")
    given = ("--candidates", "3", "--decide-at", "0.5", "--steps", "2")
    assert invoke("batch", "in.txt", "--out", "run", *given)[0] == 0
    [request] = asked
    assert request.options == {"candidates": 3, "decide_at": 0.5, "num_inference_steps": 2}


@pytest.mark.parametrize("command", ["batch", "generate"])
@pytest.mark.parametrize("seed", [-1, 2**63, 2**64])
def test_a_seed_that_cannot_be_is_refused_alike(invoke, tmp_path, command, seed):
    (tmp_path / "in.txt").write_text(f"a red {THING}\n")
    given = ["in.txt", "--out", "run"] if command == "batch" else [f"a red {THING}"]
    code, _, err = invoke(command, *given, "--seed", seed)
    assert code == 2
    assert f"sdattn: --seed {seed}: pass a whole number from 0 to 2**63 - 1." in err


@pytest.mark.parametrize("out", ["s3://bucket/run", "gs://run", "file:///tmp/run", "hf://a/b"])
def test_an_address_is_no_folder_of_a_single_run(invoke, tmp_path, out):
    code, _, err = invoke("generate", f"a red {THING}", "--out", out)
    assert code == 2
    assert re.search("is an address, and only batches are written to storage", err)
    assert sorted(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("out", "package", "reason"),
    [
        ("gs://bucket/run", "gcsfs", "gs://bucket/run needs a package that is not installed: "),
        ("nowhere://bucket/run", None, "fsspec knows no storage for nowhere://bucket/run"),
    ],
)
def test_an_address_that_cannot_be_reached_is_refused_in_a_line(
    invoke, tmp_path, monkeypatch, out, package, reason
):
    monkeypatch.setitem(sys.modules, package or "none", None)  # as if it were not installed
    monkeypatch.setattr("sdattn.batch.shard.load_pipeline", None)  # nothing is loaded
    (tmp_path / "in.txt").write_text(f"a red {THING}\n")
    before = sorted(tmp_path.iterdir())
    for given in (("in.txt", "--out", out), ("--status", out), ("--verify", out)):
        code, _, err = invoke("batch", *given)
        assert code == 2 and len(err.splitlines()) == 1 and reason in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_a_run_in_a_storage_at_the_command_line(invoke, model):
    clear_memory()
    Path("in.txt").write_text("a cat\nred\n")
    run = "memory://bucket/run"
    options = ("--model", model, "--steps", "1", "--device", "cpu", "--batch-size", "1")
    code, said, _ = invoke("batch", "in.txt", "--out", run, "--save", "image,maps", *options)
    assert code == 0 and said.startswith("memory://bucket/run/: 2 of 2 items")
    assert invoke("batch", "--status", run)[1].startswith("memory://bucket/run/: 2 items are whole")
    assert invoke("batch", "--verify", run)[0] == 0
    assert invoke("show", run, "--item", "000002", "--out", "shown")[0] == 0
    assert (Path("shown") / "grid.png").is_file()
    [place] = [row["place"] for row in rows_at(run) if row["id"] == "000001"]
    code, _, err = invoke("show", f"{run}/{place}")
    assert code == 2 and "A run in a storage is not changed" in err
    assert not Path("memory:").exists()


def rows_at(run):
    return [json.loads(line) for line in fsspec.open(f"{run}/metadata.jsonl").open()]


@pytest.mark.slow
def test_a_bad_line_is_a_failure_but_to_a_launcher(invoke, model, monkeypatch):
    """It would take any code but 0 for a crash."""
    Path("in.jsonl").write_text('{"prompt": "a cat"}\n{}\n')
    options = ("--model", model, "--steps", "1", "--device", "cpu", "--batch-size", "1")
    options += ("--save", "image", "--out", "run")
    assert invoke("batch", "in.jsonl", *options)[0] == 1
    for name in ("TORCHELASTIC_RUN_ID", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        with monkeypatch.context() as launcher:
            launcher.setenv(name, "none")
            code, out, _ = invoke("batch", "in.jsonl", *options)
        assert code == 0
        assert "1 line could not be read, see run/bad_lines.jsonl" in out
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert invoke("batch", "in.jsonl", *options, "--strict")[0] == 2


def test_the_first_failed_items_are_named(invoke, monkeypatch):
    rows = ({"id": f"00000{n}", "line": n, "failed": f"boom {n}"} for n in range(1, 6))
    Path("run").mkdir()
    Path("run/errors.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setattr(
        "sdattn.batch.run.run_batch", lambda _: Outcome(6, 0, 1, 5, 0, None, seconds=1.0)
    )
    code, out, err = invoke("batch", "in.txt", "--out", "run")
    assert code == 1 and "5 failed, see run/errors.jsonl" in out
    assert err.splitlines() == [f"sdattn: 00000{n} failed: boom {n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("name", ["", "photo.jpg"])
def test_a_folder_without_captions_is_told(invoke, name):
    Path("in").mkdir()
    Path("in", name or ".hidden").touch()
    code, _, err = invoke("batch", "in", "--out", "run")
    assert code == 2 and ("`photos`" not in err) and "--photos" in err


def test_a_wrong_part_is_named(invoke):
    code, _, err = invoke("batch", "in.txt", "--out", "run", "--save", "images,maps")
    assert code == 2 and "--save images: " in err and "Did you mean 'image'" in err
    with pytest.raises(InvalidValueError, match="tuple"):
        Request("in.txt", "run", save="image").check()


@pytest.mark.parametrize("layout", tiered(["webdataset", "folder"], quick=0))
def test_a_batch_is_drawn_shown_and_checked(invoke, model, layout):
    Path("prompts.txt").write_text("a red cat\n\na dog\n \n")
    options = ("--model", model, "--steps", "1", "--device", "cpu", "--batch-size", "2")
    options += ("--format", layout, "--save", "image,maps")
    code, out, err = invoke("batch", "prompts.txt", "--out", "run", *options)
    assert (code, err) == (0, "")
    assert out.startswith("run/: 2 of 2 items; 2 made in ")
    assert invoke("batch", "prompts.txt", "--out", "run", *options)[1].endswith("run/index.html\n")
    said = invoke("batch", "--status", "run")[1].splitlines()
    assert said[0] == "run/: 2 items are whole, the input has 2"
    assert re.fullmatch(r"1 of 1 shard, [0-9.]+ kB", said[1])
    assert re.fullmatch(r"begun 20\d\d-\d\d-\d\d \d\d:\d\d", said[2])
    assert invoke("batch", "--verify", "run")[1] == "run/: 2 items read, 0 problems\n"
    Path("run/index.html").unlink()
    assert invoke("batch", "--summarize", "run")[1].splitlines()[0] == said[0]
    assert invoke("batch", "--verify", "run")[1] == "run/: 2 items read, 0 problems\n"
    code, out, _ = invoke("show", "run", "red cat", "--item", "000001", "--out", "drawn")
    assert code == 0
    assert "red cat" in out
    assert os.listdir("drawn/heatmaps") == ["01-red-cat.png"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("batch",), 2, "Pass a file of prompts, or --photos SOURCE"),
        (("batch", "prompts.txt"), 2, "Pass --out RUN"),
        (("batch", "prompts.txt", "--photos", "p", "--out", "run"), 2, "or --photos SOURCE"),
        (("batch", "prompts.txt", "--status", "run"), 2, "each take a run"),
        (("batch", "--summarize", "run", "--verify", "run"), 2, "each take a run"),
        (("batch", "--summarize", "run"), 2, "There is no folder"),
        (("batch", "nothing.txt", "--out", "run"), 2, "nothing.txt"),
        (
            ("batch", "prompts.txt", "--out", "run", "--batch-size", "0"),
            2,
            "'--batch-size': ",
        ),
        (("batch", "prompts.txt", "--out", "run", "--part", "3/2"), 2, "not K/N"),
        (
            ("batch", "prompts.txt", "--out", "run", "--save", "image,page"),
            2,
            "--save page: pass",
        ),
        (("batch", "prompts.txt", "--out", "run", "--format", "zip"), 2, "webdataset"),
        (("batch", "prompts.txt", "--out", "run", "--dtype", "int8"), 2, "bfloat16"),
        (("batch", "--status", "nowhere"), 2, "There is no folder"),
        (("batch", "--verify", "."), 2, "not a batch run's folder"),
    ],
)
def test_batches_that_cannot_be(invoke, arguments, code, message):
    Path("prompts.txt").write_text("a red cat\n")
    found, _, err = invoke(*arguments)
    assert found == code
    assert message in said(err)
    assert os.listdir() == ["prompts.txt"]


@pytest.mark.parametrize(
    ("failed", "code", "more"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "run/a"), 1, True),
        (DeniedError("Cannot write to run: Permission denied."), 1, True),
        (FileNotFoundError(errno.ENOENT, "No such file", "in.txt"), 2, False),
    ],
)
def test_a_batch_that_had_begun_says_how_it_goes_on(
    invoke, tmp_path, monkeypatch, failed, code, more
):
    def fails(_):
        raise failed

    monkeypatch.setattr("sdattn.batch.run.run_batch", fails)
    (tmp_path / "in.txt").write_text("a cat\n")
    (tmp_path / "run").mkdir()
    command, advice = (
        ("batch", "in.txt", "--out", str(tmp_path / "run")),
        "The same command does the rest.",
    )
    assert advice not in invoke(*command)[2]  # nothing was drawn yet
    (tmp_path / "run" / "batch.json").write_text("{}")
    found, _, err = invoke(*command)
    assert found == code and (advice in err) is more


def test_bad_photos_are_called_photos(invoke, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(b"no image")
        (tmp_path / f"{name}.txt").write_text(f"a red {THING}")
    code, _, err = invoke("batch", "--photos", str(tmp_path), "--out", "run", "--device", "cpu")
    assert code == 2 and "photo 1: " in err and "line" not in err
    assert "has no photo that can be explained" in err
