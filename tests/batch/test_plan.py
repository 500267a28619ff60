"""A list as numbered shards: what is in which, whatever its length, and what tells plans apart."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.item_lines import line_of, photo, pipeline, planned, put, write_tar
from helpers.tiny_pipelines import make_sdxl_pipeline

from sdattn.batch.plan import make_plan
from sdattn.batch.request import Request


@pytest.fixture
def plan_of(tmp_path):
    """Plans of lists of rows, closed when the test ends."""
    plans = []

    def make(rows, tell=lambda *_: None, **request):
        rows = [row if isinstance(row, bytes) else line_of(**row) for row in rows]
        path = put(tmp_path, "list.jsonl", b"\n".join(rows))
        plans.append(make_plan(Request(path, **request), pipeline(), tell))
        return plans[-1]

    yield make
    for plan in plans:
        plan.close()


def lines_in(plan):
    return [[job.item.line for job in plan.shard(n).jobs] for n in range(len(plan))]


def test_shards_are_consecutive_items_of_one_shape(plan_of):
    widths = [64, 128, 64, 64, 128, 64]
    plan = plan_of([{"width": width} for width in widths], shard_items=2)
    assert lines_in(plan) == [[1, 3], [2, 5], [4, 6]]
    assert (plan.items, len(plan)) == (6, 3)
    for number in (2, 0, 1):
        shard = plan.shard(number)
        assert shard.number == number
        assert len({job.shape for job in shard.jobs}) == 1
        assert {job.options["width"] for job in shard.jobs} == {shard.jobs[0].item.options["width"]}


def test_appended_lines_leave_full_shards_as_they_are(plan_of):
    rows = [{"seed": n, "width": 64 if n % 3 else 128} for n in range(20)]
    before = plan_of(rows, shard_items=4)
    after = plan_of([*rows, {"seed": 99}, {"width": 64}], shard_items=4)
    full = [n for n in range(len(before)) if len(before.shard(n).jobs) == 4]
    assert len(full) >= 4
    for number in full:
        assert before.digests()[number] == after.digests()[number]
        assert before.shard(number).jobs[0].item == after.shard(number).jobs[0].item
    assert before.digest != after.digest


def test_an_item_comes_back_as_it_was(plan_of):
    given = {"id": "x", "prompt": "a\tcat\n\u2028", "negative_prompt": "", "seed": 2**63 - 1}
    given |= {"words": ["cat"], "width": 64, "guidance_scale": 7.5}
    plan = plan_of([given, {"edit_to": "a red dog", "mode": "replace", "prompt": "a red cat"}])
    [one, other] = (plan.shard(n).jobs[0].item for n in range(2))
    own = ("id", "prompt", "negative_prompt", "seed")
    assert all(getattr(one, name) == given[name] for name in own)
    assert (one.words, one.options) == (("cat",), {"width": 64, "guidance_scale": 7.5})
    assert (other.edit_to, other.edit, other.image) == ("a red dog", {"mode": "replace"}, None)


@pytest.mark.parametrize(
    "change",
    [
        *({"id": "b"}, {"prompt": "a dog"}, {"seed": 5}, {"negative_prompt": ""}),
        *({"words": ["red"]}, {"width": 128}, {"edit_to": "a red dog"}, {"guidance_scale": 3}),
    ],
)
def test_digests_tell_items_apart(plan_of, change):
    rows = [{"id": "a", "seed": 3, "width": 64}, {"id": "z"}]
    one, other = plan_of(rows), plan_of([{**rows[0], **change}, rows[1]])
    assert one.digest == plan_of(rows).digest != other.digest
    assert one.digests()[0] != other.digests()[0]


def test_options_of_all_and_kept_columns_are_in_digests(plan_of):
    rows = [{"note": "x"}]
    plain = plan_of(rows, keep_columns=["note"])
    assert plain.columns == ["note"]
    assert plain.digest != plan_of([{"note": "y"}], keep_columns=["note"]).digest
    assert plain.digest != plan_of(rows, keep_columns=["note"], options={"width": 64}).digest


def test_photos_are_told_apart_by_their_bytes_wherever_they_are(tmp_path):
    digests = set()
    for place, extra in (("one", {}), ("two", {"0.png": photo(9), "0.txt": b"x"})):
        path = write_tar(tmp_path / f"{place}.tar", {**extra, "a.png": photo(), "a.txt": b"a cat"})
        with make_plan(Request(photos=path, seed=-len(extra) // 2 + 1), pipeline()) as plan:
            digests.add(plan.digest)
    assert len(digests) == 2
    whole = write_tar(tmp_path / "three.tar", {"a.png": photo(), "a.txt": b"a cat"}, format=2)
    with make_plan(Request(photos=whole, seed=1), pipeline()) as plan:
        assert plan.digest in digests


def test_bad_lines_are_all_in_a_file_and_the_first_in_memory(plan_of):
    plan = plan_of([b"{}", {}, *[b"no"] * 150, {"width": 5}], shard_items=4)
    assert (plan.items, plan.bad_lines, len(plan.bad)) == (1, 152, 100)
    rows = [json.loads(line) for line in plan.bad_file.read_text().splitlines()]
    assert [row["line"] for row in rows] == [1, *range(3, 154)]
    assert rows[0].keys() == {"line", "reason", "text"}
    assert "width" in rows[-1]["reason"]


def test_a_limit_takes_the_shards_of_the_first_good_items(plan_of):
    """Of a plan that is the whole list's, so that its shards stay those of the whole."""
    rows = [{"width": 64}, b"no", {"width": 128}, *[{"width": 64}] * 3]
    plan = plan_of(rows, limit=3, shard_items=2)
    assert (lines_in(plan), plan.bad_lines) == ([[1, 4], [3], [5, 6]], 1)
    assert [plan.first_shards(n) for n in (1, 2, 3, 4, 5, 99, None)] == [1, 2, 2, 3, 3, 3, 3]
    assert plan.digest == plan_of(rows, shard_items=2).digest


