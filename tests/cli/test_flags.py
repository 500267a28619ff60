"""Options that the library's messages name are spelled as the running command's flags."""

import errno
import pickle
from importlib.metadata import version

import pytest
import torch
from helpers.command_lines import COMMANDS
from PIL import Image

from sdattn.cli.failures import exit_code, reason
from sdattn.cli.flags import spelled
from sdattn.errors import (
    ExistsError,
    InvalidValueError,
    MissingPackageError,
    NotFiniteError,
    NotFoundError,
    OptionError,
    RunError,
)


@pytest.mark.parametrize(
    ("command", "error", "typed"),
    [
        ("generate", OptionError("num_inference_steps", 0, "pass 1."), "--steps 0: pass 1."),
        ("edit", OptionError("guidance_scale", 3, "no"), "--guidance 3: no"),
        ("edit", OptionError("seed", 1, "`null_text=False`"), "--seed 1: --no-null-text"),
        ("edit", OptionError("mode", "", "pass auto"), "--mode '': pass auto"),
        ("edit", OptionError("mode", "`a`", "pass auto"), "--mode '`a`': pass auto"),
        ("info", OptionError("device", "cuda:7", "no"), "--device cuda:7: no"),
        ("info", OptionError("dtype", torch.float16, "no"), "--dtype float16: no"),
        ("info", OptionError("quantization", "3bit", "no"), "--quantize 3bit: no"),
        ("explain", OptionError("timesteps", [9, 9], "no"), "--timesteps 9,9: no"),
        ("generate", OptionError("eta", 0.5, "no"), "--set eta=0.5: no"),
        ("generate", OptionError("clean_caption", True, "no"), "--set clean_caption=true: no"),
        ("generate", OptionError("sigmas", "a b", "no"), "--set sigmas='a b': no"),
        ("edit", OptionError("eta", 0.5, "no"), "`eta=0.5`: no"),  # it has no --set
        ("generate", OptionError("causal", False, "no"), "`causal=False`: no"),
    ],
)
def test_an_option_and_its_value_are_named_as_they_are_typed(command, error, typed):
    twin = pickle.loads(pickle.dumps(error))
    assert reason(error, COMMANDS[command]) == reason(twin, COMMANDS[command]) == typed


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("`null_text=True` or `force`", "--null-text or --force"),
        ("pass `weights={'cat': 2.0}`", "pass --weight cat=2.0"),
        ("`weights={'red cat': 2.0}`", "--weight 'red cat=2.0'"),
        ("not `guidance_scale`, `negative_prompt`.", "not --guidance, --negative."),
        ("Pass `true_cfg_scale=4`, say", "Pass `true_cfg_scale=4`, say"),
        ("Use `capture()` around it", "Use `sdattn.capture()` in Python around it"),
        ("Call `edit_image()` or `run_batch()`", "Call `sdattn edit` or `sdattn batch`"),
        (
            "`generate()` with `capture_options={'steps': 'all', 'branch': 'both'}`",
            "`sdattn generate` with --keep steps --negative-maps",
        ),
        ("pass `capture_options={'steps': 'all', 'layers': 'mid'}`",) * 2,
        ("`mode='refine'` (AttentionRefine)", "--mode refine (AttentionRefine)"),
        ("choose another `folder`", "choose another --out"),
        ("`blend='it`s'`, `blend=\"it's\"`", "--blend 'it`s', --blend 'it'\"'\"'s'"),
        ("'seed=3 {seed} cat' is in /runs/mode='x', --out or capture()",) * 2,
    ],
)
def test_names_between_backticks_are_spelled_and_nothing_else(text, typed):
    assert spelled(text, COMMANDS["edit"]) == typed
    assert reason(ValueError(text), COMMANDS["edit"]).endswith(text)  # of another library


def test_a_reason_is_one_line_with_its_type_where_nobody_worded_it():
    assert reason(InvalidValueError("seed 1:\n  no")) == "seed 1: no"
    assert reason(NotFoundError("'cow' is not there")) == "'cow' is not there"
    assert reason(MissingPackageError("gs://x needs gcsfs")) == "gs://x needs gcsfs"
    missing = ModuleNotFoundError("No module named 'x'")
    assert reason(missing) == "ModuleNotFoundError: No module named 'x'"
    assert reason(ZeroDivisionError("by zero")) == "ZeroDivisionError: by zero"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidValueError("seed 1"), 2),
        (NotFoundError("'cow' is not there"), 2),
        (ExistsError("run exists already"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.png"), 2),
        (RunError("it was stopped"), 1),
        (NotFiniteError("the image holds NaN"), 1),
        (OSError(errno.ENOSPC, "No space left on device", "run"), 1),
        (MissingPackageError("gs://x needs gcsfs"), 2),
        (PermissionError(errno.EACCES, "Permission denied", "a.png"), 2),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a.txt/run"), 2),
        (MemoryError(), 1),
        (ValueError("a bug"), 1),
    ],
)
def test_a_wrong_value_is_exit_code_2_and_a_failed_run_1(error, code):
    assert exit_code(error) == code


def test_a_bug_keeps_its_traceback_and_says_where_to_report_it(invoke, model, monkeypatch):
    """With a fault put into `generate`, which ended as `sdattn: x` once."""
    monkeypatch.setattr("sdattn.runs.preparing.seeds_of", lambda *_: {}["x"])
    code, out, err = invoke("generate", "a cat", "--model", model, "--device", "cpu")
    assert (code, out) == (1, "")
    assert "Traceback (most recent call last)" in err and "runs/generation.py" in err
    assert "KeyError: 'x'" in err
    *_, versions, last = err.splitlines()
    assert last.startswith("sdattn: This is a bug in sdattn") and "`sdattn info`" in last
    assert f"torch {version('torch')}" in versions and "diffusers " in versions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("edit", "a cat", "a cat"), "Change a word, or pass --weight word=2.0."),
        (
            ("edit", "a cat", "a cat", "--mode", "reweight"),
            "--mode reweight needs a factor for a word, e.g. --weight cat=2.0",
        ),
        (("generate", "a cat", "--steps", "5000"), "--steps 5000: pass 1 to 1000"),
        (("generate", "a cat", "--set", "generator=1"), "Use `sdattn.capture()` in Python"),
        (("generate", "a cat", "--width", "70"), "--width 70: this model makes sizes"),
        (("edit", "a cat", "a dog", "--image", "p.png", "--guidance", "0.5"), "or --no-null-text."),
    ],
)
def test_no_command_speaks_python(invoke, model, arguments, message):
    Image.new("RGB", (64, 64)).save("p.png")
    code, _, err = invoke(*arguments, "--model", model, "--device", "cpu")
    assert code == 2
    assert message in err.splitlines()[-1]


def test_a_device_that_is_not_here_is_refused_before_the_load(invoke, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sdattn.loading.pipelines.find_model", lambda _: pytest.fail("loaded"))
    code, out, err = invoke("generate", "a cat", "--device", "cuda")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("sdattn: --device cuda: ")
    assert "This machine has: cpu. Pass one of these" in err


def test_raw_errors_of_the_system_and_of_allocators_say_what_to_do():
    missing = FileNotFoundError(2, "No such file or directory", "a.csv")
    assert reason(missing) == "There is no file a.csv. Check the path."
    full = RuntimeError("can't allocate memory: you tried to allocate 4096000000 bytes. Error 12")
    text = reason(full, COMMANDS["generate"])
    assert "another 4.1 GB" in text and "--width" in text
    assert "21.5 GB" in reason(RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."))
