"""Loading, generating and saving with tiny pipelines of the real classes."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from conftest import make_pipeline, make_sdxl_pipeline
from safetensors.torch import save_file

import sdattn
from sdattn import TruncationWarning, capture, generate, heatmaps, load_pipeline, load_run
from sdattn.pipelines import best_device

PROMPT = "a red cat and a dog"
QUICK = {"num_inference_steps": 2, "height": 128, "width": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_pipeline().save_pretrained(path)
    return path


def test_a_folder_loads_as_the_pipeline_that_it_is(folder):
    pipe = load_pipeline(folder, device="cpu")
    assert type(pipe).__name__ == "StableDiffusionPipeline"
    assert pipe.unet.dtype == torch.float32
    expected = make_pipeline().unet.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in pipe.unet.state_dict().items())
    assert load_pipeline(folder, device="cpu", dtype=torch.bfloat16).unet.dtype == torch.bfloat16


def test_the_best_device_exists():
    assert torch.zeros(1, device=best_device()).item() == 0


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("./nowhere", FileNotFoundError, "There is no model at"),
        ("/a/b/c", FileNotFoundError, "There is no model at"),
        ("dmeo", FileNotFoundError, "Pass 'demo', a diffusers folder"),
        ("empty", ValueError, "without model_index.json"),
        ("pickle.ckpt", ValueError, "Pickled checkpoints are not read"),
        ("lora.safetensors", ValueError, "holds 1 tensors, but not the text encoder"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told(tmp_path, monkeypatch, model, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickle.ckpt").write_bytes(b"\x80\x02}q\x00.")
    save_file({"lora.up": torch.zeros(2)}, tmp_path / "lora.safetensors")
    with pytest.raises(error, match=message):
        load_pipeline(model)


def test_a_hub_that_cannot_be_reached_is_told(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="Could not load 'no-such-owner/no-such-model'"):
        load_pipeline("no-such-owner/no-such-model")


def test_generate_gives_the_plain_pictures_and_their_maps():
    pipe = make_pipeline()
    run = generate(pipe, PROMPT, seed=5, num_images_per_prompt=2, **QUICK)
    assert [info["seed"] for info in run.info] == [5, 6]
    for i in range(2):
        generator = torch.Generator().manual_seed(5 + i)
        with capture(pipe) as store:
            alone = pipe(PROMPT, generator=generator, **QUICK).images[0]
        [expected] = heatmaps(store, pipe.tokenizer, PROMPT)
        difference = np.abs(np.asarray(alone, float) - np.asarray(run.images[i], float))
        assert difference.max() <= 1  # another batch size may round otherwise
        torch.testing.assert_close(run.heatmaps[i].maps, expected.maps, atol=1e-5, rtol=0)


def test_one_seed_is_one_picture():
    pipe = make_pipeline()
    first, again, other = (generate(pipe, PROMPT, seed=s, **QUICK).images[0] for s in (1, 1, 2))
    assert first.tobytes() == again.tobytes() != other.tobytes()


@pytest.mark.parametrize("make", [make_pipeline, make_sdxl_pipeline])
@pytest.mark.parametrize("capture_options", [{}, {"steps": "all", "heads": [0, 1]}])
def test_a_saved_run_comes_back(make, capture_options, tmp_path):
    run = generate(make(), PROMPT, capture_options=capture_options, **QUICK)
    [path] = run.save(tmp_path / "run")
    back = load_run(path)
    assert back.image.tobytes() == run.images[0].tobytes()
    torch.testing.assert_close(back.heatmaps.maps, run.heatmaps[0].maps, atol=1e-4, rtol=1e-3)
    assert back.info["timesteps"] == run.store.timesteps
    assert back.info["options"] == QUICK


def test_several_images_have_a_folder_each(tmp_path):
    run = generate(make_pipeline(), ["a cat", "a red dog"], **QUICK)
    paths = run.save(tmp_path / "run")
    assert [path.name for path in paths] == ["run-0", "run-1"]
    assert [load_run(path).info["prompt"] for path in paths] == ["a cat", "a red dog"]


def test_chosen_words_only(tmp_path):
    pipe = make_pipeline()
    some = generate(pipe, PROMPT, words=["red cat"], **QUICK)
    every = generate(pipe, PROMPT, **QUICK)
    assert some.heatmaps[0].words == ("red", "cat")
    assert some.images[0].tobytes() == every.images[0].tobytes()
    torch.testing.assert_close(
        some.heatmaps[0]["red cat"].values, every.heatmaps[0]["red cat"].values
    )
    assert some.store.nbytes * 77 == every.store.nbytes * 2
    back = load_run(some.save(tmp_path / "run")[0])
    assert back.heatmaps.words == ("red", "cat")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_inference_steps": 0}, "pass 1 to 1000"),
        ({"num_inference_steps": -3}, "pass 1 to 1000"),
        ({"num_inference_steps": 1001}, "pass 1 to 1000"),
        ({"height": 100}, "multiple of 8 pixels. The nearest are 96 and 104"),
        ({"width": 0}, "multiple of 8"),
        ({"width": -8}, "multiple of 8"),
        ({"prompt": ""}, "is empty"),
        ({"prompt": ["a cat", " "]}, "is empty"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_the_model_runs(options, message):
    pipe = make_pipeline()
    ran = []
    pipe.unet.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=message):
        generate(pipe, **{"prompt": PROMPT, **options})
    assert not ran


@pytest.mark.parametrize("make", [make_pipeline, make_sdxl_pipeline])
def test_a_lone_side_counts(make):
    pipe = make()
    default = pipe.unet.config.sample_size * pipe.vae_scale_factor
    run = generate(pipe, PROMPT, width=96, num_inference_steps=1)
    assert run.images[0].size == (96, default)


def test_a_word_that_is_not_in_the_prompt_is_refused():
    with pytest.raises(KeyError, match="'cow' is not in the prompt. Its words are: a, red, cat"):
        generate(make_pipeline(), PROMPT, words=["cow"], **QUICK)


def test_words_that_were_cut_off_are_told_once():
    pipe = make_pipeline(max_length=5)
    with pytest.warns(TruncationWarning, match="never saw: and, a, dog") as warned:
        generate(pipe, PROMPT, **QUICK)
    assert len(warned) == 1


@pytest.mark.parametrize("prompt", ["😀 cat", "红色的猫", 'a "cat"/dog\\', "cat " * 500, "<b>"])
def test_odd_prompts_work(prompt, tmp_path):
    pipe = make_pipeline()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        run = generate(pipe, prompt, **QUICK)
    assert load_run(run.save(tmp_path / "run")[0]).info["prompt"] == prompt


def test_the_import_is_light():
    code = (
        "import sys, sdattn; "
        "print([m for m in ('diffusers', 'transformers', 'matplotlib', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert sdattn.__version__