@pytest.mark.parametrize("n", [0, 1, 7, 16, 17, 200])
def test_one_line_more_keeps_all_full_shards_of_the_default_size(plan_of, n):
    """And a short list is many shards, a long one has large ones."""
    rows = [{"width": 64 if n % 3 else 128} for n in range(n + 1)]
    before, after = (plan_of(rows[: n + i] or [b"no"], batch_size=2) for i in (0, 1))
    sizes = [before.shard_size(number) for number in range(len(before))]
    n_open = 0
    for number, size in enumerate(sizes):
        full = 2 if number < 16 else 4 if number < 32 else 8
        n_open += size < full
        if size == full:
            assert before.digests()[number] == after.digests()[number]
    assert n_open <= 2 and sum(sizes) == n


def test_progress_is_told_from_the_first_part(plan_of):
    told = []
    plan_of([{}] * 250 + [b"no"], tell=lambda *numbers: told.append(numbers))
    assert told == [(100, 100, 0), (200, 200, 0), (251, 250, 1)]


def test_the_temporary_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    source = put(tmp_path, "p.jsonl", line_of())
    with make_plan(Request(source), pipeline()) as plan:
        assert Path(plan.bad_file).is_relative_to(tmp_path / "tmp")
        assert plan.shard(0).jobs[0].item.prompt == "a red cat"
    with pytest.raises(ValueError, match="photos"):
        make_plan(Request(put(tmp_path, "p.csv", "prompt,image\n")), pipeline())
    assert [*(tmp_path / "tmp").iterdir()] == []


def test_a_numbers_of_a_tables_option_are_whole(tmp_path):
    source = put(tmp_path, "p.csv", "prompt,clip_skip\na cat,1.0\n")
    [item], _ = planned(make_sdxl_pipeline(), source=source)
    assert item.options == {"clip_skip": 1} and type(item.options["clip_skip"]) is int
    assert replace(item, line=3).text == "a cat"
