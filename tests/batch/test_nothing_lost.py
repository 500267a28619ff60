"""`sdattn batch` in others' folders and fed with rubbish: nothing is ever lost."""

import io
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers import demo_batches
from helpers.demo_batches import (  # noqa: F401
    LINUX,
    call_batch,
    check_complete,
    colours,
    contents,
    rows,
    stamps,
    wait_until,
    whole,
    write_lines,
)
from helpers.demo_words import OTHER, THING, THIRD
from helpers.forks import Fork
from safetensors.torch import load_file, save_file

import sdattn
from sdattn.batch.reading import open_batch, status, verify
from sdattn.loading.outline import outline
from sdattn.models.facts import size_unit

pytestmark = pytest.mark.slow

DEMO = Path(sdattn.__file__).parent / "models" / "demo"
SETTINGS = [*demo_batches.SETTINGS, "--width", "64", "--height", "64"]  # a quarter of the time


# Folders that are not this run's


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_what_is_no_batch_run_is_left_alone(batch, tmp_path, force):
    write_lines(tmp_path / "in.jsonl", colours(2))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "photos/items").mkdir(parents=True)
    (tmp_path / "photos/holiday.jpg").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, _, err = batch("in.jsonl", *SETTINGS, "--out", "file", *force)
    assert code == 1
    assert err.splitlines() == ["sdattn: file is a file. Choose another --out."]
    code, _, err = batch("in.jsonl", *SETTINGS, "--out", "photos", *force)
    assert code == 1
    assert err.splitlines() == [
        "sdattn: photos is not a batch run's folder: it has no batch.json, but holiday.jpg, items. "
        "Choose another --out."
    ]
    code, _, err = batch("in.jsonl", *SETTINGS, "--out", "file/run", *force)
    assert code == 1
    assert "Cannot write to file/run: Not a directory." in err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.weekly
@pytest.mark.parametrize("kind", ["folder", "webdataset"])
def test_other_prompts_and_steps_are_refused_and_force_makes_anew_only_them(batch, tmp_path, kind):
    lines = colours(4)
    write_lines(tmp_path / "in.jsonl", lines)
    arguments = ["in.jsonl", *SETTINGS, "--out", "run", "--format", kind]
    root = tmp_path / "run"
    assert batch(*arguments)[0] == 0
    before, first = stamps(root), contents(root)

    write_lines(tmp_path / "in.jsonl", [*lines[:3], {"prompt": f"a white {THIRD}"}])
    code, _, err = batch(*arguments)
    assert code == 1 and len(err.splitlines()) == 1
    assert "run belongs to another run: the input is another one (in.jsonl: 4 items, now 4)" in err
    assert "--force" in err
    assert (stamps(root), contents(root)) == (before, first)
    code, out, err = batch(*arguments, "--force")
    assert code == 0, err
    assert "3 of them were there" in out
    check_complete(root, 4)
    second = contents(root)
    assert [item for item in second if second[item] != first[item]] == ["000004"]
    assert open_batch(root)["000004"].info["prompt"] == f"a white {THIRD}"
    if kind == "folder":
        assert changed(before, stamps(root)) == {Path("items/0000/000004/run.json")}

    before = stamps(root)
    steps = [*arguments[:1], "--steps", "3", *arguments[3:]]
    code, _, err = batch(*steps)
    assert code == 1 and len(err.splitlines()) == 1
    before_and_now = [f"{{'num_inference_steps': {n}, 'width': 64, 'height': 64}}" for n in (2, 3)]
    assert "options " + " is now ".join(before_and_now) in err
    assert stamps(root) == before
    code, out, err = batch(*steps, "--force")
    assert code == 0, err
    assert "were there" not in out
    check_complete(root, 4)
    assert all(len(one.info["timesteps"]) == 3 for one in open_batch(root).values())
    before = stamps(root)
    code, out, _ = batch(*steps)
    assert code == 0 and "4 of them were there" in out
    assert stamps(root) == before


