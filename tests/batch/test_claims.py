"""The same run again, and other runs in its folder."""

import shutil
import signal
from collections import Counter

import pytest
import torch
from helpers.batch_draws import ALL, SMALL, draw, quick_garbage, watch_models  # noqa: F401
from helpers.batch_runs import kept_of, rows_of
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline
from helpers.tiny_tokenizers import tiny_tokenizer

from sdattn.batch import open_batch


@pytest.mark.slow
def test_the_same_call_again_draws_nothing(model, watched, tmp_path):
    out = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    draw(model, out, ALL)
    made = kept_of(out)
    watched.rows.clear()
    outcome = draw(model, out, ALL)
    assert (outcome.before, outcome.whole, outcome.exit_code) == (8, 8, 0)
    assert watched.rows == []
    assert kept_of(out) == made
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert not [*(out / ".batch" / "tmp").iterdir(), *(out / ".batch" / "done").iterdir()]


@pytest.mark.slow
def test_a_batch_of_which_some_is_missing_is_drawn_whole(model, watched, tmp_path):
    """So that what is drawn again is bit for bit what it was."""
    out = tmp_path / "run"
    draw(model, out, ALL, batch_size=4)
    made, watched.rows[:] = kept_of(out), []
    shutil.rmtree(out / "items" / "0000" / "000006")
    outcome = draw(model, out, ALL, batch_size=4)
    assert (outcome.before, outcome.whole) == (7, 8)
    assert watched.rows == [4]
    assert kept_of(out) == made


OTHER_RUNS = {
    "options": {"options": {**SMALL, "num_inference_steps": 2}},
    "save": {"save": ("maps",)},
    "dtype": {"dtype": torch.bfloat16},
    "seed": {"seed": 1},
    "part": {"part": (1, 2)},
}


@pytest.fixture(scope="module")
def drawn(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("drawn") / "run"
    draw(model, out, ALL[:2])
    return out


@pytest.mark.parametrize("other", tiered(OTHER_RUNS, 2))
@pytest.mark.slow
def test_the_folder_of_another_run_is_left_alone(model, drawn, other):
    before = kept_of(drawn)
    with pytest.raises(ValueError, match="belongs to another run: .*force=True"):
        draw(model, drawn, ALL[:2], **OTHER_RUNS[other])
    assert kept_of(drawn) == before


@pytest.mark.slow
def test_another_model_is_another_run(drawn, tmp_path):
    pipe = make_pipeline()
    pipe.unet.conv_in.bias.data[0] += 1
    pipe.save_pretrained(tmp_path / "model")
    before = kept_of(drawn)
    with pytest.raises(ValueError, match="the model's weights or configuration .* is now"):
        draw(tmp_path / "model", drawn, ALL[:2])
    assert kept_of(drawn) == before


def test_a_disk_is_no_place_for_two_formats(model, drawn):
    with pytest.raises(ValueError, match="keeps its format, 'folder'"):
        draw(model, drawn, ALL[:2], format="webdataset", force=True)


@pytest.mark.slow
def test_force_makes_anew_what_differs_and_nothing_else(model, watched, tmp_path):
    out = tmp_path / "run"
    rows = [{"prompt": prompt, "id": f"i{n}"} for n, prompt in enumerate(ALL[:4])]
    draw(model, out, rows, batch_size=1)
    inodes = {row["id"]: (out / "items/0000" / row["id"]).stat().st_ino for row in rows}
    rows[1]["seed"] = 99
    rows.append({"prompt": "red", "id": "new"})
    watched.rows.clear()
    outcome = draw(model, out, rows, batch_size=1, force=True)
    assert (outcome.items, outcome.before, outcome.whole) == (5, 3, 5)
    assert len(watched.rows) == 2
    run = open_batch(out)
    assert [*run] == ["i0", "i1", "i2", "i3", "new"]
    assert run["i1"].info["seed"] == 99
    for item in ("i0", "i2", "i3"):
        assert (out / "items/0000" / item).stat().st_ino == inodes[item]


@pytest.mark.slow
def test_failures_of_another_input_are_not_this_ones(model, watched, tmp_path):
    watched.forbidden = tiny_tokenizer()("dog").input_ids[1]
    out = tmp_path / "run"
    rows = [{"prompt": "a cat", "id": "cat"}, {"prompt": "a dog", "id": "dog"}]
    assert draw(model, out, rows).failed == 1
    outcome = draw(model, out, rows[:1], force=True)
    assert (outcome.items, outcome.whole, outcome.failed, outcome.exit_code) == (1, 1, 0, 0)
    assert (out / "errors.jsonl").read_bytes() == b""


@pytest.mark.slow
def test_parts_draw_each_item_once_whatever_their_batches(model, tmp_path):
    """Machines of other sizes find other batch sizes."""
    for which in (1, 2):
        draw(model, tmp_path / f"run-{which}", ALL[:6], part=(which, 2), batch_size=which)
    drawn = Counter(item for which in (1, 2) for item in open_batch(tmp_path / f"run-{which}"))
    assert drawn == Counter(f"{line:06d}" for line in range(1, 7))


@pytest.mark.slow
def test_strict_stops_before_anything_is_written(model, tmp_path, capsys):
    rows = ["a cat", {"prompt": "a dog", "width": 65}]
    with pytest.raises(ValueError, match=r"1 line\(s\) of .* cannot be drawn, the first is line 2"):
        draw(model, tmp_path / "run", rows, strict=True)
    assert not (tmp_path / "run").exists()
    assert "sdattn: line 2: `width=65`" in capsys.readouterr().err
    outcome = draw(model, tmp_path / "run", rows)
    assert (outcome.items, outcome.whole, outcome.bad_lines, outcome.exit_code) == (1, 1, 1, 1)
    [row] = rows_of(tmp_path / "run" / "errors.jsonl")
    assert row["line"] == 2 and "width=65" in row["reason"] and "id" not in row


@pytest.mark.slow
def test_an_input_without_an_item_is_told(model, tmp_path):
    with pytest.raises(ValueError, match="no line that can be drawn"):
        draw(model, tmp_path / "run", [{"prompt": "a dog", "width": 65}])
