"""Many prompts in one process: what is checked, what runs together, and what comes of it."""

import gc
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import PartialState
from conftest import make_pipeline, make_sdxl_pipeline, make_unet, make_vae, tiny_tokenizer
from diffusers import DDIMScheduler, StableDiffusionPAGPipeline
from safetensors.torch import load_file
from transformer_rows import flux, qwen_image, sd3
from unet_rows import animatediff

from sdattn import cli, generate, load_pipeline
from sdattn.batch import Request, open_batch, run_batch, verify
from sdattn.batch.items import Item, read_items
from sdattn.batch.plan import Job, check_items, digest_model, plan_batches
from sdattn.batch.team import Team
from sdattn.maps.presets import PRESETS, preset_of
from sdattn.runs.drawings import USUAL

SMALL = {"num_inference_steps": 1, "height": 64, "width": 64, "guidance_scale": 1.0}
ALL = ("a cat", "a red dog", "dog and cat", "red", "a dog", "cat, cat", "a", "red cat and dog")
IDENTITY = ("id", "line", "fingerprint")  # what generate() does not know of an item


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def quick_garbage():
    """Each failure for want of memory collects garbage; what the libraries hold is none."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def watched(monkeypatch):
    """The UNets that run_batch loads: notes the rows of each call and fails as CUDA does."""
    seen = SimpleNamespace(most=10**9, rows=[], pixels=[], forbidden=None)

    def check(_, args, options):
        latent = args[0] if args else options["sample"]
        seen.rows.append(len(latent))
        seen.pixels.append(latent.shape[-2] * latent.shape[-1] * 64)
        if len(latent) > seen.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def check_text(_, args, options):
        ids = args[0] if args else options["input_ids"]
        if seen.forbidden is not None and (ids == seen.forbidden).any():
            raise RuntimeError("boom: the encoder\ncannot read this")

    def load(*args, **options):
        pipe = load_pipeline(*args, **options)
        pipe.unet.register_forward_pre_hook(check, with_kwargs=True)
        pipe.text_encoder.register_forward_pre_hook(check_text, with_kwargs=True)
        return pipe

    monkeypatch.setattr("sdattn.batch.engine.load_pipeline", load)
    return seen


def draw(model, out, rows, **request):
    """Write an input beside ``out`` and draw it."""
    source = Path(f"{out}.jsonl")
    rows = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {"batch_size": 2, "options": SMALL, "device": "cpu", "save": ("image", "maps")}
    return run_batch(Request(source, out, str(model), **{**usual, **request}))


def files_of(folder):
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def kept_of(out):
    """All that a run keeps, without what is at work."""
    return {name: data for name, data in files_of(out).items() if not name.startswith(".batch")}


def rows_of(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def items_of(*rows):
    rows = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    items, bad = read_items("\n".join(map(json.dumps, rows)).encode(), "jsonl")
    assert bad == []
    return items


def job(number, shape=0):
    return Job(Item(f"{number:06d}", number, "a cat", number, None, None, {}), {}, shape)


# What runs together


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_every_job_is_in_one_batch_with_others_of_its_shape(size):
    numbers = random.Random(0)
    jobs = [job(n, numbers.randrange(4)) for n in range(1, 60)]
    batches = plan_batches(jobs, size)
    assert Counter(one.item.id for batch in batches for one in batch) == Counter(
        one.item.id for one in jobs
    )
    for batch in batches:
        assert 1 <= len(batch) <= size
        assert len({one.shape for one in batch}) == 1
        lines = [one.item.line for one in batch]
        assert lines == sorted(lines)
    first = [batch[0].item.line for batch in batches]
    assert first == sorted(first)
    small = Counter(batch[0].shape for batch in batches if len(batch) < size)
    assert all(number == 1 for number in small.values())  # only the rest of each shape


def test_a_plan_says_who_runs_together():
    jobs = [job(1), job(2, 1), job(3), job(4), job(5, 1), job(6)]
    planned = [[one.item.line for one in batch] for batch in plan_batches(jobs, 2)]
    assert planned == [[1, 3], [2, 5], [4, 6]]
    assert plan_batches([], 4) == []


# What is checked before


def test_a_set_of_options_is_checked_once_good_or_bad(tiny_pipe, monkeypatch):
    from sdattn.batch import plan

    checked = []
    real = plan.checked_options
    monkeypatch.setattr(
        plan, "checked_options", lambda *args: checked.append(args[1]) or real(*args)
    )
    good = [{"prompt": f"{n} cats", "width": 64} for n in range(20)]
    poor = [{"prompt": f"{n} dogs", "width": 63} for n in range(20)]
    jobs, bad = check_items(tiny_pipe, items_of(*good, *poor), {"height": 64})
    assert [one.item.line for one in jobs] == [*range(1, 21)]
    assert [one.line for one in bad] == [*range(21, 41)]
    assert len(checked) == 2
    assert len({id(one.options) for one in jobs}) == 1
    assert jobs[0].options == {"height": 64, "width": 64}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"width": 65}, "width=65: this model makes sizes that are a multiple of 8"),
        ({"guidance_scal": 3}, "no option 'guidance_scal'. It has: guidance_scale"),
        ({"num_inference_steps": 1001}, "pass 1 to 1000, the scheduler's most"),
        ({"negative_prompt": "dog", "guidance_scale": 1}, "only with guidance_scale above 1"),
        ({"words": ["<nothing>"]}, "'<nothing>' is not in the prompt. Its words are: a, red, cat"),
        (
            {"prompt": f"{'a ' * 80} cat", "words": ["cat"]},
            "'cat' is in the prompt but was cut off",
        ),
    ],
)
def test_what_cannot_be_drawn_is_told_and_stops_no_other(tiny_pipe, row, reason):
    items = items_of("a dog", {"prompt": "a red cat", **row}, "red")
    jobs, [bad] = check_items(tiny_pipe, items, {})
    assert [one.item.line for one in jobs] == [1, 3]
    assert bad.line == 2
    assert reason in bad.reason
    assert bad.text == items[1].prompt[:200]


def test_a_terminal_is_not_told_what_it_would_obey(tiny_pipe):
    row = {"prompt": "a \x1b]0;mine\x07cat", "width": 65, "words": ["cat"]}
    for extra in ({"width": 65}, {"words": ["<nothing>"]}):
        _, [bad] = check_items(tiny_pipe, items_of({"prompt": row["prompt"], **extra}), {})
        assert bad.text.isprintable()
        assert bad.reason.isprintable()


def test_a_negative_prompt_of_all_gives_way_to_an_items_own(tiny_pipe):
    rows = ["a cat", {"prompt": "a cat", "negative_prompt": "red"}]
    rows.append({"prompt": "a cat", "negative_prompt": ""})
    jobs, bad = check_items(tiny_pipe, items_of(*rows), {"negative_prompt": "dog"})
    assert bad == []
    assert [one.item.negative_prompt for one in jobs] == ["dog", "red", ""]
    assert all("negative_prompt" not in one.options for one in jobs)
    jobs, _ = check_items(tiny_pipe, items_of(*rows), {})
    assert [one.item.negative_prompt for one in jobs] == [None, "red", ""]
    assert jobs[0].shape != jobs[1].shape  # a list of negative prompts has one for each


def test_options_of_all_give_way_to_an_items_own(tiny_pipe):
    rows = ["a cat", {"prompt": "a cat", "width": 64}, {"prompt": "a dog", "width": 128}]
    jobs, _ = check_items(tiny_pipe, items_of(*rows), {"width": 128, "height": 64})
    assert [one.options["width"] for one in jobs] == [128, 64, 128]
    assert jobs[0].shape == jobs[2].shape != jobs[1].shape


def test_a_pipeline_of_videos_is_refused():
    jobs, bad = check_items(animatediff(), items_of("a cat", "a dog"), {})
    assert jobs == []
    assert ["makes 16 pictures of an item" in one.reason for one in bad] == [True, True]
    jobs, bad = check_items(animatediff(), items_of("a cat"), {"num_frames": 1})
    assert len(jobs) == 1


def test_prompts_of_other_lengths_run_apart_where_a_batch_shares_its_columns(tmp_path):
    options = {"num_inference_steps": 1, "height": 64, "width": 64}
    prompts = ("a cat", "dog and a red cat", "a dog", "cat and a red dog")
    jobs, bad = check_items(qwen_image(), items_of(*prompts), options)
    assert bad == []
    assert [[one.item.line for one in batch] for batch in plan_batches(jobs, 4)] == [[1, 3], [2, 4]]

    model = tmp_path / "model"
    qwen_image().save_pretrained(model)
    outcome = draw(model, tmp_path / "run", prompts, batch_size=4, options=options)
    assert outcome.exit_code == 0
    pipe, drawn = load_pipeline(model, device="cpu"), open_batch(tmp_path / "run")
    for seed, one in enumerate(drawn.values()):
        alone = generate(pipe, one.info["prompt"], seed=seed, **options).heatmaps[0]
        assert one.heatmaps.prompt == alone.prompt
        torch.testing.assert_close(one.heatmaps.maps, alone.maps, atol=2e-3, rtol=0)


# Which model it is


def test_a_digest_sees_every_weight():
    pipe = make_pipeline()
    before, seen = digest_model(pipe), set[str]()
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    assert len(modules) == 3
    for part in modules:
        tensors = [one for one in part.state_dict().values() if one.is_floating_point()]
        for one in tensors[:: len(tensors) // 6]:
            bits = one.view(-1).view(torch.int32)
            bits[len(bits) // 2] ^= 1
            seen.add(digest_model(pipe))
            bits[len(bits) // 2] ^= 1
    assert len(seen) >= 18
    assert before not in seen
    assert digest_model(pipe) == before


@pytest.mark.parametrize("dim", [0, 1])
def test_a_digest_sees_weights_that_change_places(dim):
    pipe = make_pipeline()
    before = digest_model(pipe)
    weight = pipe.unet.get_submodule("mid_block.resnets.0.time_emb_proj").weight
    weight.data = weight.data.flip(dim)
    assert digest_model(pipe) != before


def other_activation():
    pipe = make_pipeline()
    assert pipe.text_encoder.config.hidden_act == "quick_gelu"
    pipe.text_encoder.config.hidden_act = "gelu"
    return pipe


def other_scheduler():
    config = make_pipeline().scheduler.config
    return make_pipeline(
        scheduler=DDIMScheduler.from_config(config, prediction_type="v_prediction")
    )


def other_scale():
    vae = make_vae()
    vae.register_to_config(scaling_factor=0.5)
    return make_pipeline(vae=vae)


CHANGES = {
    "a transformers model": other_activation,
    "the scheduler": other_scheduler,
    "the VAE": other_scale,
    "the UNet": lambda: make_pipeline(unet=make_unet(norm_eps=1e-3)),
    "the tokenizer": lambda: make_pipeline(tokenizer=tiny_tokenizer(merges=("d o", "do g</w>"))),
    "the pipeline": lambda: make_pipeline(StableDiffusionPAGPipeline, pag_applied_layers=["mid"]),
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_digest_sees_every_configuration(part):
    assert digest_model(CHANGES[part]()) != digest_model(make_pipeline())


def test_a_digest_sees_the_pipelines_own_configuration():
    pipe = make_sdxl_pipeline()
    before = digest_model(pipe)
    pipe.register_to_config(force_zeros_for_empty_prompt=False)  # of prompts that are empty
    assert digest_model(pipe) != before


def test_a_digest_is_the_same_wherever_a_model_lies(model, tmp_path):
    pipe = load_pipeline(model, device="cpu")
    digest = digest_model(pipe)
    pipe.save_pretrained(tmp_path / "copy")
    assert digest_model(load_pipeline(model, device="cpu")) == digest
    generate(pipe, ["a cat", "a dog"], **SMALL)
    assert digest_model(pipe) == digest  # tokenizers remember how they were used last
    assert digest_model(load_pipeline(tmp_path / "copy", device="cpu")) == digest
    half = [load_pipeline(model, device="cpu", dtype=torch.bfloat16) for _ in range(2)]
    assert digest_model(half[0]) == digest_model(half[1]) != digest
    turned = copy(pipe)
    parts = dict(reversed(pipe.components.items()))
    turned.__class__ = type(type(pipe).__name__, (type(pipe),), {"components": parts})
    assert [*turned.components] != [*pipe.components]
    assert digest_model(turned) == digest


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
    outcome = draw(model, out, VARIED, batch_size=1, save=USUAL)
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


def test_an_item_is_what_generate_makes_of_it(model, varied, tmp_path):
    pipe = load_pipeline(model, device="cpu")
    for line, row in enumerate(VARIED, 1):
        generated(pipe, row, line, SMALL).save(tmp_path / "alone" / row["id"])
        item = varied / "items" / "0000" / row["id"]
        assert same_run(item, tmp_path / "alone" / row["id"]), row["id"]
        info = json.loads((item / "run.json").read_bytes())
        assert (info["id"], info["line"]) == (row["id"], line)


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


def test_words_keep_their_columns_only(model, tmp_path):
    rows = [{"prompt": "cat, red cat and dog", "id": "all", "seed": 5}]
    rows.append({**rows[0], "id": "few", "words": ["red cat", "dog", "<sos>"]})
    draw(model, tmp_path / "run", rows, batch_size=1, save=USUAL)
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


@pytest.mark.parametrize("name", OTHERS)
def test_other_pipelines_run_alike(name, tmp_path):
    make, more = OTHERS[name]
    make().save_pretrained(tmp_path / "model")
    options = {"num_inference_steps": 1, "height": 64, "width": 64, **more}
    prompts = ("a cat", "red dog")
    outcome = draw(tmp_path / "model", tmp_path / "run", prompts, options=options)
    assert (outcome.whole, outcome.exit_code) == (2, 0)
    pipe = load_pipeline(tmp_path / "model", device="cpu")
    for seed, one in enumerate(open_batch(tmp_path / "run").values()):
        alone = generate(pipe, prompts[seed], seed=seed, **options)
        assert one.info["prompt"] == prompts[seed]
        assert one.info["options"] == alone.info[0]["options"]
        expected = alone.heatmaps[0].maps
        scale = float(expected.max())
        torch.testing.assert_close(one.heatmaps.maps, expected, atol=2e-3 * scale, rtol=0)
        pair = [np.asarray(each, int) for each in (one.image, alone.images[0])]
        assert np.abs(pair[0] - pair[1]).max() <= 2


def test_options_that_are_tuples_make_no_other_run(tmp_path):
    make_sdxl_pipeline().save_pretrained(tmp_path / "model")
    options = {"num_inference_steps": 1, "height": 64, "width": 64, "original_size": (64, 64)}
    for before in (0, 1):
        outcome = draw(tmp_path / "model", tmp_path / "run", ["a cat"], options=options)
        assert (outcome.before, outcome.whole) == (before, 1)


@pytest.mark.parametrize(
    ("name", "format"),
    [*((name, "folder") for name in [*PRESETS, "default, refined"]), ("daam, refined", "shard")],
)
def test_items_have_the_maps_of_their_preset(model, tmp_path, name, format):
    """Those of single runs, live and read back; ``verify`` knows their shapes."""
    preset = preset_of(name.split(",")[0], "self" if "refined" in name else None)
    outcome = draw(model, tmp_path / "run", ALL[:3], preset=preset, format=format)
    assert outcome.exit_code == 0
    assert verify(tmp_path / "run") == (3, [])
    pipe = load_pipeline(model, device="cpu")
    for i, (_, item) in enumerate(sorted(open_batch(tmp_path / "run").items())):
        [alone] = generate(pipe, ALL[i], seed=i, preset=preset, **SMALL).heatmaps
        assert item.heatmaps.preset == preset
        scale = float(alone.maps.max())
        torch.testing.assert_close(item.heatmaps.maps, alone.maps, atol=2e-3 * scale, rtol=0)


def test_another_preset_is_another_run(model, tmp_path):
    draw(model, tmp_path / "run", ALL[:2])
    with pytest.raises(ValueError, match="belongs to another run: .*preset"):
        draw(model, tmp_path / "run", ALL[:2], preset=PRESETS["p2p"])


def test_a_preset_that_the_model_cannot_have_is_refused_before_it_is_loaded(tmp_path):
    sd3().save_pretrained(tmp_path / "model")
    for preset in (PRESETS["daam"], preset_of("default", "self")):
        with pytest.raises((TypeError, ValueError), match="daam|way up"):
            draw(tmp_path / "model", tmp_path / "run", ["a cat"], preset=preset)
    assert not (tmp_path / "run").exists()


# Memory


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


def test_what_is_said_to_run_no_more_together_does_not(model, watched, tmp_path, capsys):
    watched.most = 2
    outcome = draw(model, tmp_path / "run", ALL, batch_size=8)
    assert (outcome.whole, outcome.failed) == (8, 0)
    assert watched.rows == [8, 4, 2, 2, 2, 2]
    assert capsys.readouterr().err.count("out of memory") == 2


def test_a_limit_is_that_of_its_shape(model, watched, tmp_path):
    watched.most = 2
    rows = [{"prompt": one, "width": width} for one in ALL[:4] for width in (64, 128)]
    assert draw(model, tmp_path / "run", rows, batch_size=4).whole == 8
    sides = [*zip(watched.rows, watched.pixels, strict=True)]
    small, large = 64 * 64, 64 * 128
    assert sides == [(4, small), (2, small), (2, small), (4, large), (2, large), (2, large)]


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


def test_a_run_stops_once_too_many_have_failed(model, watched, tmp_path):
    watched.forbidden = tiny_tokenizer().bos_token_id  # which all prompts have
    outcome = draw(model, tmp_path / "run", ALL[:5], batch_size=1, max_errors=3)
    assert (outcome.failed, outcome.exit_code) == (3, 1)
    assert outcome.stopped is not None and "--max-errors" in outcome.stopped
    watched.forbidden = None
    outcome = draw(model, tmp_path / "run", ALL[:5], batch_size=1, max_errors=3)
    assert (outcome.whole, outcome.failed, outcome.stopped) == (5, 0, None)


def test_what_failed_before_a_crash_is_not_counted_again(model, watched, tmp_path):
    watched.forbidden = tiny_tokenizer()("dog").input_ids[1]
    prompts = ("a cat", "a dog", "red", "dog", "a")
    out = tmp_path / "run"
    draw(model, out, prompts, batch_size=1)
    (out / "errors.jsonl").rename(out / ".batch" / "failed" / "crashed-0.jsonl")  # not gathered
    outcome = draw(model, out, prompts, batch_size=1, max_errors=3)
    assert (outcome.whole, outcome.failed, outcome.stopped) == (3, 2, None)
    assert [row["id"] for row in rows_of(out / "errors.jsonl")] == ["000002", "000004"]


# How many fit


def test_auto_finds_what_fits_and_a_run_keeps_to_it(model, watched, tmp_path, capsys):
    watched.most = 2
    out = tmp_path / "run"
    outcome = draw(model, out, ALL, batch_size="auto")
    assert (outcome.whole, outcome.failed) == (8, 0)
    size = json.loads((out / "batch.json").read_bytes())["batch_size"]
    assert size in (1, 2)
    err = capsys.readouterr().err
    assert f"{size} items to a batch" in err and "run 2 together" not in err
    assert sum(rows > 2 for rows in watched.rows) <= 1  # where it ended the search

    for item in ("000001", "000002"):
        shutil.rmtree(out / "items" / "0000" / item)
    watched.rows.clear()
    watched.most = 10**9  # there would be more room by now
    outcome = draw(model, out, ALL, batch_size="auto")
    assert (outcome.before, outcome.whole) == (6, 8)
    assert watched.rows == {1: [1, 1], 2: [2]}[size]
    assert "items to a batch" not in capsys.readouterr().err


def test_auto_looks_no_further_than_there_are_items(model, watched, tmp_path):
    assert draw(model, tmp_path / "run", ALL[:3], batch_size="auto").whole == 3
    assert max(watched.rows) <= 2  # the largest power of two
    assert json.loads((tmp_path / "run" / "batch.json").read_bytes())["batch_size"] in (1, 2)


def test_auto_tries_the_largest_picture_also_if_that_is_the_models_own(model, watched, tmp_path):
    rows = [{"prompt": "a cat", "width": 64, "height": 64}, "a dog"]
    options = {"num_inference_steps": 1, "guidance_scale": 1.0}
    assert draw(model, tmp_path / "run", rows, batch_size="auto", options=options).whole == 2
    drawn = watched.pixels[-2:]
    assert sorted(drawn) == [64 * 64, 128 * 128]
    assert set(watched.pixels[:-2]) == {128 * 128}


def test_auto_survives_an_item_that_cannot_be_drawn(model, tmp_path):
    rows = [{"prompt": "a cat", "eta": "much"}, "a dog", "red"]
    outcome = draw(model, tmp_path / "run", rows, batch_size="auto")
    assert (outcome.whole, outcome.failed) == (2, 1)
    [row] = rows_of(tmp_path / "run" / "errors.jsonl")
    assert row["id"] == "000001"


# The same run, and others


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


@pytest.mark.parametrize("other", OTHER_RUNS)
def test_the_folder_of_another_run_is_left_alone(model, drawn, other):
    before = kept_of(drawn)
    with pytest.raises(ValueError, match="belongs to another run: .*--force"):
        draw(model, drawn, ALL[:2], **OTHER_RUNS[other])
    assert kept_of(drawn) == before


def test_another_model_is_another_run(drawn, tmp_path):
    pipe = make_pipeline()
    pipe.unet.conv_in.bias.data[0] += 1
    pipe.save_pretrained(tmp_path / "model")
    before = kept_of(drawn)
    with pytest.raises(ValueError, match="the model's weights or configuration .* is now"):
        draw(tmp_path / "model", drawn, ALL[:2])
    assert kept_of(drawn) == before


def test_a_disk_is_no_place_for_two_formats(model, drawn):
    with pytest.raises(ValueError, match="'folder', which --force does not change"):
        draw(model, drawn, ALL[:2], format="shard", force=True)


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


def test_failures_of_another_input_are_not_this_ones(model, watched, tmp_path):
    watched.forbidden = tiny_tokenizer()("dog").input_ids[1]
    out = tmp_path / "run"
    rows = [{"prompt": "a cat", "id": "cat"}, {"prompt": "a dog", "id": "dog"}]
    assert draw(model, out, rows).failed == 1
    outcome = draw(model, out, rows[:1], force=True)
    assert (outcome.items, outcome.whole, outcome.failed, outcome.exit_code) == (1, 1, 0, 0)
    assert (out / "errors.jsonl").read_bytes() == b""


def test_parts_draw_each_item_once_whatever_their_batches(model, tmp_path):
    """Machines of other sizes find other batch sizes."""
    for which in (1, 2):
        draw(model, tmp_path / f"run-{which}", ALL[:6], part=(which, 2), batch_size=which)
    drawn = Counter(item for which in (1, 2) for item in open_batch(tmp_path / f"run-{which}"))
    assert drawn == Counter(f"{line:06d}" for line in range(1, 7))


def test_strict_stops_before_anything_is_written(model, tmp_path, capsys):
    rows = ["a cat", {"prompt": "a dog", "width": 65}]
    with pytest.raises(ValueError, match=r"1 line\(s\) of .* cannot be drawn, the first is line 2"):
        draw(model, tmp_path / "run", rows, strict=True)
    assert not (tmp_path / "run").exists()
    assert "sdattn: line 2: width=65" in capsys.readouterr().err
    outcome = draw(model, tmp_path / "run", rows)
    assert (outcome.items, outcome.whole, outcome.bad_lines, outcome.exit_code) == (1, 1, 1, 1)
    [row] = rows_of(tmp_path / "run" / "errors.jsonl")
    assert row["line"] == 2 and "width=65" in row["reason"] and "id" not in row


def test_an_input_without_an_item_is_told(model, tmp_path):
    with pytest.raises(ValueError, match="no line that can be drawn"):
        draw(model, tmp_path / "run", [{"prompt": "a dog", "width": 65}])


def test_a_model_may_be_a_path(model, tmp_path):
    (tmp_path / "in.txt").write_text("a cat\n")
    request = Request(tmp_path / "in.txt", tmp_path / "run", model, SMALL, device="cpu")
    assert run_batch(request).whole == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: pass a whole number from 1"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": "many"}, "batch_size='many'"),
        ({"format": "zip"}, "format='zip': pass 'folder' or 'shard'"),
        ({"save": ("image", "sound")}, r"save=\['sound'\]: choose of image, overlays"),
        ({"save": ()}, r"save=\[\]: choose of image, overlays"),
        ({"part": (0, 2)}, "part=0/2: pass 1/2 to 2/2"),
        ({"part": (3, 2)}, "part=3/2: pass 1/2 to 2/2"),
    ],
)
def test_what_cannot_be_asked_is_told_before_anything_is_read(tmp_path, asked, message):
    with pytest.raises(ValueError, match=message):
        run_batch(Request(tmp_path / "none.txt", tmp_path / "run", **asked))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("asked", [["--format", "zip"], ["--save", "image,"], ["--status", "run"]])
def test_what_cannot_be_asked_is_an_error_of_usage(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    source = [] if "--status" in asked else ["in.txt"]
    monkeypatch.setattr(sys, "argv", ["sdattn", "batch", *source, "--out", "run", *asked])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2


# A team of one


def test_a_process_alone_is_a_team():
    team = Team("cpu")
    assert (team.rank, team.size, team.first, team.first_here) == (0, 1, True, True)
    assert team.device == torch.device("cpu")
    value = object()
    assert team.share(lambda: value) is value
    assert team.together(lambda: value) is value
    assert team.gather(value) == [value]
    team.wait()
    for ask in (team.share, team.together):
        with pytest.raises(KeyError, match="boom"):
            ask(lambda: {}["boom"])
    team.close()


def test_a_team_of_one_raises_the_very_error():
    class OwnError(Exception):
        def __init__(self, code, more):
            super().__init__(f"{code} {more}")

    def fail():
        raise OwnError(7, "boom")

    with pytest.raises(OwnError, match="7 boom"):
        Team("cpu").share(fail)


def test_a_team_leaves_accelerate_as_it_found_it():
    PartialState._reset_state()
    Team("cpu").close()
    assert not PartialState._shared_state
    theirs = PartialState(cpu=True)
    Team("cpu").close()
    assert theirs.initialized
    theirs._reset_state()


def test_a_launcher_that_starts_one_process_only_is_told_about(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.warns(UserWarning, match="--cpu starts one process.*--multi_gpu"):
        Team().close()
