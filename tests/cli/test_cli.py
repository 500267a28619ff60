"""The command line as a person uses it: what it prints, writes and returns."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from diffusers import UNetMotionModel
from PIL import Image
from tiny_pipelines import make_pipeline
from transformer_rows import flux, sana
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


def test_info_lists_layers_and_bytes(sdattn, model):
    code, out, _ = sdattn("info", model)
    assert code == 0
    assert out.count("attn2") + out.count("…") >= 16
    # cells of the 16 cross layers at 16x16: 5*256 + 5*64 + 5*16 + 4, times 77 float32
    assert f"{(5 * 256 + 5 * 64 + 5 * 16 + 4) * 77 * 4 / 1e6:.1f} MB" in out


def test_info_of_a_transformer_tells_what_does_not_apply(sdattn, tmp_path):
    sana().save_pretrained(tmp_path / "sana")
    code, out, _ = sdattn("info", str(tmp_path / "sana"))
    said = " ".join(out.split())
    assert code == 0
    assert "transformer_blocks.0.attn1 │ block │ linear" in said
    assert "300 token columns" in said
    assert "2 linear attention layers cannot be captured" in said
    assert "found a SanaPipeline" in said


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


@pytest.mark.parametrize("layout", ["folder", "shard"])
def test_a_batch_is_drawn_shown_checked_and_merged(sdattn, model, layout):
    Path("prompts.txt").write_text("a red cat\n\na dog\n \n")
    options = ("--model", model, "--steps", "1", "--device", "cpu", "--batch-size", "2")
    options += ("--format", layout, "--save", "image,maps")
    code, out, err = sdattn("batch", "prompts.txt", "--out", "run", *options)
    assert (code, err) == (0, "")
    assert out.startswith("run/: 2 of 2 items; 2 made in ")
    assert sdattn("batch", "prompts.txt", "--out", "run", *options)[1].endswith(
        "of them were there\n"
    )
    assert (
        sdattn("batch", "--status", "run")[1]
        == "run/: 2 items are whole, the input has 2\nnot running\n"
    )
    assert sdattn("batch", "--verify", "run")[1] == "run/: 2 items read, 0 problems\n"
    assert sdattn("merge", "run", "--out", "all")[1] == "all/: 2 of 2 items, from 1 run(s)\n"
    code, out, _ = sdattn("show", "all", "red cat", "--item", "000001", "--out", "drawn")
    assert code == 0
    assert "red cat" in out
    assert os.listdir("drawn/heatmaps") == ["01-red-cat.png"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("batch",), 2, "Pass a file of prompts and --out RUN"),
        (("batch", "prompts.txt"), 2, "Pass a file of prompts and --out RUN"),
        (("batch", "prompts.txt", "--status", "run"), 2, "stand alone"),
        (("batch", "prompts.doc", "--out", "run"), 1, "Pass a file that ends in .jsonl"),
        (("batch", "nothing.txt", "--out", "run"), 1, "nothing.txt"),
        (
            ("batch", "prompts.txt", "--out", "run", "--batch-size", "0"),
            2,
            "no whole number from 1",
        ),
        (("batch", "prompts.txt", "--out", "run", "--part", "3/2"), 2, "not K/N"),
        (("batch", "prompts.txt", "--out", "run", "--save", "image,page"), 2, "save=['page']"),
        (("batch", "prompts.txt", "--out", "run", "--format", "zip"), 2, "'folder' or 'shard'"),
        (("batch", "prompts.txt", "--out", "run", "--dtype", "int8"), 2, "not one of float32"),
        (("batch", "--status", "nowhere"), 1, "nowhere has no batch.json"),
        (("batch", "--verify", "."), 1, "no batch run's folder"),
        (("merge", "nowhere", "--out", "all"), 1, "nowhere has no batch.json"),
        (("show", "run", "--item", "1"), 2, "Say where to draw item 1"),
    ],
)
def test_batches_that_cannot_be(sdattn, arguments, code, message):
    Path("prompts.txt").write_text("a red cat\n")
    found, _, err = sdattn(*arguments)
    assert found == code
    assert message in " ".join(err.replace("│", " ").split())
    assert os.listdir() == ["prompts.txt"]


def test_edit_writes_both_runs_side_by_side(sdattn, model):
    options = ("--model", model, "--steps", "2", "--device", "cpu", "--guidance", "3")
    edited = ("--blend", "cat", "--weight", "dog=2", "--cross", "0.5", "--self", "0.5")
    code, out, err = sdattn("edit", "a red cat", "a red dog", *options, *edited)
    assert code == 0, err
    assert "outputs/a-red-cat-edit-0/ (replace)" in out
    assert "dog" in out
    folder = "outputs/a-red-cat-edit-0"
    assert load_run(f"{folder}/target").info["prompt"] == "a red dog"
    info = json.loads(Path(folder, "run.json").read_text())
    assert info["weights"] == {"dog": 2.0}
    assert info["blend"] == [["cat"], ["dog"]]
    assert info["cross_replace_steps"] == info["self_replace_steps"] == 0.5
    assert sdattn("show", f"{folder}/target", "dog")[0] == 0
    code, _, err = sdattn("edit", "a red cat", "a red dog", *options)
    assert code == 1
    assert "exists already" in err


def test_edit_of_a_picture_reports_how_well_it_came_back(sdattn, model):
    Image.new("RGB", (150, 120), (200, 40, 40)).save("photo.png")
    options = ("--model", model, "--steps", "2", "--device", "cpu", "--guidance", "3")
    code, out, err = sdattn(
        "edit", "a red cat", "a red dog", "--image", "photo.png", "--out", "edit", *options
    )
    assert code == 0, err
    found = json.loads(Path("edit/run.json").read_text())["reconstruction_psnr"]
    assert f"reconstruction: {found:.1f} dB" in out
    with Image.open("edit/source/image.png") as image:
        assert image.size == (144, 112)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("a cat",), 1, "'a red cat' has 3 words, 'a cat' has 2"),
        (("a red dog", "--weight", "dog"), 2, "is not WORD=FACTOR"),
        (("a red dog", "--weight", "dog=much"), 2, "is not WORD=FACTOR"),
        (("a red dog", "--weight", "dog=nan"), 1, "weight of 'dog' is nan"),
        (("a red dog", "--blend", "bird"), 1, "'bird' is in none of the prompts"),
        (("a red dog", "--cross", "30"), 1, "part of the run"),
        (("a red dog", "--image", "nothing.png"), 1, "nothing.png"),
        (("a red dog", "--image", "notes.txt"), 1, "is no picture that can be read"),
        (("a red dog", "--image", "photo.png", "--width", "64"), 2, "picture decides"),
    ],
)
def test_edits_that_cannot_be(sdattn, model, monkeypatch, arguments, code, message):
    Image.new("RGB", (64, 64)).save("photo.png")
    with open("notes.txt", "w") as file:
        file.write("words")
    options = ("--model", model, "--device", "cpu", "--mode", "replace")
    monkeypatch.setattr("sdattn.edit.invert", lambda *_, **__: pytest.fail("inverted first"))
    for more in ((), ("--image", "photo.png")):  # a long inversion does not come first
        found, _, err = sdattn("edit", "a red cat", *more, *arguments, *options)
        assert found == code
        assert message in " ".join(err.replace("│", " ").split())
    assert not os.path.exists("outputs") or not os.listdir("outputs")
