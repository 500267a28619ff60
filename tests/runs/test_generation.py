"""generate() with tiny pipelines of the real classes."""

import warnings

import numpy as np
import pytest
import torch
from helpers.refusals import refused_unrun
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_sdxl_pipeline, small_pipeline

from sdattn import NotFiniteError, TruncationWarning, capture, generate, heatmaps, load_run
from sdattn.runs import preparing
from sdattn.runs.preparing import prepare, watch

PROMPT = "a red cat and a dog"
QUICK = {"num_inference_steps": 2, "height": 128, "width": 128}


@pytest.mark.slow
def test_generate_gives_the_plain_images_and_their_maps():
    pipe = small_pipeline()
    run = generate(pipe, PROMPT, seed=5, num_images_per_prompt=2, **QUICK)
    assert [info["seed"] for info in run.info] == [5, 6]
    for i in range(2):
        generator = torch.Generator().manual_seed(5 + i)
        with capture(pipe, steps=(0.5, 1.0)) as store:
            alone = pipe(PROMPT, generator=generator, **QUICK).images[0]
        [expected] = heatmaps(store, pipe.tokenizer, PROMPT)
        difference = np.abs(np.asarray(alone, float) - np.asarray(run.images[i], float))
        assert difference.max() <= 1  # another batch size may round otherwise
        torch.testing.assert_close(run.heatmaps[i].maps, expected.maps, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_images_of_several_prompts_know_theirs():
    prompts = ["a red cat", "a dog"]
    size = {**QUICK, "num_inference_steps": 1, "negative_prompt": ["x", "y"]}
    run = generate(small_pipeline(), prompts, seed=5, num_images_per_prompt=2, **size)
    told = [(one["prompt"], one["seed"], one["options"]["negative_prompt"]) for one in run.info]
    assert told == [(prompts[i // 2], 5 + i, "xxyy"[i]) for i in range(4)]
    assert [found.prompt.text for found in run.heatmaps] == [prompts[i // 2] for i in range(4)]


def test_one_seed_is_one_image():
    pipe = small_pipeline()
    first, again, other = (generate(pipe, PROMPT, seed=s, **QUICK).images[0] for s in (1, 1, 2))
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_chosen_words_only(tmp_path):
    pipe = small_pipeline()
    some = generate(pipe, PROMPT, words=["red cat"], **QUICK)
    every = generate(pipe, PROMPT, **QUICK)
    assert some.heatmaps[0].words == ("red", "cat")
    assert some.images[0].tobytes() == every.images[0].tobytes()
    torch.testing.assert_close(
        some.heatmaps[0]["red cat"].values, every.heatmaps[0]["red cat"].values
    )
    assert some.store.nbytes * 77 == every.store.nbytes * 2
    back = load_run(some.save(tmp_path / "run")[0])
    assert back.heatmaps.words == ("red", "cat") and back.info["columns"] == [2, 3]
    with pytest.raises(KeyError, match="were not captured"):
        back.heatmaps["dog"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_inference_steps": 0}, "pass 1 to 1000"),
        ({"num_inference_steps": -3}, "pass 1 to 1000"),
        ({"num_inference_steps": 1001}, "pass 1 to 1000"),
        ({"height": 100}, "multiple of 8.*96 and 104"),
        ({"width": 0}, "multiple of 8"),
        ({"width": -8}, "multiple of 8"),
        ({"prompt": ""}, "is empty"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan.*finite"),
        ({"output_type": "np"}, "output_type"),
        ({"capture_options": {"branch": "both"}}, "negative prompt"),
        ({"capture_options": {"branch": "both"}, "negative_prompt": " "}, "prompt .* is empty"),
        ({"capture_options": {"branch": "unconditional"}}, "words of the prompt"),
        ({"capture_options": {"kinds": ("self",)}}, "words of the prompt"),
        ({"prompt": ["a cat", " "]}, "is empty"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_the_model_runs(options, message):
    pipe = small_pipeline()
    with refused_unrun(pipe, message):
        generate(pipe, **{"prompt": PROMPT, **options})


@pytest.mark.parametrize("make", [small_pipeline, make_sdxl_pipeline])
def test_a_lone_side_counts(make):
    pipe = make()
    default = pipe.unet.config.sample_size * pipe.vae_scale_factor
    run = generate(pipe, PROMPT, width=96, num_inference_steps=1)
    assert run.images[0].size == (96, default)


@pytest.mark.parametrize("make", [small_pipeline, make_sdxl_pipeline])
def test_a_negative_prompt_is_that_of_every_prompt(make):
    pipe = make()
    prompts = ["a cat", "a red dog"]
    found = generate(pipe, prompts, negative_prompt="dog", **QUICK).images
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    expected = pipe(prompts, negative_prompt=["dog", "dog"], generator=generators, **QUICK).images
    assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]


def test_a_word_that_is_not_in_the_prompt_is_refused():
    with pytest.raises(KeyError, match="'cow'.*prompt.*a, red, cat"):
        generate(small_pipeline(), PROMPT, words=["cow"], **QUICK)


def test_maps_that_are_not_finite_are_named_by_their_text(monkeypatch):
    states = torch.full((1, 77, 32), torch.nan)
    monkeypatch.setattr("sdattn.runs.preparing.encode_text", lambda *_: states)
    with pytest.raises(NotFiniteError, match="maps of ask"):
        generate(small_pipeline(), PROMPT, ask="dog", **QUICK)


def test_words_that_were_cut_off_are_told_once():
    pipe = small_pipeline(max_length=5)
    with pytest.warns(TruncationWarning, match="never saw: and, a, dog") as warned:
        generate(pipe, PROMPT, **QUICK)
    assert len(warned) == 1


@pytest.mark.parametrize(
    "prompt", tiered(["😀 cat", "红色的猫", 'a "cat"/dog\\', "cat " * 500, "<b>"], quick=2)
)
def test_odd_prompts_work(prompt, tmp_path):
    pipe = small_pipeline()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        run = generate(pipe, prompt, **QUICK)
    assert load_run(run.save(tmp_path / "run")[0]).info["prompt"] == prompt


def test_negative_prompts_are_watched_image_by_image():
    """Each prompt's images follow each other; the softmax is over <sos>, its words and <eos>."""
    order = prepare(
        small_pipeline(),
        ["a cat", "a dog"],
        {"negative_prompt": ["dog", "a red cat"], "num_images_per_prompt": 2, **QUICK},
        preset="ovam",
        capture_options={"branch": "both"},
    )
    first, second = [0, 1, 2], [0, 1, 2, 3, 4]
    assert list(watch(order)["negative"].among) == [first, first, second, second]


def test_a_small_run_keeps_its_steps_and_a_larger_one_their_mean(monkeypatch):
    pipe = small_pipeline()
    small = generate(pipe, PROMPT, **QUICK)
    asked = generate(pipe, PROMPT, capture_options={"steps": "all"}, **QUICK)
    mean = generate(pipe, PROMPT, capture_options={"steps": (0.5, 1.0)}, **QUICK)
    assert small[0].details.calls == asked[0].details.calls == (0, 1)
    assert mean[0].details.steps is None
    for name, layer in small[0].details.steps.layers.items():
        assert torch.equal(layer.maps, asked[0].details.steps.layers[name].maps)
    torch.testing.assert_close(small.heatmaps[0].maps, mean.heatmaps[0].maps, atol=1e-6, rtol=0)
    held = sum(maps.nbytes for maps in small.store.maps.values())
    for most, limit, keeps in (
        (held, None, True),
        (held - 1, None, False),
        (held, held - 1, False),
    ):
        monkeypatch.setattr(preparing, "SMALL", most)
        run = generate(pipe, PROMPT, max_bytes=limit, **QUICK)
        assert (run[0].details.steps is not None) == keeps


def test_a_run_walks_through_its_model_once(monkeypatch):
    """More often than the pipeline's own call, and than diffusers' answer to one question for the
    device."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else its weights are counted
    pipe = small_pipeline()
    names = torch.nn.Module.named_modules
    walks = []

    def walk(module, memo=None, *args, **kwargs):
        found = names(module, memo, *args, **kwargs)
        if module is not pipe.unet or memo is not None:
            return found
        found = list(found)
        walks.append(len(found))
        return iter(found)

    def walks_of(call):
        walks.clear()
        call()
        return len(walks)

    monkeypatch.setattr(torch.nn.Module, "named_modules", walk)
    plain = walks_of(lambda: pipe(PROMPT, **QUICK))
    device = walks_of(lambda: pipe._execution_device)
    for options in ({}, {"refine": "self", "spots": True}):
        run = walks_of(lambda options=options: generate(pipe, PROMPT, **options, **QUICK))
        assert run == plain + device + 1
