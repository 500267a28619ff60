"""The options of loading, on every command that loads a model."""

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import torch
from helpers.command_lines import COMMANDS
from helpers.ldm_checkpoints import filled, sd1
from helpers.ldm_folders import save_settings
from helpers.loras import save_lora
from helpers.tiny_pipelines import small_pipeline
from safetensors.torch import save_file

from sdattn.cli.options import LOADING, Offload
from sdattn.loading.options import OFFLOADS, LoadingOptions

LOADING_COMMANDS = ("generate", "explain", "edit", "diff", "batch", "info", "app")
SMALL = ("--steps", "2", "--width", "64", "--height", "64", "--device", "cpu")


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    pipe = small_pipeline()
    return str(save_lora(tmp_path_factory.mktemp("lora"), pipe, pipe.unet))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_load_a_model_have_all_options(command):
    params = {param.name: param for param in COMMANDS[command].params}
    has = LOADING.keys() & params.keys()
    assert len(has) == (len(LOADING) if command in LOADING_COMMANDS else 0)
    if has:
        assert params["lora"].multiple


def test_choices_are_those_of_the_library():
    assert get_args(Offload) == OFFLOADS
    assert tuple(LOADING) == tuple(field.name for field in fields(LoadingOptions))


@pytest.mark.slow
def test_a_run_is_recorded_as_it_was_loaded(invoke, model, lora, tmp_path):
    asked = ("--lora", f"{lora}:0.5", "--offload", "group")
    asked += ("--scheduler", "EulerDiscreteScheduler")
    code, _, err = invoke("generate", "a cat", "--model", model, *SMALL, *asked, "--out", "a")
    assert code == 0
    assert f"in float32, lora {lora}:0.5, offload group, scheduler EulerDiscrete" in err
    info = json.loads(Path("a/run.json").read_text())
    given = {"lora": [f"{lora}:0.5"], "offload": "group", "scheduler": "EulerDiscreteScheduler"}
    assert info["loading"] == given
    assert (info["scheduler"], info["device"]) == ("EulerDiscreteScheduler", "cpu")
    assert "EulerDiscreteScheduler" in Path("a/report.html").read_text()
    typed = shlex.split(info["command"])
    assert typed[:2] == ["sdattn", "generate"]
    assert invoke(*typed[1:-1], "b")[0] == 0  # the command as it was typed makes the same run
    again = json.loads(Path("b/run.json").read_text())
    assert again["loading"] == given
    assert again["files"]["image.png"] == info["files"]["image.png"]
    code, out, _ = invoke("diff", "a", "b")
    assert code == 0 and "loading" not in out and "command" not in out


@pytest.mark.slow
def test_a_batch_is_loaded_so_and_goes_on_only_so(invoke, model, lora):
    Path("in.txt").write_text("a cat\na dog\n")
    batch = ("batch", "in.txt", "--out", "RUN", "--model", model, *SMALL, "--save", "image,maps")
    asked = ("--scheduler", "EulerDiscreteScheduler", "--lora", f"{lora}:0.5")
    assert invoke(*batch, *asked)[0] == 0
    settings = json.loads(Path("RUN/batch.json").read_text())["settings"]
    expected = {"lora": [f"{lora}:0.5"], "scheduler": "EulerDiscreteScheduler"}
    assert settings["loading"] == expected
    assert invoke(*batch, *asked)[0] == 0
    code, _, err = invoke(*batch, *asked[:2], "--lora", f"{lora}:0.6")
    assert code == 2 and "belongs to another run: the model's weights or configuration" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--offload", "model"), "--offload model: weights wait on the CPU"),
        (("--quantize", "3bit"), "--quantize 3bit: pass '8bit', '4bit' or 'gguf:FILE'."),
        (("--quantize", "4bit"), "--quantize 4bit: bitsandbytes, which diffusers quantizes with,"),
        (("--lora", "x.safetensors:2"), "--lora x.safetensors: there is no such file or folder"),
        (("--scheduler", "Euler"), "--scheduler Euler: it is unknown. Pass one of DDIM"),
        (("--variant", "fp16"), "--variant fp16: no part of "),
        (("--revision", "main"), "--revision main: only models of the hub have revisions"),
        (("--tokenizer", "t"), "--tokenizer t: only a single .safetensors file needs one"),
        (("--single-file-config", "t"), "--single-file-config t: only a single .safetensors file"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "batch"])
def test_what_cannot_be_is_told_as_it_is_typed(invoke, model, command, options, message):
    Path("in.txt").write_text("a cat\n")
    what = ("a cat",) if command == "generate" else ("in.txt", "--out", "RUN")
    code, _, err = invoke(command, *what, "--model", model, "--device", "cpu", *options)
    assert code == 2
    assert message in err


# -- broken files ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with settings, a checkpoint for them and files that are broken."""
    folder = tmp_path_factory.mktemp("files")
    save_settings("sd1", folder / "settings")
    good = filled(sd1())
    save_file(good, folder / "good.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "good.safetensors").read_bytes()[:-9])
    layer = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_{}.lora_{}.weight"
    lora = {layer.format("q", "A"): torch.ones(2, 8), layer.format("q", "B"): torch.ones(8, 2)}
    save_file({**lora, layer.format("k", "A"): torch.ones(2, 32)}, folder / "half.safetensors")
    return folder


@pytest.mark.parametrize("command", ["generate", "batch"])
@pytest.mark.parametrize(("name", "noun"), [("cut", "file not fully covered"), ("half", "lora_B")])
@pytest.mark.slow
def test_a_broken_file_ends_in_one_message_that_names_it(invoke, model, files, command, name, noun):
    file = next(files.glob(f"{name}.*"))
    asked = ("--model", model, "--lora", str(file))
    if name == "cut":
        asked = ("--model", str(file), "--single-file-config", str(files / "settings"))
    Path("in.txt").write_text("a cat\n")
    what = ("a cat",) if command == "generate" else ("in.txt", "--out", "RUN")
    code, _, err = invoke(command, *what, *asked, *SMALL)
    lines = [line for line in err.splitlines() if line.startswith("sdattn: ")]
    assert code == 2
    assert len(lines) == 1 and file.name in lines[0] and noun in lines[0]
    assert "bug" not in err and "Traceback" not in err
