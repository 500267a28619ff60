"""Help: examples that can be typed, choices and defaults as the library has them, no markup."""

import inspect
import re
import shlex
from typing import get_args

import pytest
from helpers.command_lines import COMMANDS

from sdattn import PRESETS, cli, explain, generate
from sdattn.cli import options, show
from sdattn.edit.editing import Mode
from sdattn.figures import KINDS
from sdattn.inversion.invert import invert
from sdattn.loading.devices import DTYPES
from sdattn.models.demos import DEMOS, demo_named
from sdattn.runs.parts import PARTS


def option(command, name):
    return next(param for param in COMMANDS[command].params if f"--{name}" in param.opts)


def examples(command):
    text = COMMANDS[command].help.partition("Examples:\n")[2]
    return [shlex.split(line, comments=True) for line in text.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_whose_options_it_has(command):
    found = examples(command)
    assert len(found) >= 2
    known = {name for param in COMMANDS[command].params for name in param.opts}
    for line in found:
        assert line[:2] == ["sdattn", command]
        assert {word for word in line if re.match("--?[a-z]", word)} <= known


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_a_short_h_is_help_everywhere(invoke, command):
    assert invoke(*command, "-h") == invoke(*command, "--help")


def test_wherever_out_is_o_is_too():
    names = [param.opts for command in COMMANDS.values() for param in command.params]
    assert [own for own in names if "--out" in own] == 6 * [["--out", "-o"]]


def test_counts_begin_at_1_and_shares_end_at_1():
    """Wherever an option is, with the same bounds."""
    others = {"dpi": (20, 2400), "port": (1, 65535)}
    others |= dict.fromkeys(("decide_at", "cross_replace_steps", "self_replace_steps"), (0, 1))
    every = [param for command in COMMANDS.values() for param in command.params]
    bounds = [(one.name, one.min, one.max) for one in every if hasattr(one, "min")]
    bounded = [one for one in bounds if one[1:] != (None, None)]
    assert len(bounded) > 20
    for name, *both in bounded:
        assert tuple(both) == others.get(name, (1, None)), name


def test_the_help_of_generate_is_in_panels(invoke):
    _, out, _ = invoke("generate", "-h")
    panels = re.findall(r"^╭─ (\w+) ─", out, re.M)
    assert panels == ["Arguments", "Image", "Heatmaps", "Output", "Model", "Advanced"]
    parts = dict(zip(panels, re.split(r"^╭─ \w+ ─", out, flags=re.M)[1:], strict=True))
    for panel, names in {
        "Image": ("seed", "steps", "negative", "width"),
        "Heatmaps": ("preset", "keep", "causal"),
        "Output": ("out", "force", "json"),
        "Model": ("model", "dtype", "lora"),
        "Advanced": ("set", "max-memory", "offload", "help"),
    }.items():
        assert all(re.search(rf"^│ --{name} ", parts[panel], re.M) for name in names), panel


def test_an_options_default_is_told_once(invoke):
    _, out, _ = invoke("info", "-h")
    device = out[out.index("--device") :].partition("--dtype")[0]
    assert device.count("default") == 1 and "[default: cpu]" in device


def test_examples_are_a_line_each_and_brackets_no_markup(invoke):
    _, out, _ = invoke("app", "-h")
    lines = [line.strip() for line in out.splitlines()]
    assert {"sdattn app --browser", "sdattn app --model owner/name --port 8000"} <= set(lines)
    assert "Needs gradio: pip install 'sdattn[app]'" in lines
    assert "[app]" in invoke("-h")[1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[bold]x[/bold] [a-z] [1, 2] [@x]", "[bold]x[/bold] [a-z] [1, 2] [@x]"),
        ("one\ntwo\n\nthree\n  four", "one two\n\nthree four"),
        ("one\n\nExamples:\n  a\n  b", "one\n\nExamples:\n  a\n  b"),
    ],
)
def test_help_is_shown_as_it_is_written(text, shown):
    from rich.text import Text

    assert Text.from_markup(cli._literal(text)).plain == shown


@pytest.mark.parametrize(
    ("choice", "values"),
    [
        (options.MAPS["preset"][0], tuple(PRESETS)),
        (options.DTYPE[0], tuple(DTYPES)),
        (options.MAPS["refine"][0], ("self",)),
    ],
)
def test_choices_are_those_of_the_library(choice, values):
    literal = get_args(choice)[0]
    assert get_args(next(iter(get_args(literal)), None)) == values or get_args(literal) == values


def test_choices_of_single_commands_are_those_of_the_library():
    assert get_args(show.Kind) == (*KINDS, "card", "animation")
    modes = inspect.signature(cli.edit.edit).parameters["mode"].annotation
    assert get_args(get_args(modes)[0]) == get_args(Mode)
    assert cli.batch._PARTS == PARTS


@pytest.mark.parametrize("command", ["generate", "edit", "batch"])
def test_the_defaults_of_steps_and_guidance_are_told(command):
    steps, guidance = option(command, "steps").help, option(command, "guidance").help
    for settings in (demo_named(name).settings for name in DEMOS):
        assert f"default: {settings['num_inference_steps']} for the demo" in steps
    assert "default: a demo's own" in guidance
    assert "else the pipeline's" in steps and "else the pipeline's" in guidance


def test_the_defaults_of_an_inversion_are_told():
    own = inspect.signature(invert).parameters
    steps = own["num_inference_steps"].default
    assert f"or {steps} with --image" in option("edit", "steps").help
    assert "scale is 7.5, or 1" in " ".join(str(invert.__doc__).split())
    assert "or with --image 7.5, 1 for SD3" in option("edit", "guidance").help
    assert f"else {steps})." in option("explain", "steps").help


@pytest.mark.parametrize(
    ("command", "function"), [(cli.generate.generate, generate), (cli.explain.explain, explain)]
)
def test_defaults_are_those_of_the_library(command, function):
    """Of an option that is left out; None stands for what is settled later."""
    ours, theirs = (inspect.signature(one).parameters for one in (command, function))
    shared = [name for name in ours if name in theirs]
    assert {"seed", "max_bytes", "prompt"} < {*shared}
    assert [ours[name].default for name in shared] == [theirs[name].default for name in shared]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_that_cannot_be_switched_off_is_off(command):
    flags = [one for one in COMMANDS[command].params if getattr(one, "is_flag", False)]
    assert not any(one.default for one in flags if not one.secondary_opts)
