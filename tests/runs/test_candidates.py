"""generate(candidates=): the seed is chosen by the maps of the first steps."""

import json

import numpy as np
import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, HeunDiscreteScheduler
from diffusers.models.attention_processor import AttnProcessor2_0
from helpers.refusals import refused_unrun
from helpers.tiers import tiered
from helpers.tiny_pipelines import small_pipeline

from sdattn import generate, load_run
from sdattn.follow.first_calls import FirstCalls
from sdattn.maps.arrival import WEAK
from sdattn.models.denoiser import find_denoiser
from sdattn.runs.candidates import early_heatmaps
from sdattn.runs.imagerun import step_heatmaps
from sdattn.runs.preparing import prepare

PROMPT = "a red cat and a dog"
TEN = {"num_inference_steps": 10, "height": 64, "width": 64}


@pytest.fixture(scope="module")
def pipe():
    return small_pipeline()


@pytest.fixture
def calls(pipe):
    """The calls so far for which the model ran, in a list."""
    seen = []
    forward = pipe.unet.forward

    def counted(*args, **kwargs):
        seen.append(1)
        return forward(*args, **kwargs)

    vars(pipe.unet)["forward"] = counted
    yield seen
    del vars(pipe.unet)["forward"]


def score_at(pipe, seed, step):
    """The score of one step of a whole run."""
    run = generate(pipe, PROMPT, seed=seed, capture_options={"steps": "all"}, **TEN)
    return step_heatmaps(run[0])[step].score()


def test_the_best_seed_goes_on_as_if_it_were_alone(pipe, calls, tmp_path):
    run = generate(pipe, PROMPT, seed=4, candidates=3, **TEN)
    assert len(calls) == 3 * 4 + 6  # four of the ten steps each, and the others of the best
    scores = {seed: score_at(pipe, seed, 3) for seed in (4, 5, 6)}
    found = {one.seed: one.score for one in run.candidates}
    assert found == pytest.approx(scores, abs=1e-5)
    best = max(scores, key=scores.get)
    assert run.seeds == [best] and [one.seed for one in run.candidates] == sorted(
        scores, key=scores.get, reverse=True
    )
    alone = generate(pipe, PROMPT, seed=best, **TEN)
    assert run.image.tobytes() == alone.image.tobytes()
    assert torch.equal(run.heatmaps[0].maps, alone.heatmaps[0].maps)
    assert alone.candidates == () and "candidates" not in alone.info[0]
    assert run[0].settings.stopped is None
    [folder] = run.save(tmp_path / "run")
    back = load_run(folder)
    assert back.settings.candidates == run.candidates and back.settings.decide_at == 0.4


def drawn_alike(pipe, count, calls=None, options=TEN, **more):
    """Check the image and maps of the chosen seed against a run of its own, and that the model ran
    ``count`` times."""
    before = len(calls) if calls is not None else 0
    run = generate(pipe, PROMPT, candidates=3, **options, **more)
    if calls is not None:
        assert len(calls) - before == count
    alone = generate(pipe, PROMPT, seed=run.seeds[0], **options)
    assert run.image.tobytes() == alone.image.tobytes()
    assert torch.equal(run.heatmaps[0].maps, alone.heatmaps[0].maps)
    return run


@pytest.mark.parametrize("steps", ["all", (0.2, 1.0)])
def test_a_run_that_keeps_first_steps_is_drawn_from_its_first(pipe, calls, steps):
    kept = {"capture_options": {"steps": steps}}
    run = generate(pipe, PROMPT, candidates=2, **kept, **TEN)
    assert len(calls) == 2 * 4 + 10
    alone = generate(pipe, PROMPT, seed=run.seeds[0], **kept, **TEN)
    assert torch.equal(run.heatmaps[0].maps, alone.heatmaps[0].maps)


def test_candidates_in_one_batch(pipe, calls):
    run = drawn_alike(pipe, 4 + 10, calls, at_once=True)
    found = {one.seed: one.score for one in run.candidates}
    scores = {seed: score_at(pipe, seed, 3) for seed in (0, 1, 2)}
    assert found == pytest.approx(scores, abs=1e-4) and len(set(found.values())) == 3


class Remembering(AttnProcessor2_0):
    """A processor that acts from its fifth call on, as editing code that counts its calls."""

    seen = 0

    def __call__(self, *args, **kwargs):
        self.seen += 1
        return super().__call__(*args, **kwargs) * (self.seen <= 4)


