"""The command line as a person uses it: what it prints, writes and returns."""

import os

import pytest
from helpers.command_lines import generate, said
from PIL import Image


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", ""), "is empty"),
        (("generate", "   "), "is empty"),
        (("generate", "cat", "--width", "100"), "multiple of 8"),
        (("generate", "cat", "--out", "file/run"), "Cannot write to"),
        (("generate", "cat", "--model", "./nowhere"), "There is no model at"),
        (("generate", "cat", "--model", "nothing"), "There is no model at"),
        (("show", "nowhere"), "There is no folder"),
        (("explain", "a cat", "no photo.jpg"), "There is no file 'a cat'"),
    ],
)
def test_failures_say_why_in_one_line(invoke, model, arguments, message):
    open("file", "w").close()
    command, *typed = arguments
    options = ("--model", model, "--device", "cpu") if command == "generate" else ()
    code, _, err = invoke(command, *options, *typed)
    assert code == 2
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not os.path.exists("outputs") or not os.listdir("outputs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "photo.jpg", "a cat", "--save", "masks"), "(`sdattn batch` has --save)"),
        (("explain", "a cat", "my photo.jpg"), "explain 'my photo.jpg' 'a cat'"),
        (("show", "run", "--steps", "4"), "`sdattn generate`"),
        (("generate", "an", "owl"), "quotes"),
        (("generate",), "Missing argument"),
        (("nothing",), "No such command"),
        (("generate", "owl", "--steps", "0"), "'--steps': "),
        (("generate", "owl", "--dtype", "int8"), "bfloat16"),
        (("generate", "owl", "--max-memory", "4 G"), "'4 G' is not a size such as 4GB"),
        (("generate", "owl", "--max-memory", "0 MB"), "'0 MB' is not a size"),
        (("generate", "owl", "--negative-maps"), "--negative-maps needs --negative."),
        (("generate", "owl", "--steps", "three"), "'--steps': 'three' "),
        (("edit", "owl", "cat", "--null-text"), "--null-text needs --image"),
        (("generate", "owl", "--num_inference_steps", "4"), "--steps"),
    ],
)
def test_wrong_usage_is_told_with_what_to_type(invoke, arguments, message):
    open("my photo.jpg", "w").close()
    code, _, err = invoke(*arguments)
    assert code == 2 and "Usage" in err and "Possible options: --save" not in err
    assert message in said(err)


@pytest.mark.slow
def test_show_draws_again_without_the_model(invoke, model):
    generate(invoke, model, "--out", "run")
    before = Image.open("run/heatmaps/03-cat.png").tobytes()
    for path in os.listdir("run/heatmaps"):
        os.unlink(f"run/heatmaps/{path}")
    code, out, _ = invoke("show", "run")
    assert code == 0
    assert "cat" in out
    after = Image.open("run/heatmaps/03-cat.png").tobytes()
    assert len(before) == len(after)
    # drawn from float16, so a colour may be the next one
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) <= 24
    code, out, _ = invoke("show", "run", "red cat", "a", "--out", "elsewhere")
    assert code == 0
    assert sorted(os.listdir("elsewhere/heatmaps")) == ["01-red-cat.png", "02-a.png", "03-a.png"]
    code, out, _ = invoke("show", "run", "<characters 6:8>", "--out", "part")  # of "cat"
    assert code == 0
    assert os.listdir("part/heatmaps") == ["01-ca.png"]
    code, _, err = invoke("show", "run", "cow")
    assert code == 2
    assert "'cow' is not in the prompt. Its words are: a, red, cat, and, dog." in err


def test_the_version(invoke):
    from sdattn import __version__

    code, out, _ = invoke("--version")
    assert (code, out.strip()) == (0, __version__)
