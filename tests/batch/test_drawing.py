"""Many prompts in one process: what comes of them, also where memory or an item fails."""

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.batch_draws import ALL, SMALL, draw, quick_garbage, watch_models  # noqa: F401
from helpers.batch_runs import PROMPT, TOKENIZER, as_layers, files_of, kept_of, rows_of
from helpers.presets import OF_UNETS
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_sdxl_pipeline
from helpers.tiny_tokenizers import tiny_tokenizer
from helpers.transformer_rows import flux, sana, sd3
from PIL import Image
from safetensors.torch import load_file
from sdattn.batch.engines.drawing import Writer
from torch.nn.modules.module import register_module_forward_pre_hook

from sdattn import Heatmaps, generate, load_pipeline, read_prompt
from sdattn.batch import open_batch, verify
from sdattn.maps.presets import PRESETS, preset_of
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.packing import pack_run
from sdattn.runs.settings import RunSettings

IDENTITY = ("id", "line", "fingerprint")  # what generate() does not know of an item


# What comes of it


VARIED = (
    {"prompt": "a red cat", "id": "plain"},
    {"prompt": "a dog", "id": "wide", "width": 128, "seed": 77},
    {"prompt": "cat", "id": "against", "negative_prompt": "a dog", "guidance_scale": 4.0},
    {"prompt": "dog and cat", "id": "other", "negative_prompt": "", "guidance_scale": 4.0},
    {"prompt": "a red dog", "id": "more", "num_inference_steps": 2},
)


@pytest.fixture(scope="module")
def varied(model, tmp_path_factory):
    """All of them, one at a time, and all that can be kept."""
    out = tmp_path_factory.mktemp("varied") / "run"
    outcome = draw(model, out, VARIED, batch_size=1, save=None)
    assert (outcome.items, outcome.whole, outcome.exit_code) == (5, 5, 0)
    return out


def same_run(item, alone):
    """Byte for byte, but for what a single run does not know, the page's row of the item too."""
    name = Path(item).name.encode()
    item, alone = files_of(item), files_of(alone)
    infos = [json.loads(files.pop("run.json")) for files in (item, alone)]
    for one in IDENTITY:
        infos[0].pop(one)
    for info in infos:
        info.pop("checksum")  # of the rest
    row = b'      <div><dt>item</dt><dd dir="auto">' + name + b"</dd></div>\n"
    assert item["report.html"].count(row) == 1
    item["report.html"] = item["report.html"].replace(row, b"")
    hashes = [info["files"].pop("report.html") for info in infos]
    return item == alone and infos[0] == infos[1] and hashes[0] != hashes[1]


def generated(pipe, row, line, options):
    row = {**options, **row}
    row.pop("id", None)
    return generate(pipe, row.pop("prompt"), seed=row.pop("seed", line - 1), **row)


@pytest.mark.slow
def test_an_item_is_what_generate_makes_of_it(model, varied, tmp_path):
    pipe = load_pipeline(model, device="cpu")
    for line, row in enumerate(VARIED, 1):
        generated(pipe, row, line, SMALL).save(tmp_path / "alone" / row["id"])
        item = varied / "items" / "0000" / row["id"]
        assert same_run(item, tmp_path / "alone" / row["id"]), row["id"]
        info = json.loads((item / "run.json").read_bytes())
        assert (info["id"], info["line"]) == (row["id"], line)


