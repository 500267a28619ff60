"""What the library says in Python is said to people at the command line in its options."""

import pytest
from PIL import Image

from sdattn.cli.wording import in_options, reason


@pytest.mark.parametrize(
    ("python", "typed"),
    [
        ("num_inference_steps=0: pass 1 to 1000.", "--steps 0: pass 1 to 1000."),
        ("seed=-1: pass a whole number.", "--seed -1: pass a whole number."),
        ("guidance_scale=0.5: or null_text=False.", "--guidance 0.5: or --no-null-text."),
        ("mode='x': pass auto", "--mode x: pass auto"),
        (
            'mode="reweight" needs weights={"word": factor}.',
            "--mode reweight needs --weight WORD=FACTOR.",
        ),
        (
            'Change a word, or pass weights={"word": 2.0}.',
            "Change a word, or pass --weight word=2.0.",
        ),
        ("device='cuda:7': there is none", "--device cuda:7: there is none"),
        ("branch='both' shows the words", "--negative-maps shows the words"),
        ("decides on guidance_scale, negative_prompt.", "decides on --guidance, --negative."),
        ("Pass true_cfg_scale=4, say", "Pass --set true_cfg_scale=4, say"),
        ("with true_cfg_scale above 1", "with true_cfg_scale above 1"),
        ("Use capture() around it", "Use sdattn.capture() in Python around it"),
        ("call pipe.generate() or x.capture()", "call pipe.generate() or x.capture()"),
        ("dtype=torch.float16: no", "--dtype torch.float16: no"),
    ],
)
def test_arguments_become_options(python, typed):
    assert in_options(python) == typed


@pytest.mark.parametrize(
    "text",
    [
        "'seed=3 cat' is not in the prompt. Its words are: a, cat.",
        '"mode=x and weights={}" is no prompt',
        "a model's scheduler's most",
        r"""'it\'s "a" seed=3 cat' is not in the prompt.""",
        "/runs/seed=3/run.json holds no run",
        r"C:\runs\mode='x'\run.json holds no run",
        "the seed is a number, modes are words",
        "steps='all' keeps each",  # of capture(): --steps is the number of steps
    ],
)
def test_quoted_texts_and_other_words_stay(text):
    assert in_options(text) == text


def test_an_error_is_one_line_with_its_type_where_it_is_not_ours():
    assert reason(ValueError("seed=1:\n  no")) == "--seed 1: no"
    assert reason(KeyError("'cow' is not there")) == "'cow' is not there"
    assert reason(ImportError("gs://x needs gcsfs")) == "gs://x needs gcsfs"
    missing = ModuleNotFoundError("No module named 'x'")
    assert reason(missing) == "ModuleNotFoundError: No module named 'x'"
    assert reason(ZeroDivisionError("by zero")) == "ZeroDivisionError: by zero"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("edit", "a cat", "a cat"), "Change a word, or pass --weight word=2.0."),
        (("edit", "a cat", "a cat", "--mode", "reweight"), "--mode reweight needs --weight WORD="),
        (("generate", "a cat", "--steps", "5000"), "--steps 5000: pass 1 to 1000"),
        (("generate", "a cat", "--negative-maps"), "--negative-maps shows the words of"),
        (("generate", "a cat", "--set", "generator=1"), "Use sdattn.capture() in Python"),
        (("generate", "a cat", "--width", "70"), "--width 70: this model makes sizes"),
        (("edit", "a cat", "a dog", "--image", "p.png", "--guidance", "0.5"), "or --no-null-text."),
    ],
)
def test_no_command_speaks_python(sdattn, model, arguments, message):
    Image.new("RGB", (64, 64)).save("p.png")
    code, _, err = sdattn(*arguments, "--model", model, "--device", "cpu")
    assert code == 1
    assert message in err.splitlines()[-1]


def test_a_device_that_is_not_here_is_refused_before_the_load(sdattn, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sdattn.models.loading.find_model", lambda _: pytest.fail("it was loaded"))
    code, out, err = sdattn("generate", "a cat", "--device", "cuda")
    assert (code, out) == (1, "")
    assert err.startswith("sdattn: --device cuda: ")
    assert "This machine has: cpu. Pass one of these" in err
