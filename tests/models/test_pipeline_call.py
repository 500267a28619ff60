"""A pipeline's call: whose option is whose, where a run makes several images.

What checked_options() refuses is tested in test_runs.py.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.modular_pipelines import modular
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import qwen_image
from PIL import Image

from sdattn import explain, generate
from sdattn.control.knockouts import draw_without, knockout, prepare
from sdattn.edit import edit
from sdattn.models.call_options import option_of
from sdattn.models.pipeline_call import (
    checked_options,
    is_of_images,
    named_bar,
    options_of_image,
)
from sdattn.models.values import checked_seeds
from sdattn.prompts.tokens import TruncationWarning

PIPE = make_pipeline()


def test_an_option_has_its_default_and_none_where_no_block_of_a_modular_pipeline_takes_it():
    assert option_of(PIPE, {"num_inference_steps": 3}, "num_inference_steps") == 3
    assert option_of(PIPE, {}, "num_inference_steps") == 50
    with pytest.raises(KeyError):
        option_of(PIPE, {}, "clean_caption")
    blocks = modular(qwen_image(), "QwenImageModularPipeline")
    assert option_of(blocks, {}, "num_inference_steps") == 50
    assert option_of(blocks, {}, "clean_caption") is None


def test_an_image_has_its_prompts_options_and_its_own_noise():
    latents = torch.arange(4.0)[:, None, None, None].expand(4, 4, 8, 8)
    options = {
        "negative_prompt": ["dog", "cat"],
        "image": ["one", "other"],
        "guidance_scale": 5.0,
        "num_images_per_prompt": 2,
        "latents": latents,
        "timesteps": [9, 1],  # a list that is not of images
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
def test_images_may_differ_in_these(name):
    assert is_of_images(name)


@pytest.mark.parametrize(
    ("side", "nearest"), [(100, (96, 104)), (65, (64, 72)), (5, (8, 16)), (103, (96, 104))]
)
def test_a_size_that_cannot_be_names_the_nearest(side, nearest):
    below, above = nearest
    with pytest.raises(ValueError, match=f"The nearest are {below} and {above}[.]"):
        checked_options(PIPE, {"width": side})
    assert checked_options(PIPE, {"width": above})["width"] == above


@pytest.mark.slow
def test_knockouts_of_a_batch_are_those_of_single_runs():
    """With a negative prompt and noise for each."""
    pipe = make_pipeline()
    prompts, negatives = ["a red cat", "a dog"], ["dog dog", "cat"]
    size = {"height": 128, "width": 128, "num_inference_steps": 2, "guidance_scale": 6.0}
    latents = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    run = generate(pipe, prompts, causal=True, negative_prompt=negatives, latents=latents, **size)
    for i, prompt in enumerate(prompts):
        own = {"negative_prompt": negatives[i], "latents": latents[i : i + 1], **size}
        alone = draw_without(
            prepare(pipe, prompt, i, steps=(0.5, 1.0), options=own), prompt.split()
        )
        assert len(alone) == len(run.causal_heatmaps[i])
        for one, other in zip(alone, run.causal_heatmaps[i], strict=True):
            assert other.label == one.heatmap.label
            torch.testing.assert_close(other.values, one.heatmap.values, atol=0.005, rtol=0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_images_per_prompt": 10**9}, r"1,000,000,000 image\(s\) of 128x128 .* need \d"),
        ({"height": 8 * 10**6, "width": 8 * 10**6}, "height=8000000.*at most 16,384"),
        *(({"num_images_per_prompt": value}, "from 1") for value in (0, -1, 1.5, "2", True)),
        ({"num_inference_steps": True}, "pass 1 to 1000"),
        ({"negative_prompt": "a" * 10_001}, "negative_prompt has 10,001 characters. .* 10,000"),
        ({"negative_prompt": ["cat", "\udcff"]}, r"UTF-8.*1.*'\\udcff'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_the_model_runs(options, reason):
    pipe = make_pipeline()
    pipe.unet.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=reason):
        generate(pipe, "a cat", **options)


MANY = {
    "generate": lambda pipe, **size: generate(pipe, ["a cat"] * 2_000, **size),
    "edit": lambda pipe, **size: edit(pipe, "a cat", ["a dog"] * 1_999, **size),
}


@pytest.mark.parametrize("way", MANY)
def test_the_images_of_all_prompts_of_a_call_count(way):
    """Each of them alone would do."""
    pipe = make_pipeline()
    pipe.text_encoder.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match="2,000.*GB"):
        MANY[way](pipe, height=8192, width=8192)


def test_an_image_that_cannot_be_decoded_is_refused_before_it_is_drawn(monkeypatch):
    """Its pixels alone would fit; what the autoencoder's last block holds does not."""
    pipe = make_pipeline()
    channels, side = pipe.vae.config.block_out_channels[0], 512
    most = side * side * 4 * (3 + 2 * channels)
    for memory, fits in ((most, True), (most - 1, False)):
        monkeypatch.setattr(
            "psutil.virtual_memory", lambda memory=memory: SimpleNamespace(total=memory)
        )
        with nullcontext() if fits else pytest.raises(ValueError, match="512x512.*GB"):
            checked_options(pipe, {"width": side, "height": side})
    pipe.vae.enable_tiling()  # then it is decoded in parts
    checked_options(pipe, {"width": side, "height": side})


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "there is none"),
        ("a " * 5_001, "prompt.*10,002.*10,000"),
        ("a \udcff cat", r"UTF-8.*3.*'\\udcff'"),
    ],
    ids=["none", "long", "bytes"],
)
def test_a_prompt_that_cannot_be_is_refused(prompt, reason):
    with pytest.raises(ValueError, match=reason):
        generate(make_pipeline(), prompt)