def test_a_small_model_runs_in_one_thread_while_the_batch_runs(model, tmp_path, monkeypatch):
    """Threads of small operations wait for each other; the caller's number is put back."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    seen, before = set(), torch.get_num_threads()
    hook = register_module_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        assert draw(model, tmp_path / "run", VARIED[:1]).exit_code == 0
        assert seen == {1} and torch.get_num_threads() == 2
    finally:
        hook.remove()
        torch.set_num_threads(before)


@pytest.mark.slow
def test_items_that_run_together_are_what_they_are_alone(model, varied, watched, tmp_path):
    """Those that are compared come behind others in their batches."""
    seeded = [{"seed": line, **row} for line, row in enumerate(VARIED)]
    rows = [*({**row, "id": f"{row['id']}-2", "seed": 9} for row in VARIED), *seeded]
    rows += [{"prompt": "dog, dog", "id": "few", "words": ["dog"], "seed": 10}]
    assert draw(model, tmp_path / "run", rows, batch_size=8).whole == 11
    # plain and few (3), wide (2), two steps (2, twice), guided with a text (4), with none (4)
    assert sorted(watched.rows) == [2, 2, 2, 3, 4, 4]
    run, alone = open_batch(tmp_path / "run"), open_batch(varied)
    assert [*run] == [row["id"] for row in rows]
    assert len({one.image.tobytes() for one in run.values()}) == 11  # none is another's
    for item in alone:
        one, other = run[item], alone[item]
        assert one.info["layers"] == other.info["layers"]
        assert one.info["options"] == other.info["options"]
        assert one.heatmaps.prompt == other.heatmaps.prompt
        torch.testing.assert_close(one.heatmaps.maps, other.heatmaps.maps, atol=1e-3, rtol=0)
        pair = [np.asarray(each.image, int) for each in (one, other)]
        assert np.abs(pair[0] - pair[1]).max() <= 2


def test_rows_have_the_numbers_of_the_saved_maps(varied):
    """The default preset written out, where the way up's finest maps are all of one grid."""
    for row in rows_of(varied / "metadata.jsonl"):
        folder = varied / row["place"]
        info = json.loads((folder / "run.json").read_bytes())
        maps = load_file(folder / "maps.safetensors")
        ups = [maps[name].double().numpy() for name in maps if name.startswith("up_blocks")]
        rows, cols = max(one.shape[:2] for one in ups)
        mean = np.mean([one for one in ups if one.shape[:2] == (rows, cols)], 0)
        r, c = np.mgrid[:rows, :cols]
        assert [word["text"] for word in info["words"]] == row["prompt"].split()
        for word, said in zip(info["words"], row["statistics"], strict=True):
            v = mean[..., word["columns"]].sum(-1)
            p = v / v.sum()
            expected = {
                "peak": v.max(),
                "mean": v.sum() / (rows * cols),
                "mass": v.sum(),
                "centre_row": (p * (r + 0.5)).sum() / rows,
                "centre_col": (p * (c + 0.5)).sum() / cols,
                "area": (v >= (v.min() + v.max()) / 2).mean(),
                "entropy": -(p * np.log(p)).sum(),
            }
            assert said.pop("word") == word["text"]
            assert said == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_words_keep_their_columns_only(model, tmp_path):
    rows = [{"prompt": "cat, red cat and dog", "id": "all", "seed": 5}]
    rows.append({**rows[0], "id": "few", "words": ["red cat", "dog", "<sos>"]})
    draw(model, tmp_path / "run", rows, batch_size=1, save=None)
    run = open_batch(tmp_path / "run")
    few, full = run["few"].heatmaps, run["all"].heatmaps
    expected = [0, *full.find("red cat")[0].columns, *full.find("dog")[0].columns]
    assert list(few.columns) == sorted(expected)
    assert few.words == ("red", "cat", "dog")  # the first cat is not of the phrase
    items = {name: tmp_path / "run" / "items" / "0000" / name for name in ("few", "all")}
    layers = {name: load_file(items[name] / "maps.safetensors") for name in items}
    assert layers["few"].keys() == layers["all"].keys()
    for name, maps in layers["few"].items():
        assert torch.equal(maps, layers["all"][name][..., sorted(expected)])
    torch.testing.assert_close(few["red cat"].values, full.find("red cat")[0].values)
    drawn = sorted(os.listdir(items["few"] / "heatmaps"))
    assert drawn == ["01-red.png", "02-cat.png", "03-dog.png"]
    # as generate() keeps them; colours may differ by a rounding
    pipe = load_pipeline(model, device="cpu")
    generated(pipe, rows[1], 2, SMALL).save(tmp_path / "alone")
    pair = [files_of(folder) for folder in (items["few"], tmp_path / "alone")]
    assert pair[0].keys() == pair[1].keys()
    for name in ("image.png", "maps.safetensors"):
        assert pair[0][name] == pair[1][name]


