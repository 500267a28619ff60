"""Items against the pipeline that will draw them: what cannot be, and what runs together."""

import json
import random
from collections import Counter
from copy import copy

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPAGPipeline
from helpers.batch_draws import SMALL, draw
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline, make_unet, make_vae
from helpers.tiny_tokenizers import tiny_tokenizer
from helpers.transformer_rows import qwen_image
from helpers.unet_rows import animatediff

from sdattn import generate, load_pipeline
from sdattn.batch import open_batch
from sdattn.batch.input.items import Item, read_items
from sdattn.batch.input.plan import Job, check_items, digest_model, plan_batches


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
    from sdattn.batch.input import plan

    checked = []
    real = plan.checked_options
    monkeypatch.setattr(
        plan, "checked_options", lambda *args, **how: checked.append(args[1]) or real(*args, **how)
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
        ({"width": 65}, "width=65`"),
        ({"guidance_scal": 3}, "no option 'guidance_scal'. Did you mean 'guidance_scale'?"),
        ({"num_inference_steps": 1001}, "pass 1 to 1000, the scheduler's most"),
        ({"negative_prompt": "dog", "guidance_scale": 1}, "`guidance_scale` above 1"),
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


def test_a_video_is_one_of_an_item():
    jobs, bad = check_items(animatediff(), items_of("a cat", "a dog"), {"num_frames": 2})
    assert (len(jobs), bad) == (2, [])
    jobs, bad = check_items(animatediff(), items_of("a cat"), {"num_videos_per_prompt": 2})
    assert jobs == []
    assert "makes 2 per item" in bad[0].reason


@pytest.mark.slow
def test_prompts_of_other_lengths_run_apart_where_a_batch_shares_its_columns(tmp_path):
    options = {"num_inference_steps": 1, "height": 64, "width": 64}
    prompts = ("a cat", "dog and a red cat", "a dog", "cat and a red dog")
    jobs, bad = check_items(qwen_image(), items_of(*prompts), options)
    assert bad == []
    assert [[one.item.line for one in batch] for batch in plan_batches(jobs, 4)] == [[1, 3], [2, 4]]

    model = tmp_path / "model"
    qwen_image().save_pretrained(model)
    way = {"options": options, "preset": "columns"}  # sharpening would magnify the rounding
    outcome = draw(model, tmp_path / "run", prompts, batch_size=4, **way)
    assert outcome.exit_code == 0
    pipe, drawn = load_pipeline(model, device="cpu"), open_batch(tmp_path / "run")
    for seed, one in enumerate(drawn.values()):
        alone = generate(pipe, one.info["prompt"], seed=seed, preset="columns", **options)
        alone = alone.heatmaps[0]
        assert one.heatmaps.prompt == alone.prompt
        torch.testing.assert_close(one.heatmaps.maps, alone.maps, atol=2e-3, rtol=0)


# Which model it is


@pytest.mark.weekly
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


@pytest.mark.parametrize("part", tiered(CHANGES, 2))
@pytest.mark.slow
def test_a_digest_sees_every_configuration(part):
    assert digest_model(CHANGES[part]()) != digest_model(make_pipeline())


def test_a_digest_sees_the_pipelines_own_configuration():
    pipe = make_sdxl_pipeline()
    before = digest_model(pipe)
    pipe.register_to_config(force_zeros_for_empty_prompt=False)  # of prompts that are empty
    assert digest_model(pipe) != before


@pytest.mark.weekly
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
