"""`sdattn generate`: what it prints, writes and returns."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.command_lines import generate
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import flux

from sdattn import load_run

PROMPT = "a red cat and a dog"


@pytest.mark.slow
def test_generate_writes_the_run_and_tells_the_words(invoke, model):
    code, out, err = generate(invoke, model, "--seed", "4", "--width", "192")
    assert code == 0
    assert "StableDiffusionPipeline" in err
    assert "cpu in float32" in err
    assert "drawing: " in err
    folder = "outputs/a-red-cat-and-a-dog-4"
    rows = [line.split() for line in out.splitlines()]
    assert ["open", f"{folder}/report.html"] in rows
    assert "\x1b" not in out  # no colours where no terminal is
    for word in ("red", "cat", "dog", "lowest", "highest"):
        assert word in out
    run = load_run(folder)
    assert run.image.size == (192, 128)
    assert run.info["seed"] == 4
    assert run.info["options"]["num_inference_steps"] == 2
    assert len(os.listdir(f"{folder}/heatmaps")) == 6
    low, high = run.heatmaps["cat"].range
    assert 0 < low < high < 1


@pytest.mark.slow
def test_a_transformer_draws_with_options_of_its_own(invoke, tmp_path):
    flux().save_pretrained(tmp_path / "flux")
    arguments = ("generate", "a red cat", "--model", str(tmp_path / "flux"), "--steps", "1")
    arguments += ("--width", "192", "--height", "128", "--out", "run")
    code, _, err = invoke(*arguments, "--negative", "dog")
    assert code == 2
    assert "negative prompt" in err and "`true_cfg_scale` above 1" in err
    settings = ("--set", "true_cfg_scale=2.5", "--set", "max_sequence_length=16")
    assert invoke(*arguments, "--negative", "dog", *settings)[0] == 0
    run = load_run("run")
    assert run.info["options"]["true_cfg_scale"] == 2.5
    assert run.heatmaps["cat"].values.shape == (8, 12)
    assert len(run.heatmaps.columns) == 4  # without padding
    assert invoke(*arguments, "--set", "steps")[0] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_warnings_of_cut_words_reach_the_user(invoke, tmp_path):
    make_pipeline(max_length=5).save_pretrained(tmp_path / "short")
    code, _, err = generate(invoke, str(tmp_path / "short"))
    assert code == 0
    assert "never saw: and, a, dog" in err


@pytest.mark.slow
def test_a_size_far_from_the_models_own_is_told_once(invoke):
    how = ("--steps", 1, "--seed", 0, "-o", "drawn")
    code, _, err = invoke("generate", "a cat", "--width", 320, "--height", 128, *how)
    assert code == 0 and err.count("warning: ") == 1
    assert "was trained at 128x128 pixels" in err and "320x128 is over twice that" in err


def test_ctrl_c_leaves_no_half_folder(model, tmp_path):
    command = [sys.executable, "-m", "sdattn", "generate", PROMPT, "--model", model]
    process = subprocess.Popen(
        [*command, "--steps", "900", "--device", "cpu", "--out", "runs/one"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # whoever runs the tests in the background may have had it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stderr:
        if "cpu in float32" in line:
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.slow
def test_maps_beyond_max_memory_are_refused_in_the_words_that_are_typed(invoke, whole_model):
    code, _, err = generate(invoke, whole_model, "--keep", "steps,heads", "--max-memory", "1 MB")
    assert code == 2
    message = err.splitlines()[-1]
    assert "--max-memory 1000000: " in message and "would hold up to 2.6 MB" in message
    assert "`" not in message
    assert not os.listdir("outputs")
    assert generate(invoke, whole_model, "--max-memory", "1mb")[0] == 0


@pytest.mark.parametrize("each", ["num_images_per_prompt", "num_videos_per_prompt"])
def test_folders_that_cannot_be_written_are_refused_before_the_model_is_loaded(
    invoke, model, monkeypatch, each
):
    monkeypatch.setattr("sdattn.cli.options.load", lambda *_: pytest.fail("loaded"))
    os.makedirs("run-1")
    with open("run-1/thesis.txt", "w", encoding="utf-8") as file:
        file.write("mine")
    asked = ("--set", f"{each}=2", "--out", "run", "--model", model)
    code, _, err = invoke("generate", "a cat", *asked)
    assert code == 2 and "run-1 exists already. Choose another --out" in err


def test_a_misspelt_argument_of_the_pipeline_is_told_before_the_load(invoke, model, monkeypatch):
    monkeypatch.setattr("sdattn.cli.options.load", lambda *_: pytest.fail("loaded"))
    code, _, err = invoke("generate", "a cat", "--model", model, "--set", "guidance_rscale=0.1")
    assert code == 2 and "Did you mean 'guidance_rescale'?" in err


def test_the_chosen_seed_and_words_that_did_not_arrive_are_told(invoke, model, monkeypatch):
    monkeypatch.setattr("sdattn.maps.arrival.WEAK", 1e9)  # all words are weak
    code, out, _ = generate(invoke, model, "--candidates", "2", "--seed", "4", "--out", "run")
    assert code == 0
    run = load_run("run")
    best, other = run.settings.candidates
    assert {best.seed, other.seed} == {4, 5} and best.score >= other.score
    assert run.info["seed"] == best.seed
    lines = out.splitlines()
    told = [line for line in lines if line.startswith("candidate: ")]
    assert told == [f"candidate: seed {one.seed}, score {one.score:.3f}" for one in (best, other)]
    for word in run.missing():
        assert any(line.startswith(f"weak: '{word.word}', its peak is ") for line in lines)
    assert len(run.missing()) == 2


def test_candidates_are_counted_from_1(invoke, model):
    assert generate(invoke, model, "--candidates", "0")[0] == 2
    code, _, err = generate(invoke, model, "--decide-at", "1.5")
    assert code == 2 and "less than or equal to 1" in err and "--decide-at" in err