@pytest.mark.slow
def test_the_longest_prompt_keeps_page_and_settings_small(tmp_path):
    with pytest.warns(TruncationWarning):
        run = generate(make_pipeline(), "a " * 5_000, num_inference_steps=1)
    run.save(tmp_path / "run")
    for name, most in (("report.html", 1_000_000), ("run.json", 1_000_000)):
        assert (tmp_path / "run" / name).stat().st_size < most


SEEDS = {
    "generate": lambda pipe, seed: generate(pipe, "a cat", seed=seed),
    "knockout": lambda pipe, seed: knockout(pipe, "a cat", "cat", seed),
    "edit": lambda pipe, seed: edit(pipe, "a cat", "a dog", seed=seed),
    "explain": lambda pipe, seed: explain(pipe, Image.new("RGB", (128, 128)), "a cat", seed=seed),
}


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, 1.0, True, "1"])
@pytest.mark.parametrize("way", SEEDS)
def test_seeds_that_cannot_be_are_refused_as_in_a_batch(way, seed):
    with pytest.raises(ValueError, match=r"seed=.*from 0 to 2\*\*63 - 1"):
        SEEDS[way](PIPE, seed)


def test_the_last_seed_counts():
    assert checked_seeds(np.int64(2**63 - 2), 2) == [2**63 - 2, 2**63 - 1]
    with pytest.raises(ValueError, match=r"2\*\*63 - 2, for 2 images"):
        checked_seeds(2**63 - 1, 2)


def test_whole_numbers_of_numpy_are_whole_numbers():
    given = {"num_inference_steps": np.int64(2), "height": np.int32(64), "width": np.uint16(96)}
    found = checked_options(PIPE, {**given, "num_images_per_prompt": np.int8(3)})
    assert found == {**given, "num_images_per_prompt": 3}
    assert {type(value) for value in found.values()} == {int}


def test_the_bar_of_a_phase_has_its_name_for_as_long_as_it_lasts(tiny_pipe, capsys):
    tiny_pipe.set_progress_bar_config(leave=False)
    with named_bar(tiny_pipe, "looking"):
        list(tiny_pipe.progress_bar(range(2)))
        with named_bar(tiny_pipe, "inner"):
            list(tiny_pipe.progress_bar(range(2)))
    assert tiny_pipe._progress_bar_config == {"leave": False}
    err = capsys.readouterr().err
    assert err.count("looking: ") >= 2 and "inner" not in err
    with pytest.raises(RuntimeError, match="boom"):
        with named_bar(tiny_pipe, "looking"):
            raise RuntimeError("boom")
    list(tiny_pipe.progress_bar(range(2)))
    assert "looking" not in capsys.readouterr().err
