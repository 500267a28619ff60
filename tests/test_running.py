"""A pipeline's call: whose option is whose, where a run makes several images.

What checked_options() refuses is tested in test_runs.py.
"""

import pytest
import torch
from conftest import make_pipeline

from sdattn import generate
from sdattn.causes import knockouts
from sdattn.running import is_of_pictures, options_of_image


def test_an_image_has_its_prompts_options_and_its_own_noise():
    latents = torch.arange(4.0)[:, None, None, None].expand(4, 4, 8, 8)
    options = {
        "negative_prompt": ["dog", "cat"],
        "image": ["one", "other"],
        "guidance_scale": 5.0,
        "num_images_per_prompt": 2,
        "latents": latents,
        "timesteps": [9, 1],  # a list that is not of pictures
    }
    found = [options_of_image(options, i, images=4, prompts=2) for i in range(4)]
    assert [one["negative_prompt"] for one in found] == ["dog", "dog", "cat", "cat"]
    assert [one["image"] for one in found] == ["one", "one", "other", "other"]
    assert [one["latents"].flatten().unique().tolist() for one in found] == [[0], [1], [2], [3]]
    for one in found:
        assert "num_images_per_prompt" not in one
        assert one["timesteps"] == [9, 1]
        assert one["guidance_scale"] == 5.0


@pytest.mark.parametrize("name", ["image", "mask_image", "negative_prompt", "prompt_2", "latents"])
def test_pictures_may_differ_in_these(name):
    assert is_of_pictures(name)


def test_knockouts_of_a_batch_are_those_of_single_runs():
    """With a negative prompt and noise for each."""
    pipe = make_pipeline()
    prompts, negatives = ["a red cat", "a dog"], ["dog dog", "cat"]
    size = {"height": 128, "width": 128, "num_inference_steps": 2, "guidance_scale": 6.0}
    latents = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    run = generate(pipe, prompts, causal=True, negative_prompt=negatives, latents=latents, **size)
    for i, prompt in enumerate(prompts):
        own = {"negative_prompt": negatives[i], "latents": latents[i : i + 1], **size}
        alone = knockouts(pipe, prompt, prompt.split(), i, steps=(0.5, 1.0), **own)
        assert len(alone) == len(run.causal_heatmaps[i])
        for one, other in zip(alone, run.causal_heatmaps[i], strict=True):
            assert other.label == one.heatmap.label
            torch.testing.assert_close(other.values, one.heatmap.values, atol=0.005, rtol=0)
