"""The LoRA inside the package: it teaches the demo model a noun, and leaves the others."""

import pytest
import torch
from safetensors import safe_open

from scripts.evaluation.evaluate_demo_lora import seen
from scripts.scenes import sprites
from sdattn import generate, load_pipeline
from sdattn.models.demos import DEMO_LORA, LORAS, TAUGHT, demo_named


@pytest.fixture(scope="module")
def taught():
    pipe = load_pipeline("demo", device="cpu", lora="demo-lora")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_it_is_small_and_of_attention_alone():
    assert DEMO_LORA.stat().st_size < 300_000
    with safe_open(DEMO_LORA, framework="pt") as file:
        names = list(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.float16}
    assert len(names) == 32 * 4 * 2  # layers, projections, and the two matrices of each
    assert all(".attn1." in name or ".attn2." in name for name in names)


def test_every_lora_says_its_word_and_there_are_drawings_of_it():
    assert LORAS.keys() == TAUGHT.keys() and set(TAUGHT.values()) == set(sprites.TAUGHT)
    assert set(sprites.TAUGHT) <= sprites.hands().keys()
    demo = demo_named("demo")
    assert "unicorn" in demo.unlearnt(["unicorn", "star"])
    assert demo.unlearnt(["unicorn", "star"], ["demo-lora"]) == ""
    said = demo.unlearnt(["Unicorn", "zebra"], ["demo-lora"])
    assert "'zebra'" in said and "'Unicorn'" not in said and said.endswith("unicorn.")


@pytest.mark.slow
@pytest.mark.xfail(reason="after 400 steps its unicorn has the colours, not the shape")
def test_its_word_lands_and_the_others_stay(taught):
    prompt = "a unicorn left of a car on a gray background"
    (with_it,) = generate(taught, prompt, seed=0).images
    with pytest.warns(UserWarning, match="never learnt 'unicorn'"):
        (without,) = generate(load_pipeline("demo", device="cpu"), prompt, seed=0).images
    assert seen(with_it) == ["car", "unicorn"]
    assert "unicorn" not in seen(without) and "car" in seen(without)
