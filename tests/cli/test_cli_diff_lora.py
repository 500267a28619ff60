"""`sdattn diff` of a prompt with a LoRA and without, in one command."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.loras import save_lora

from sdattn import generate, load_pipeline

PROMPT, FEW = "a cat", ("--steps", "2", "--device", "cpu", "--seed", "3")


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    pipe = load_pipeline("demo", device="cpu")
    return str(save_lora(tmp_path_factory.mktemp("lora"), pipe, pipe.unet))


def pixels(image):
    return np.asarray(image.convert("RGB"), dtype=int)


def drawn(**loading):
    pipe = load_pipeline("demo", device="cpu", **loading)
    return generate(pipe, PROMPT, seed=3, num_inference_steps=2)


@pytest.mark.slow
def test_one_command_draws_with_and_without(invoke, lora):
    code, out, err = invoke("diff", PROMPT, "--lora", lora, *FEW, "--json")
    found = json.loads(out)
    assert code == 0, err
    folder = Path("outputs/a-cat-3-with-lora")
    assert found["folder"] == str(folder)
    info = json.loads((folder / "run.json").read_text())
    assert info["settings"] == {"lora": [None, [lora]]}  # and in nothing else
    assert [run["name"] for run in info["runs"]] == ["demo without LoRA", f"demo with {lora}"]
    assert [word["word"] for word in info["words"]] == ["a", "cat"]
    assert (folder / "diff.html").stat().st_size > 10_000
    runs = drawn(), drawn(lora=lora)
    for i, word in enumerate(info["words"]):
        expected = [run.heatmaps[0].occurrences()[i].map.mean().item() for run in runs]
        assert word["mean"] == pytest.approx(expected, rel=1e-4)
    a, b = (run.images[0] for run in runs)
    assert abs(pixels(a) - pixels(b)).mean() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a", "b", "--steps", "3"), "--steps"),
        (("a", "b", "--quantize", "8bit"), "--quantize"),
        (("a",), "or pass --lora"),
        ((PROMPT, "dog", "--lora", "LORA", *FEW), "dog"),
        ((PROMPT, "--lora", "nowhere.safetensors"), "no such file"),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_option(invoke, lora, arguments, said):
    code, _, err = invoke("diff", *(lora if one == "LORA" else one for one in arguments))
    assert code in (1, 2)
    assert said in " ".join(err.split())
    assert not list(Path().rglob("*.html"))


@pytest.mark.slow
def test_videos_are_refused_before_they_are_drawn(invoke, monkeypatch, lora):
    drawn = "diffusers.AnimateDiffPipeline.__call__"
    monkeypatch.setattr(drawn, lambda *_, **__: pytest.fail("a video was drawn"))
    code, _, err = invoke("diff", PROMPT, "--model", "demo-video", "--lora", lora, *FEW)
    assert code == 2 and "AnimateDiffPipeline makes videos, but edits, knockouts, comp" in err