@pytest.mark.parametrize("habit", ["processor", "hook", "forward", "training"])
def test_what_may_count_the_calls_gets_them_all(pipe, calls, habit):
    layer = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2
    seen = []
    before = layer.processor
    handle = None
    try:
        if habit == "processor":
            layer.set_processor(Remembering())
        elif habit == "hook":
            handle = layer.register_forward_hook(lambda *_: seen.append(1))
        elif habit == "forward":
            layer.forward = layer.forward
        else:
            pipe.unet.train()
        generate(pipe, PROMPT, candidates=3, **TEN)
    finally:
        layer.set_processor(before)
        vars(layer).pop("forward", None)
        pipe.unet.eval()
        if handle:
            handle.remove()
    assert len(calls) == 3 * 4 + 10
    assert len(seen) == len(calls) * (habit == "hook")


def test_a_run_that_begins_otherwise_runs_its_model(pipe, calls):
    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return pipe(PROMPT, generator=generator, output_type="np", **TEN).images

    first = FirstCalls(find_denoiser(pipe))
    with first.recorded():
        drawn(1)
    with first.given_back():
        again = drawn(1)
    assert len(calls) == 10
    with first.given_back():
        other = drawn(2)
    assert len(calls) == 20
    with first.given_back():
        layer = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2
        hook = layer.register_forward_hook(lambda *_: None)  # what came in the meantime
        drawn(1)
        hook.remove()
    assert len(calls) == 30
    with first.given_back():
        activation = pipe.unet.conv_act
        pipe.unet.conv_act = torch.nn.Sequential(activation)  # a module that was not there before
        pipe.unet.conv_act.register_forward_hook(lambda *_: None)
        drawn(1)
        pipe.unet.conv_act = activation
    assert len(calls) == 40
    assert np.array_equal(again, drawn(1)) and np.array_equal(other, drawn(2))


@pytest.mark.parametrize(
    ("scheduler", "passes"),
    [(HeunDiscreteScheduler, (8, 19)), (EulerAncestralDiscreteScheduler, (4, 10))],
)
def test_schedulers_of_other_habits(pipe, calls, scheduler, passes):
    early, whole = passes
    before, pipe.scheduler = pipe.scheduler, scheduler.from_config(pipe.scheduler.config)
    try:
        drawn_alike(pipe, 3 * early + whole - early, calls)
    finally:
        pipe.scheduler = before


@pytest.mark.parametrize("make", tiered(["FluxPipeline", "StableDiffusion3Pipeline"]))
def test_joint_attention(make):
    joint = small_pipeline(make)
    ran = []
    first = joint.transformer.transformer_blocks[0].norm1
    first.register_forward_hook(lambda *_: ran.append(1))
    drawn_alike(joint, 0)
    expected = len(ran)
    assert expected == 3 * 4 + 10 + 10  # a foreign hook: drawn from its first step
    first._forward_hooks.clear()
    drawn_alike(joint, 0)


def test_all_can_be_drawn_whole_and_ranked(pipe, calls):
    run = generate(pipe, PROMPT, seed=[9, 2], candidates=2, decide_at=1.0, **TEN)
    assert len(calls) == 20
    both = {seed: generate(pipe, PROMPT, seed=seed, **TEN) for seed in (9, 2)}
    scores = {seed: one.heatmaps[0].score() for seed, one in both.items()}
    assert {one.seed: one.score for one in run.candidates} == scores
    [seed] = run.seeds
    assert scores[seed] == max(scores.values()) == run.candidates[0].score
    assert run.image.tobytes() == both[seed].image.tobytes()


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("StableDiffusionPipeline", {"num_inference_steps": 1}),
        ("StableDiffusionSAGPipeline", {"num_inference_steps": 3, "sag_scale": 0.0}),
    ],
)
def test_what_cannot_be_stopped_is_drawn_whole(kind, more):
    """A run of one step has none before the decision; old pipelines have no callback."""
    options = {**TEN, **more}
    pipe = small_pipeline(kind)
    run = generate(pipe, PROMPT, seed=[9, 2, 5], candidates=3, **options)
    assert run.image_runs[0].settings.decide_at == 1.0
    whole = {seed: generate(pipe, PROMPT, seed=seed, **options) for seed in (9, 2, 5)}
    scores = {seed: one.heatmaps[0].score() for seed, one in whole.items()}
    assert {one.seed: one.score for one in run.candidates} == scores
    [best] = run.seeds
    assert run.image.tobytes() == whole[best].image.tobytes()
    with refused_unrun(pipe, "at_once=True.*all are drawn whole"):
        generate(pipe, PROMPT, candidates=2, at_once=True, **options)