@pytest.mark.weekly
def test_other_weights_under_the_same_name_are_refused(batch, tmp_path):
    shutil.copytree(DEMO, tmp_path / "model")
    write_lines(tmp_path / "in.jsonl", colours(4))
    arguments = ["in.jsonl", *SETTINGS, "--out", "run", "--model", "./model"]
    root = tmp_path / "run"
    assert batch(*arguments)[0] == 0
    before, first = stamps(root), contents(root)
    [path] = (tmp_path / "model/unet").glob("*.safetensors")
    weights = load_file(path)
    weights["conv_in.weight"].view(-1)[0] += 0.5
    save_file(weights, path, metadata={"format": "pt"})
    code, _, err = batch(*arguments)
    assert code == 1 and len(err.splitlines()) == 1
    assert "run belongs to another run: the model's weights or configuration" in err
    assert (stamps(root), contents(root)) == (before, first)
    code, out, err = batch(*arguments, "--force")
    assert code == 0, err
    assert "were there" not in out
    check_complete(root, 4)
    now = contents(root)
    assert all(now[item]["image.png"] != first[item]["image.png"] for item in first)
    assert changed(before, stamps(root)) == set(before)


def changed(before, after):
    return {path for path in before if after.get(path) != before[path]}


@pytest.mark.weekly
@pytest.mark.skipif(not LINUX, reason="stops a process")
def test_two_runs_in_one_folder(batch, tmp_path):
    write_lines(tmp_path / "in.jsonl", colours(20))
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    root = tmp_path / "run"
    first = Fork("batch", *arguments, cwd=tmp_path)
    try:
        wait_until(lambda: whole(root) >= 3, first)
        first.send_signal(signal.SIGSTOP)  # alive, and no further
        stopped = psutil.Process(first.pid)
        wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, first)
        number, before = whole(root), stamps(root)
        assert number < 20
        code, _, err = batch(*arguments)
        assert code == 1 and len(err.splitlines()) == 1
        who = subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
        host = subprocess.run(["uname", "-n"], capture_output=True, text=True).stdout.strip()
        assert f"run is being written by another job: {who} on {host} (process {first.pid}" in err
        code, out, _ = batch("--status", "run")
        assert code == 0
        said = " ".join(out.split())
        assert f"{status(root).whole} item" in said and "whole, the input has 20" in said
        assert number - 2 <= status(root).whole <= number  # a row is noted once an item is whole
        assert f"running: {who} on {host} (process {first.pid}, since " in said
        assert stamps(root) == before
    finally:
        first.kill()
        first.communicate(timeout=60)
    code, out, _ = batch("--status", "run")
    assert code == 0 and "not running" in out
    code, out, err = batch(*arguments)
    assert code == 0, err
    assert f"{number} of them were there" in out
    assert before.items() <= stamps(root).items()
    check_complete(root, 20)


# Items and lines that cannot be drawn


BROKEN = {"prompt": f"a red {THING}", "guidance_rescale": "much"}  # noticed in the pipeline only


@pytest.mark.weekly
def test_items_that_fail_never_stop_the_others(batch, tmp_path):
    lines = colours(9)
    for i in (2, 5, 6):
        lines[i] = {**BROKEN, "seed": 70 + i}
    write_lines(tmp_path / "in.jsonl", lines)
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    root = tmp_path / "run"
    code, out, err = batch(*arguments)
    assert code == 1
    assert "6 of 9 items" in out and "3 failed, see run/errors.jsonl" in " ".join(out.split())
    assert verify(root) == (6, [])
    failed = rows(root / "errors.jsonl")
    assert [one["id"] for one in failed] == ["000003", "000006", "000007"]
    for one, line in zip(failed, (3, 6, 7), strict=True):
        assert (one["line"], one["seed"], one["prompt"]) == (line, 69 + line, f"a red {THING}")
        assert one["options"] == {"guidance_rescale": "much"}
        assert one["reason"].startswith("TypeError: '>' not supported between")
        assert one["traceback"].startswith("Traceback") and "guidance_rescale" in one["traceback"]
    told = status(root)
    assert (told.items, told.whole, told.failed) == (9, 6, 3)

    before = stamps(root)
    code, out, _ = batch(*arguments)  # tries them again, and nothing else
    assert code == 1
    assert "6 of them were there" in out and "3 failed" in out
    assert rows(root / "errors.jsonl") == failed
    assert stamps(root) == before

    for i in (2, 5, 6):
        lines[i] = {**lines[i], "guidance_rescale": 0.5}
    write_lines(tmp_path / "in.jsonl", lines)
    code, out, err = batch(*arguments, "--force")
    assert code == 0, err
    assert before.items() <= stamps(root).items()
    check_complete(root, 9)


