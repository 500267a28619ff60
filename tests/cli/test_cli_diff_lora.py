"""`sdattn diff` of a prompt with a LoRA and without, in one command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sdattn import generate, load_pipeline
from sdattn.models.demos import DEMO_LORA

PROMPT, FEW = "a unicorn", ("--steps", "2", "--device", "cpu", "--seed", "3")


def pixels(image):
    return np.asarray(image.convert("RGB"), dtype=int)


def drawn(**loading):
    pipe = load_pipeline("demo", device="cpu", **loading)
    return generate(pipe, PROMPT, seed=3, num_inference_steps=2)


@pytest.mark.filterwarnings("ignore:The demo model never learnt")
def test_one_command_draws_with_and_without(invoke):
    code, out, err = invoke("diff", PROMPT, "--lora", "demo-lora", *FEW, "--json")
    found = json.loads(out)
    assert code == 0, err
    folder = Path("outputs/a-unicorn-3-with-lora")
    assert found["folder"] == str(folder)
    info = json.loads((folder / "run.json").read_text())
    assert info["settings"] == {"lora": [None, ["demo-lora"]]}  # and in nothing else
    assert [run["name"] for run in info["runs"]] == ["demo without LoRA", "demo with demo-lora"]
    assert [word["word"] for word in info["words"]] == ["a", "unicorn"]
    assert (folder / "diff.html").stat().st_size > 10_000
    runs = drawn(), drawn(lora="demo-lora")
    for i, word in enumerate(info["words"]):
        expected = [run.heatmaps[0].occurrences()[i].map.mean().item() for run in runs]
        assert word["mean"] == pytest.approx(expected, rel=1e-4)
    a, b = (run.images[0] for run in runs)
    assert abs(pixels(a) - pixels(b)).mean() > 0.1


@pytest.mark.filterwarnings("ignore:The demo model never learnt")
def test_words_and_a_scale_may_follow(invoke):
    lora = f"{DEMO_LORA}:0.5"
    code, _, err = invoke("diff", PROMPT, "unicorn", "--lora", lora, *FEW, "--out", "half")
    assert code == 0, err
    info = json.loads(Path("half/run.json").read_text())
    assert [word["word"] for word in info["words"]] == ["unicorn"]
    assert info["settings"] == {"lora": [None, [lora]]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a", "b", "--steps", "3"), "--steps"),
        (("a", "b", "--quantize", "8bit"), "--quantize"),
        (("a",), "or pass --lora"),
        ((PROMPT, "dog", "--lora", "demo-lora", *FEW), "dog"),
        ((PROMPT, "--lora", "nowhere.safetensors"), "no such file"),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_option(invoke, arguments, said):
    code, _, err = invoke("diff", *arguments)
    assert code in (1, 2)
    assert said in " ".join(err.split())
    assert not list(Path().rglob("*.html"))


def test_videos_are_refused_before_they_are_drawn(invoke, monkeypatch, tmp_path):
    layer = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_q"
    fits = {
        f"{layer}.lora_A.weight": torch.zeros(1, 32),
        f"{layer}.lora_B.weight": torch.ones(32, 1),
    }
    save_file(fits, tmp_path / "fits.safetensors")
    drawn = "diffusers.AnimateDiffPipeline.__call__"
    monkeypatch.setattr(drawn, lambda *_, **__: pytest.fail("a video was drawn"))
    lora = ["--lora", str(tmp_path / "fits.safetensors")]
    code, _, err = invoke("diff", "a red circle", "--model", "demo-video", *lora, *FEW)
    assert code == 1 and "AnimateDiffPipeline makes videos, but edits, knockouts, comp" in err