OTHERS = {
    "SDXL": (make_sdxl_pipeline, {"guidance_scale": 3.0, "negative_prompt": "dog"}),
    "Stable Diffusion 3": (sd3, {"max_sequence_length": 24, "guidance_scale": 3.0}),
    "FLUX.1": (flux, {"max_sequence_length": 24, "true_cfg_scale": 2.0, "negative_prompt": "a"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_pipelines_run_alike(name, tmp_path):
    make, more = OTHERS[name]
    make().save_pretrained(tmp_path / "model")
    options = {"num_inference_steps": 1, "height": 64, "width": 64, **more}
    prompts = ("a cat", "red dog")
    # sharpened, maps of random weights, which are nearly flat, would show what float16 rounds
    preset = preset_of("default") if name == "SDXL" else preset_of("columns", "self")
    way = {"options": options, "preset": preset}
    outcome = draw(tmp_path / "model", tmp_path / "run", prompts, **way)
    assert (outcome.whole, outcome.exit_code) == (2, 0)
    pipe = load_pipeline(tmp_path / "model", device="cpu")
    for seed, one in enumerate(open_batch(tmp_path / "run").values()):
        alone = generate(pipe, prompts[seed], seed=seed, preset=preset, **options)
        assert one.info["prompt"] == prompts[seed]
        assert one.info["options"] == alone.info[0]["options"]
        expected = alone.heatmaps[0].maps
        scale = float(expected.max())
        torch.testing.assert_close(one.heatmaps.maps, expected, atol=2e-3 * scale, rtol=0)
        pair = [np.asarray(each, int) for each in (one.image, alone.images[0])]
        assert np.abs(pair[0] - pair[1]).max() <= 2


@pytest.mark.slow
def test_options_that_are_tuples_make_no_other_run(tmp_path):
    make_sdxl_pipeline().save_pretrained(tmp_path / "model")
    options = {"num_inference_steps": 1, "height": 64, "width": 64, "original_size": (64, 64)}
    for before in (0, 1):
        outcome = draw(tmp_path / "model", tmp_path / "run", ["a cat"], options=options)
        assert (outcome.before, outcome.whole) == (before, 1)


@pytest.mark.parametrize(
    ("name", "format"),
    tiered(
        [
            ("daam, refined", "webdataset"),
            *((name, "folder") for name in [*OF_UNETS, "default, refined"]),
        ],
        quick=1,
        daily=4,
    ),
)
@pytest.mark.slow
def test_items_have_the_maps_of_their_preset(model, tmp_path, name, format):
    """Those of single runs, live and read back; ``verify`` knows their shapes."""
    preset = preset_of(name.split(",")[0], "self" if "refined" in name else None)
    outcome = draw(model, tmp_path / "run", ALL[:2], preset=preset, format=format)
    assert outcome.exit_code == 0
    assert verify(tmp_path / "run") == (2, [])
    pipe = load_pipeline(model, device="cpu")
    for i, (_, item) in enumerate(sorted(open_batch(tmp_path / "run").items())):
        [alone] = generate(pipe, ALL[i], seed=i, preset=preset, **SMALL).heatmaps
        assert item.heatmaps.preset == preset
        scale = float(alone.maps.max())
        torch.testing.assert_close(item.heatmaps.maps, alone.maps, atol=2e-3 * scale, rtol=0)


@pytest.mark.slow
def test_another_preset_is_another_run(model, tmp_path):
    draw(model, tmp_path / "run", ALL[:2])
    with pytest.raises(ValueError, match="belongs to another run: .*preset"):
        draw(model, tmp_path / "run", ALL[:2], preset=PRESETS["p2p"])


def test_a_preset_that_the_model_cannot_have_is_refused_before_it_is_loaded(tmp_path):
    sana().save_pretrained(tmp_path / "model")
    for preset in (PRESETS["daam"], preset_of("default", "self")):
        with pytest.raises((TypeError, ValueError), match="daam|way up"):
            draw(tmp_path / "model", tmp_path / "run", ["a cat"], preset=preset)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_names_the_preset_that_its_default_is(model, tmp_path):
    sd3().save_pretrained(tmp_path / "joint")
    for folder, name in ((model, "default"), (tmp_path / "joint", "joint")):
        root = tmp_path / f"of-{name}"
        draw(folder, root, ["a cat"])
        [run] = open_batch(root).values()
        made = json.loads((root / "batch.json").read_bytes())["settings"]
        assert made["preset"]["name"] == run.heatmaps.preset.name == name


@pytest.mark.slow
def test_joint_attention_is_refined_in_batches_as_alone(tmp_path):
    sd3().save_pretrained(tmp_path / "model")
    preset, prompts = preset_of("default", "self"), ["a cat", "a red dog and a cat"]
    outcome = draw(tmp_path / "model", tmp_path / "run", prompts, preset=preset)
    assert outcome.exit_code == 0 and verify(tmp_path / "run") == (2, [])
    pipe = load_pipeline(tmp_path / "model", device="cpu")
    for i, (_, item) in enumerate(sorted(open_batch(tmp_path / "run").items())):
        [alone] = generate(pipe, prompts[i], seed=i, preset=preset, **SMALL).heatmaps
        assert item.heatmaps.preset == preset and item.heatmaps.columns == alone.columns
        torch.testing.assert_close(item.heatmaps.maps, alone.maps, atol=2e-3, rtol=0)


# Memory


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_halved_for_good(model, watched, tmp_path, capsys):
    watched.most = 2
    outcome = draw(model, tmp_path / "run", ALL[:7], batch_size=4)
    assert (outcome.whole, outcome.failed, outcome.exit_code) == (7, 0, 0)
    assert watched.rows == [4, 2, 2, 2, 1]  # the second batch, of three, begins at two
    told = [line for line in capsys.readouterr().err.splitlines() if "out of memory" in line]
    assert len(told) == 1
    assert "out of memory with 4 items" in told[0] and "run 2 together" in told[0]
    pipe = load_pipeline(model, device="cpu")
    for seed, one in enumerate(open_batch(tmp_path / "run").values()):
        alone = generate(pipe, ALL[seed], seed=seed, **SMALL).heatmaps[0]
        assert one.heatmaps.prompt == alone.prompt
        torch.testing.assert_close(one.heatmaps.maps, alone.maps, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_what_is_said_to_run_no_more_together_does_not(model, watched, tmp_path, capsys):
    watched.most = 2
    outcome = draw(model, tmp_path / "run", ALL, batch_size=8)
    assert (outcome.whole, outcome.failed) == (8, 0)
    assert watched.rows == [8, 4, 2, 2, 2, 2]
    assert capsys.readouterr().err.count("out of memory") == 2


@pytest.mark.slow
def test_a_limit_is_that_of_its_shape(model, watched, tmp_path):
    watched.most = 2
    rows = [{"prompt": one, "width": width} for one in ALL[:4] for width in (64, 128)]
    assert draw(model, tmp_path / "run", rows, batch_size=4).whole == 8
    sides = [*zip(watched.rows, watched.pixels, strict=True)]
    small, large = 64 * 64, 64 * 128
    assert sides == [(4, small), (2, small), (2, small), (4, large), (2, large), (2, large)]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, "auto"])
def test_items_that_do_not_fit_alone_fail_and_the_run_goes_on(model, watched, tmp_path, batch_size):
    watched.most = 0
    outcome = draw(model, tmp_path / "run", ALL[:2], batch_size=batch_size)
    assert (outcome.items, outcome.whole, outcome.failed, outcome.exit_code) == (2, 0, 2, 1)
    rows = rows_of(tmp_path / "run" / "errors.jsonl")
    assert [row["id"] for row in rows] == ["000001", "000002"]
    for row, prompt in zip(rows, ALL, strict=False):
        assert row["prompt"] == prompt
        assert row["reason"].startswith("OutOfMemoryError: CUDA out of memory.")
        assert "Traceback" in row["traceback"]
    watched.most = 10**9
    outcome = draw(model, tmp_path / "run", ALL[:2], batch_size=batch_size)
    assert (outcome.before, outcome.whole, outcome.failed, outcome.exit_code) == (0, 2, 0, 0)
    assert (tmp_path / "run" / "errors.jsonl").read_bytes() == b""


@pytest.mark.slow
def test_an_item_that_fails_takes_no_other_with_it(model, watched, tmp_path, capsys):
    watched.forbidden = tiny_tokenizer()("dog").input_ids[1]
    prompts = ("a cat", "a red dog", "red", "a")
    outcome = draw(model, tmp_path / "run", prompts, batch_size=4)
    assert (outcome.whole, outcome.failed, outcome.exit_code) == (3, 1, 1)
    [row] = rows_of(tmp_path / "run" / "errors.jsonl")
    assert (row["id"], row["line"], row["prompt"]) == ("000002", 2, "a red dog")
    assert row["reason"] == "RuntimeError: boom: the encoder cannot read this"
    assert [*open_batch(tmp_path / "run")] == ["000001", "000003", "000004"]
    assert "out of memory" not in capsys.readouterr().err

    watched.forbidden = None
    before = kept_of(tmp_path / "run")
    outcome = draw(model, tmp_path / "run", prompts, batch_size=4)
    assert (outcome.before, outcome.whole, outcome.failed, outcome.exit_code) == (3, 4, 0, 0)
    after = kept_of(tmp_path / "run")
    items = [name for name in before if name.startswith("items/")]
    assert {name: after[name] for name in items} == {name: before[name] for name in items}


@pytest.mark.slow
def test_a_run_stops_once_too_many_have_failed(model, watched, tmp_path):
    watched.forbidden = tiny_tokenizer().bos_token_id  # which all prompts have
    outcome = draw(model, tmp_path / "run", ALL[:5], batch_size=1, max_errors=3)
    assert (outcome.failed, outcome.exit_code) == (3, 1)
    assert outcome.stopped is not None and "max_errors" in outcome.stopped
    watched.forbidden = None
    outcome = draw(model, tmp_path / "run", ALL[:5], batch_size=1, max_errors=3)
    assert (outcome.whole, outcome.failed, outcome.stopped) == (5, 0, None)


@pytest.mark.slow
def test_what_failed_before_a_crash_is_not_counted_again(model, watched, tmp_path):
    watched.forbidden = tiny_tokenizer()("dog").input_ids[1]
    prompts = ("a cat", "a dog", "red", "dog", "a")
    out = tmp_path / "run"
    draw(model, out, prompts, batch_size=1)
    (out / "errors.jsonl").rename(out / ".batch" / "failed" / "crashed-0.jsonl")  # not gathered
    outcome = draw(model, out, prompts, batch_size=1, max_errors=3)
    assert (outcome.whole, outcome.failed, outcome.stopped) == (3, 2, None)
    assert [row["id"] for row in rows_of(out / "errors.jsonl")] == ["000002", "000004"]


def wait_until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_writer_is_never_further_ahead():
    gate, begun, waiting = threading.Event(), [], []

    def call(number):
        begun.append(number)
        assert gate.wait(60)

    def submit(writer):
        for number in range(9):
            writer.submit(call, number)
            waiting.append(number)

    with Writer(threads=2, ahead=4) as writer:
        thread = threading.Thread(target=submit, args=(writer,))
        thread.start()
        wait_until(lambda: len(waiting) == 4 and len(begun) == 2)
        time.sleep(0.05)
        assert len(waiting) == 4  # the fifth waits for one to end
        assert len(begun) == 2
        gate.set()
        thread.join(60)
    assert sorted(begun) == [*range(9)]


def test_the_first_error_of_a_writer_is_raised_and_nothing_begun_after_it():
    gate, begun = threading.Event(), []

    def call(number):
        begun.append(number)
        assert gate.wait(60)
        if number == 1:
            raise OSError(f"disk {number} is full")

    with pytest.raises(OSError, match="disk 1 is full"):
        with Writer(threads=1, ahead=5) as writer:
            for number in (0, 1, 2, 3):
                writer.submit(call, number)
            gate.set()
            wait_until(lambda: writer._error is not None)
            writer.submit(call, 4)
            pytest.fail("the error was not raised")
    assert begun == [0, 1]


def test_an_error_of_the_last_call_is_raised_on_leaving():
    def call():
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        with Writer(threads=2, ahead=4) as writer:
            writer.submit(call)


@pytest.mark.parametrize("also", [False, True])
def test_an_error_in_the_block_waits_for_what_was_begun(also):
    done = []

    def call(number):
        time.sleep(0.01)
        if also and number == 3:
            raise OSError("the disk is full too")
        done.append(number)

    with pytest.raises(KeyboardInterrupt):
        with Writer(threads=1, ahead=9) as writer:
            for number in range(4):
                writer.submit(call, number)
            raise KeyboardInterrupt
    assert done == [0, 1, 2] + [3] * (not also)


@pytest.mark.slow
def test_maps_that_are_not_finite_are_no_item():
    maps = torch.full((4, 6, 77), torch.nan)
    heatmaps = Heatmaps(read_prompt(TOKENIZER, PROMPT), maps)
    with pytest.raises(ValueError, match="up.b hold values that are not finite.*bfloat16"):
        layers = as_layers({"up.b": maps})
        settings = RunSettings(prompt=PROMPT, seed=0)
        pack_run(ImageRun(Image.new("RGB", (96, 64)), heatmaps, layers, settings), ("maps",))
