"""What comes of items that one process draws: those of `generate`, with other items or alone."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.batch_draws import ALL, SMALL, draw, watch_models  # noqa: F401
from helpers.batch_runs import rows_of
from helpers.presets import OF_UNETS
from helpers.tiny_pipelines import make_sdxl_pipeline
from helpers.transformer_rows import flux, qwen_image, sana, sd3
from helpers.trees import tree
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_pre_hook

from sdattn import generate, load_pipeline
from sdattn.batch import open_batch, verify
from sdattn.maps.presets import PRESETS, preset_of

IDENTITY = ("id", "line", "fingerprint")  # what generate() does not know of an item


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


def folders_of(root):
    """The items' folders, by id."""
    return {row["id"]: root / row["place"] for row in rows_of(root / "metadata.jsonl")}


def same_run(item, alone):
    """Byte for byte, but for what a single run does not know, the page's row of the item too."""
    name = Path(alone).name.encode()
    item, alone = tree(item), tree(alone)
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
def test_an_item_is_what_generate_makes_of_it(model, varied, tmp_path, monkeypatch):
    monkeypatch.setattr("sdattn.runs.preparing.SMALL", 0)  # or generate() would keep each step
    pipe = load_pipeline(model, device="cpu")
    for line, row in enumerate(VARIED, 1):
        generated(pipe, row, line, SMALL).save(tmp_path / "alone" / row["id"])
        item = folders_of(varied)[row["id"]]
        assert same_run(item, tmp_path / "alone" / row["id"]), row["id"]
        info = json.loads((item / "run.json").read_bytes())
        assert (info["id"], info["line"]) == (row["id"], line)


def test_a_small_model_runs_in_one_thread_while_the_batch_runs(model, tmp_path, monkeypatch):
    """Threads of small operations wait for each other; the caller's number is put back."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
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
    items = folders_of(tmp_path / "run")
    layers = {name: load_file(items[name] / "maps.safetensors") for name in items}
    assert layers["few"].keys() == layers["all"].keys()
    for name, maps in layers["few"].items():
        assert torch.equal(maps, layers["all"][name][..., sorted(expected)])
    torch.testing.assert_close(few["red cat"].values, full.find("red cat")[0].values)
    drawn = sorted(os.listdir(items["few"] / "heatmaps"))
    assert drawn == ["01-red.png", "02-cat.png", "03-dog.png"]


OTHERS = {
    "SDXL": (make_sdxl_pipeline, {"guidance_scale": 3.0, "negative_prompt": "dog"}),
    "Stable Diffusion 3": (sd3, {"max_sequence_length": 24, "guidance_scale": 3.0}),
    "FLUX.1": (flux, {"max_sequence_length": 24, "true_cfg_scale": 2.0, "negative_prompt": "a"}),
    "Sana": (sana, {"guidance_scale": 3.0}),
    # Its prompts are padded to the longest of a batch, so those of one length run together
    "Qwen-Image": (qwen_image, {"true_cfg_scale": 2.0, "negative_prompt": "a"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_pipelines_run_alike(name, tmp_path):
    make, more = OTHERS[name]
    make().save_pretrained(tmp_path / "model")
    options = {"num_inference_steps": 1, "height": 64, "width": 64, **more}
    prompts = ("a cat", "red dog", "a red cat and a dog")
    # sharpened, maps of random weights, which are nearly flat, would show what float16 rounds
    joint = name not in ("SDXL", "Sana")
    preset = preset_of("columns", "self") if joint else preset_of("default")
    way = {"options": options, "preset": preset}
    outcome = draw(tmp_path / "model", tmp_path / "run", prompts, **way)
    assert (outcome.whole, outcome.exit_code) == (3, 0)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["daam, refined", *OF_UNETS, "default, refined"])
def test_items_have_the_maps_of_their_preset(model, tmp_path, name):
    """Those of single runs, live and read back; ``verify`` knows their shapes."""
    preset = preset_of(name.split(",")[0], "self" if "refined" in name else None)
    outcome = draw(model, tmp_path / "run", ALL[:2], preset=preset, format="webdataset")
    assert outcome.exit_code == 0
    assert verify(tmp_path / "run") == (2, [])
    pipe = load_pipeline(model, device="cpu")
    for i, (_, item) in enumerate(sorted(open_batch(tmp_path / "run").items())):
        [alone] = generate(pipe, ALL[i], seed=i, preset=preset, **SMALL).heatmaps
        assert item.heatmaps.preset == preset
        scale = float(alone.maps.max())
        torch.testing.assert_close(item.heatmaps.maps, alone.maps, atol=2e-3 * scale, rtol=0)


def test_a_preset_that_the_model_cannot_have_is_refused_before_it_is_loaded(tmp_path):
    sana().save_pretrained(tmp_path / "model")
    for preset in (PRESETS["daam"], preset_of("default", "self")):
        with pytest.raises((TypeError, ValueError), match="daam|way up"):
            draw(tmp_path / "model", tmp_path / "run", ["a cat"], preset=preset)
    assert not (tmp_path / "run").exists()


def test_candidates_are_those_of_generate_beside_items_without(model, tmp_path):
    rows = [
        {"prompt": "a red cat and a dog", "id": "own", "seed": 4, "candidates": 3},
        {"prompt": "a red cat and a dog", "id": "plain", "seed": 4},
        {"prompt": "a dog", "id": "words", "candidates": 2, "decide_at": 1, "words": ["dog"]},
        {"prompt": "a cat", "id": "one", "candidates": 1, "decide_at": 0.5},
    ]
    options = {**SMALL, "num_inference_steps": 10}
    draw(model, tmp_path / "run", rows, options=options)
    found = {row["id"]: row for row in rows_of(tmp_path / "run" / "metadata.jsonl")}
    batch = open_batch(tmp_path / "run")
    pipe = load_pipeline(model, device="cpu")
    for line, row in enumerate(rows, 1):
        [alone] = run = generated(pipe, row, line, options)
        item, told = batch[row["id"]], found[row["id"]]
        assert np.array_equal(item.image, alone.image)
        assert told["seed"] == item.settings.seed == run.seeds[0]
        assert told.get("candidates", []) == [vars(one) for one in run.candidates]
        torch.testing.assert_close(item.heatmaps.maps, alone.heatmaps.maps, rtol=2e-3, atol=1e-6)
        assert told["score"] == pytest.approx(alone.heatmaps.score(), rel=1e-2)
        assert set(told["missing"]) == {word.word for word in item.missing()}
    assert len(found["own"]["candidates"]) == 3 and "candidates" not in found["plain"]
    assert batch["own"].details.steps is None and verify(tmp_path / "run") == (4, [])
