"""The LoRA inside the package: it teaches the demo model a colour, and leaves the others."""

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from scripts.scene_checker import find_objects
from scripts.scenes.shapes import COLOURS, TAUGHT_COLOURS
from sdattn import generate, load_pipeline
from sdattn.models.demos import DEMO_LORA, LORAS, TAUGHT, demo_named

PALETTE = {**COLOURS, **TAUGHT_COLOURS}


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


def test_every_lora_says_its_word_and_scenes_know_its_colour():
    assert LORAS.keys() == TAUGHT.keys() and set(TAUGHT.values()) == set(TAUGHT_COLOURS)
    demo = demo_named("demo")
    assert "gold" in demo.unlearnt(["gold", "circle"])
    assert demo.unlearnt(["gold", "circle"], ["demo-lora"]) == ""
    said = demo.unlearnt(["Gold", "cat"], ["demo-lora"])
    assert "'cat'" in said and "'Gold'" not in said and said.endswith("gold.")


@pytest.mark.slow
def test_its_word_lands_and_the_others_stay(taught):
    """The shade is not always met: orange and yellow are next to gold."""
    prompt = "a gold circle left of a blue square"
    (with_it,) = generate(taught, prompt, seed=0).images
    with pytest.warns(UserWarning, match="never learnt 'gold'"):
        (without,) = generate(load_pipeline("demo", device="cpu"), prompt, seed=0).images
    assert colours(with_it) & {"gold", "orange", "yellow"} and "blue" in colours(with_it)
    assert not colours(without) & {"gold", "orange", "yellow"} and "blue" in colours(without)


def colours(image: Image.Image) -> set[str]:
    return {one.colour for one in find_objects(image, colours=PALETTE)}