def test_words_that_are_kept_are_those_that_choose(pipe):
    run = generate(pipe, PROMPT, words=["red"], candidates=2, **TEN)
    whole = generate(pipe, PROMPT, seed=0, capture_options={"steps": [3]}, **TEN)
    found = {one.seed: one.score for one in run.candidates}
    assert found[0] == pytest.approx(whole.heatmaps[0].score(["red"]), abs=1e-6)


def test_a_callback_of_the_users_acts_in_every_candidate(pipe, calls):
    seen = []

    def double(pipe, step, timestep, given):
        seen.append(step)
        return {"latents": given["latents"] * 1.5} if step == 0 else {}

    options = {**TEN, "callback_on_step_end": double}
    run = generate(pipe, PROMPT, seed=1, candidates=2, **options)
    assert seen == [*range(4), *range(4), *range(10)]
    assert len(calls) == 2 * 4 + 10  # it might have stopped the run
    alone = generate(pipe, PROMPT, seed=run.seeds[0], **options)
    plain = generate(pipe, PROMPT, seed=run.seeds[0], **TEN)
    assert run.image.tobytes() == alone.image.tobytes() != plain.image.tobytes()
    scores = {one.seed: one.score for one in run.candidates}
    unmoved = generate(pipe, PROMPT, seed=1, candidates=2, **TEN).candidates
    assert scores != {one.seed: one.score for one in unmoved}


def test_causal_maps_are_of_the_chosen_seed(pipe):
    run = generate(pipe, PROMPT, words=["cat"], seed=[5, 4], candidates=2, causal=True, **TEN)
    alone = generate(pipe, PROMPT, words=["cat"], seed=run.seeds[0], causal=True, **TEN)
    assert run.seeds == [4], "not the first one, which would be taken without a choice"
    assert torch.equal(run.causal_heatmaps[0][0].values, alone.causal_heatmaps[0][0].values)


def test_early_maps_are_those_of_the_first_steps_whatever_the_run_keeps(pipe):
    keep = {"steps": "all", "heads": "all"}
    order = prepare(pipe, PROMPT, TEN, capture_options=keep, ask="wheel", spots=True)
    [found] = early_heatmaps(order, 0.5)
    expected = generate(pipe, PROMPT, capture_options={"steps": [4]}, **TEN)
    torch.testing.assert_close(found.maps, expected.heatmaps[0].maps, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": 0}, "candidates=0`: pass a whole number from 1"),
        ({"candidates": 2.5}, "candidates=2.5"),
        ({"candidates": 2, "decide_at": 1.5}, "decide_at=1.5`: pass a number from 0 to 1"),
        ({"candidates": 2, "decide_at": 0}, "decide_at=0"),
        (
            {"candidates": 2, "decide_at": 0.04},
            "decide_at=0.04.*10 has its middle.*Pass 0.05 or more",
        ),
        ({"candidates": 2, "num_images_per_prompt": 2}, "one image of one prompt"),
        ({"candidates": 2, "prompt": ["a cat", "a dog"]}, "one image of one prompt"),
        ({"candidates": 3, "seed": [1, 2]}, "makes 3 image"),
        ({"candidates": 3, "at_once": True, "decide_at": 1.0}, "at_once=True.*before `decide_at`"),
        ({"candidates": 2, "latents": torch.zeros(1, 4, 8, 8)}, "`latents` sets it"),
    ],
)
def test_what_cannot_be_chosen_is_refused_before_the_model_runs(pipe, options, message):
    with refused_unrun(pipe, message):
        generate(pipe, **{"prompt": PROMPT, **TEN, **options})


def test_the_record_says_what_did_not_arrive(pipe, tmp_path):
    run = generate(pipe, PROMPT, **TEN)
    [folder] = run.save(tmp_path / "run")
    document = json.loads((folder / "run.json").read_text())
    back = load_run(folder)
    assert document["score"] == pytest.approx(back.heatmaps.score(), rel=1e-5)
    assert document["score"] == pytest.approx(run.heatmaps[0].score(), abs=1e-3)
    assert document["missing"] == [one.to_json() for one in back.missing()]
    assert back.settings.missing == tuple(back.missing())
    cat, dog = (np.asarray(back.heatmaps[word]) for word in ("cat", "dog"))
    found = {"cat": cat.max() / dog.flat[cat.argmax()], "dog": dog.max() / cat.flat[dog.argmax()]}
    low = sorted((word for word in found if found[word] < WEAK), key=found.get)
    assert low and [one["word"] for one in document["missing"]] == low