@pytest.mark.weekly
def test_too_many_items_that_fail_end_the_run(batch, tmp_path):
    write_lines(tmp_path / "in.jsonl", [*colours(2), *[BROKEN] * 8, *colours(6)])
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    root = tmp_path / "run"
    code, _, err = batch(*arguments, "--max-errors", "2")
    assert code == 1
    assert "stopped early (2 item(s) have failed, all that max_errors allows)" in err
    assert "the same command does the rest" in err
    failed = [one["id"] for one in rows(root / "errors.jsonl")]
    assert failed[:2] == ["000003", "000004"] and len(failed) <= 4
    number, problems = verify(root)
    assert number < 8 and problems == []
    assert batch(*arguments)[0] == 1
    assert verify(root) == (8, [])
    assert len(rows(root / "errors.jsonl")) == 8


def hostile(chance, unit):
    """A line that is no item: bytes without the line feed."""
    kind = chance.randrange(9)
    if kind == 0:
        text = ['{"prompt": "a cat"', "no JSON", '{"prompt": "a cat",}', "{'prompt': 'a cat'}"]
        return chance.choice([*text, "[1, 2", '{"prompt": "a" "cat"}', '{"a": 1} {']).encode()
    if kind == 1:
        return chance.choice(["5", '"a cat"', "null", "[]", '[{"prompt": "a cat"}]', "{}"]).encode()
    if kind == 2:
        prompts = [5, None, [], {}, True, 0.5, ["a cat"], "", " ", "\u3000\t", "\u00a0"]
        return json.dumps({"prompt": chance.choice(prompts)}).encode()
    if kind == 3:
        side = chance.choice(["width", "height"])
        values = ["NaN", "Infinity", "-Infinity", "1e400", "0", "-64", "64.5", '"64px"', "true"]
        values += ["[64]", "{}", str(64 + chance.randrange(1, unit)), "1" * 200, "99999999"]
        return f'{{"prompt": "a cat", "{side}": {chance.choice(values)}}}'.encode()
    if kind == 4:
        ids = ["../evil", "a/b", "/tmp/evil", "..", ".", "", "a\0b", "x" * 5000, "🦊", "a."]
        ids += ["../../sentinel/evil", "..\\evil", "~/evil", "$HOME", ".batch", "a\nb", "-rf", " a"]
        return json.dumps({"prompt": "a cat", "id": chance.choice([*ids, 1.5, ["a"], {}])}).encode()
    if kind == 5:
        return json.dumps({"prompt": "a cat", "id": chance.choice(["good-1", "GOOD-2"])}).encode()
    if kind == 6:
        wrong = [("seed", -1), ("seed", "one"), ("seed", 2**63), ("seed", 1.5), ("seed", True)]
        wrong += [("words", "cat"), ("words", []), ("words", [1]), ("words", ["unicorn"])]
        wrong += [("guidance_scale", "much"), ("negative_prompt", 5), ("num_inference_steps", 0)]
        wrong += [("num_inference_steps", 2000), ("num_images_per_prompt", 2), ("colour", "red")]
        wrong += [("generator", 1), ("output_type", "latent"), ("__class__", 1), ("a b", 1)]
        return json.dumps({"prompt": "a cat", **dict([chance.choice(wrong)])}).encode()
    if kind == 7:
        text = ["\\ud800", "\\udfff"]
        return f'{{"prompt": "a cat {chance.choice(text)}"}}'.encode()
    raw = [b'{"prompt": "a \xff cat"}', b'{"prompt": "a \0 cat"}', b"\x80\x81", b"\0" * 50]
    raw += [b'{"prompt": "a", "prompt": "b"}', b"[" * 5000, b'{"prompt": ' + b"[" * 100]
    return chance.choice([*raw, b'{"prompt": "a cat", "x": ' + b"[" * 30 + b"]" * 30 + b"}"])


GOOD = (
    {"id": "good-1", "prompt": f"a red {THING}"},
    {"id": "good-2", "prompt": f"a red {THING} 🦊 and emoji"},
    {"id": "good-3", "prompt": f"a red {THING} and " + "x" * 5000},
    {"id": "good-4", "prompt": "../../evil \\ / \0".replace("\0", "'\"`$(touch evil)")},
    {"id": "good-5", "prompt": f"a red {THING}", "words": [f"red {THING}"]},
    {"id": "good-6", "prompt": f"a red {THING}", "negative_prompt": f"a blue {OTHER}"},
    {"id": 7, "prompt": "ein roter Kreis, größer"},
    {"id": "a.b_c-d", "prompt": f"a red {THING}", "seed": 2**63 - 1},
    {"id": "x" * 100, "prompt": "%s {0} \r \u2028 \u202e"},
    {"id": "good-10", "prompt": f"a red {THING}", "num_inference_steps": 1, "guidance_scale": 1},
)


