"""The command line as a person uses it: what it prints, writes and returns."""

import os
import signal
import subprocess
import sys
import time

import pytest
from diffusers import UNetMotionModel
from PIL import Image
from tiny_pipelines import make_pipeline
from transformer_rows import flux
from unet_rows import animatediff

from sdattn import load_run

PROMPT = "a red cat and a dog"


def generate(sdattn, model, *more, prompt=PROMPT):
    return sdattn("generate", prompt, "--model", model, "--steps", "2", "--device", "cpu", *more)


def test_generate_writes_the_run_and_tells_the_words(sdattn, model):
    code, out, err = generate(sdattn, model, "--seed", "4", "--width", "192")
    assert code == 0
    assert "StableDiffusionPipeline" in err
    assert "cpu in float32" in err
    folder = "outputs/a-red-cat-and-a-dog-4"
    assert folder in out
    for word in ("red", "cat", "dog", "lowest", "highest"):
        assert word in out
    run = load_run(folder)
    assert run.image.size == (192, 128)
    assert run.info["seed"] == 4
    assert run.info["options"]["num_inference_steps"] == 2
    assert len(os.listdir(f"{folder}/heatmaps")) == 6
    low, high = run.heatmaps["cat"].range
    assert 0 < low < high < 1


def test_the_same_command_again_needs_force(sdattn, model):
    assert generate(sdattn, model, "--out", "run")[0] == 0
    code, _, err = generate(sdattn, model, "--out", "run")
    assert code == 1
    assert err.count("\n") == 1
    assert "run exists already" in err
    assert generate(sdattn, model, "--out", "run", "--force")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", ""), "is empty"),
        (("generate", "   "), "is empty"),
        (("generate", "cat", "--width", "100"), "multiple of 8"),
        (("generate", "cat", "--out", "file/run"), "Cannot write to"),
        (("show", "nowhere"), "nowhere has no run.json"),
    ],
)
def test_failures_say_why_in_one_line(sdattn, model, arguments, message):
    open("file", "w").close()
    options = ("--model", model, "--device", "cpu") if arguments[0] == "generate" else ()
    code, _, err = sdattn(*arguments, *options)
    assert code == 1
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not os.path.exists("outputs") or not os.listdir("outputs")


@pytest.mark.parametrize("model_argument", ["./nowhere", "nothing"])
def test_an_unknown_model_is_told(sdattn, model_argument):
    code, _, err = sdattn("generate", "cat", "--model", model_argument)
    assert code == 1
    assert "There is no model at" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "cat", "--steps", "0"),
        ("generate", "cat", "--steps", "-1"),
        ("generate", "cat", "--width", "0"),
        ("generate", "cat", "--dtype", "int8"),
        ("generate", "cat", "--colour"),
        ("nothing",),
    ],
)
def test_wrong_usage_is_exit_code_2(sdattn, arguments):
    code, _, err = sdattn(*arguments)
    assert code == 2
    assert "Usage" in err


def test_show_draws_again_without_the_model(sdattn, model):
    generate(sdattn, model, "--out", "run")
    before = Image.open("run/heatmaps/03-cat.png").tobytes()
    for path in os.listdir("run/heatmaps"):
        os.unlink(f"run/heatmaps/{path}")
    code, out, _ = sdattn("show", "run")
    assert code == 0
    assert "cat" in out
    after = Image.open("run/heatmaps/03-cat.png").tobytes()
    assert len(before) == len(after)
    # drawn from float16, so a colour may be the next one
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) <= 24
    code, out, _ = sdattn("show", "run", "red cat", "a", "--out", "elsewhere")
    assert code == 0
    assert sorted(os.listdir("elsewhere/heatmaps")) == ["01-red-cat.png", "02-a.png", "03-a.png"]
    code, _, err = sdattn("show", "run", "cow")
    assert code == 1
    assert "'cow' is not in the prompt. Its words are: a, red, cat, and, dog." in err


def test_a_transformer_draws_with_options_of_its_own(sdattn, tmp_path):
    flux().save_pretrained(tmp_path / "flux")
    arguments = ("generate", "a red cat", "--model", str(tmp_path / "flux"), "--steps", "1")
    arguments += ("--width", "192", "--height", "128", "--out", "run")
    code, _, err = sdattn(*arguments, "--negative", "dog")
    assert code == 1
    assert "uses a negative prompt only with true_cfg_scale above 1" in err
    settings = ("--set", "true_cfg_scale=2.5", "--set", "max_sequence_length=16")
    assert sdattn(*arguments, "--negative", "dog", *settings)[0] == 0
    run = load_run("run")
    assert run.info["options"]["true_cfg_scale"] == 2.5
    assert run.heatmaps["cat"].values.shape == (8, 12)
    assert len(run.heatmaps.columns) == 16
    assert sdattn(*arguments, "--set", "steps")[0] == 2


def test_frames_that_would_have_no_place_are_not_drawn(sdattn, tmp_path, monkeypatch):
    animatediff().save_pretrained(tmp_path / "video")
    (tmp_path / "run-1").mkdir()
    monkeypatch.setattr(UNetMotionModel, "forward", lambda *_, **__: pytest.fail("the model ran"))
    settings = ("--set", "num_frames=2", "--out", "run")
    code, _, err = sdattn("generate", "a cat", "--model", str(tmp_path / "video"), *settings)
    assert code == 1
    assert "run-1 exists" in err.splitlines()[-1]


def test_the_version(sdattn):
    from sdattn import __version__

    code, out, _ = sdattn("--version")
    assert (code, out.strip()) == (0, __version__)


@pytest.mark.filterwarnings("default")
def test_warnings_of_cut_words_reach_the_user(sdattn, tmp_path):
    make_pipeline(max_length=5).save_pretrained(tmp_path / "short")
    code, _, err = generate(sdattn, str(tmp_path / "short"))
    assert code == 0
    assert "never saw: and, a, dog" in err


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