def hostile_input():
    """A thousand lines, ten of them good, some blank: the bytes and the numbers of the bad ones."""
    chance = random.Random(8)
    unit = size_unit(outline("demo"))
    good = sorted(chance.sample(range(2, 999), 7))
    locations = {0: GOOD[0], 1: GOOD[1], 999: GOOD[2], **dict(zip(good, GOOD[3:], strict=True))}
    blank = set(chance.sample(sorted(set(range(1000)) - set(locations)), 20))
    lines = []
    for i in range(1000):
        one = json.dumps(locations[i], ensure_ascii=False).encode() if i in locations else b" "
        lines.append(one if i in locations or i in blank else hostile(chance, unit))
    bad = [i + 1 for i in range(1000) if i not in locations and i not in blank]
    return b"\n".join(lines), bad


@pytest.mark.weekly
def test_a_thousand_hostile_lines(batch, tmp_path, monkeypatch):
    data, bad = hostile_input()
    assert len(bad) == 970
    home = tmp_path / "sentinel/home"
    home.mkdir(parents=True)
    (home / "in.jsonl").write_bytes(data)

    def listed():
        return {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}

    before = listed()
    arguments = ["in.jsonl", *SETTINGS, "--out", "run"]
    monkeypatch.chdir(home)
    code, _, err = batch(*arguments, "--strict")
    assert code == 1
    assert "Nothing was drawn, as --strict asks." in err.splitlines()[-1]
    assert told_lines(err) == bad
    assert listed() == before

    code, out, err = batch(*arguments)
    assert code == 1
    assert told_lines(err) == bad
    assert "10 of 10 items" in out and "970 lines could not be read" in " ".join(out.split())
    root = home / "run"
    errors = rows(root / "errors.jsonl")
    assert [one["line"] for one in errors] == bad
    assert all(one["reason"] and len(one["text"]) <= 200 for one in errors)
    assert verify(root) == (10, [])
    assert sorted(open_batch(root)) == sorted(str(one["id"]) for one in GOOD)
    prompts = {item: one.info["prompt"] for item, one in open_batch(root).items()}
    assert prompts == {str(one["id"]): one["prompt"] for one in GOOD}
    inside = root.relative_to(tmp_path)
    outside = {path for path in listed() if inside not in (path, *path.parents)}
    assert outside == before


def told_lines(err):
    """The numbers of the lines that stderr tells of, and nothing else but sdattn's own lines."""
    assert all(line.startswith("sdattn: ") for line in err.splitlines())
    return [int(one) for one in re.findall(r"^sdattn: line (\d+): \S", err, re.MULTILINE)]


# Kinds of input


@pytest.mark.weekly
def test_every_kind_of_input_gives_the_same_items(batch, tmp_path, monkeypatch):
    prompts = [f"a red {THING}", f'a "green" {OTHER}, and a blue one', "größer 🦊"]
    (tmp_path / "in.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    lines = "".join(json.dumps({"prompt": one}) + "\n" for one in prompts)
    (tmp_path / "in.jsonl").write_text(lines)
    quoted = [one.replace('"', '""') for one in prompts]
    table = [f'{n + 1:06d},"{one}",{n}' for n, one in enumerate(quoted)]
    (tmp_path / "in.csv").write_text("\n".join(["id,prompt,seed", *table]), encoding="utf-8")

    def drawn(source, out):
        code, _, err = batch(source, *SETTINGS, "--out", out)
        assert code == 0, err
        assert verify(tmp_path / out) == (3, [])
        found = contents(tmp_path / out)
        for files in found.values():  # a CSV's first line is its header
            info = json.loads(files["run.json"])
            assert info.pop("line") in range(1, 5)
            del info["checksum"]  # which is of the line as well
            files["run.json"] = info
        return found

    expected = drawn("in.jsonl", "of-jsonl")
    assert [one["run.json"]["prompt"] for one in expected.values()] == prompts
    assert drawn("in.txt", "of-txt") == expected
    assert drawn("in.csv", "of-csv") == expected
    for name in ("in.jsonl", "in.txt"):
        piped = io.BytesIO((tmp_path / name).read_bytes())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped))
        assert drawn("-", f"piped-{name}") == expected
