"""Maps of given images: against the formula, on drawn scenes, and that nothing is left behind."""

import numpy as np
import pytest
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionImg2ImgPipeline
from helpers.demo_words import needs_sprites
from helpers.flow_pipelines import FLOWS, flow_pipeline
from helpers.refusals import refused_unrun
from helpers.small_images import new_image
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_sdxl_pipeline, small_pipeline
from PIL import Image

from demos.scenes.emoji import random_scene
from sdattn import capture, generate, load_run
from sdattn.errors import OptionError
from sdattn.inversion.images import fit
from sdattn.inversion.invert import invert
from sdattn.models.denoiser import find_denoiser
from sdattn.runs.explaining import explain

PROMPT = "a red cat"


@pytest.fixture(scope="module")
def pipe():
    return small_pipeline()


def assert_same_maps(store, expected, rows=slice(None)):
    """``expected``: layer name to maps."""
    assert set(store.maps) == set(expected)
    for name, maps in expected.items():
        torch.testing.assert_close(store.maps[name][rows], maps, atol=1e-5, rtol=0)


def maps_of(run):
    return dict(run.store.maps)


# -- what the model is shown ----------------------------------------------------------------------


@torch.no_grad()
def by_hand(pipe, image, prompt, timesteps, seed, added=None, text=None):
    """Layer name to maps: the mean over the timesteps, without the pipeline's call."""
    pixels = torch.tensor(np.asarray(image)).permute(2, 0, 1)[None] / 127.5 - 1
    x = pipe.vae.encode(pixels).latent_dist.mean.double() * pipe.vae.config.scaling_factor
    if text is None:
        text, _ = pipe.encode_prompt(prompt, "cpu", 1, False)
    betas = torch.linspace(1e-4**0.5, 0.02**0.5, 1000, dtype=torch.float64) ** 2
    alphas = (1 - betas).cumprod(0)
    total = {}
    for t in timesteps:
        generator = torch.Generator().manual_seed(seed * 1000 + t)
        noise = torch.randn(x.shape[1:], generator=generator).double()
        noised = alphas[t].sqrt() * x + (1 - alphas[t]).sqrt() * noise
        with capture(pipe.unet) as store:
            pipe.unet(noised.float(), t, text, added_cond_kwargs=added)
        for name, maps in store.maps.items():
            total[name] = total.get(name, 0) + maps / len(timesteps)
    return total


@pytest.mark.parametrize("size", [(128, 128), (256, 64)])
def test_the_model_is_shown_the_noised_latent(pipe, size):
    run = explain(pipe, new_image(size), PROMPT, seed=3, timesteps=[40, 700, 300])
    expected = by_hand(pipe, new_image(size), PROMPT, [40, 300, 700], 3)
    assert_same_maps(run.store, expected)
    assert run.store.timesteps == [700, 300, 40]
    assert run.heatmaps[0].words == ("a", "red", "cat")
    assert run.heatmaps[0]["cat"].values.shape == (size[1] // 8, size[0] // 8)


def test_sdxl_with_its_added_conditions():
    pipe, size = make_sdxl_pipeline(), (256, 64)
    run = explain(pipe, new_image(size), PROMPT, timesteps=[500, 100])
    text, _, pooled, _ = pipe.encode_prompt(PROMPT, device="cpu", do_classifier_free_guidance=False)
    sizes = torch.tensor([[size[1], size[0], 0, 0, size[1], size[0]]]).float()
    added = {"text_embeds": pooled, "time_ids": sizes}
    expected = by_hand(pipe, new_image(size), PROMPT, [500, 100], 0, added, text)
    assert_same_maps(run.store, expected)


@pytest.mark.parametrize("name", tiered(["UNet", *FLOWS], quick=2))
def test_an_image_in_a_batch_is_shown_as_alone(pipe, name):
    used, options = (pipe, {}) if name == "UNet" else flow_pipeline(name)
    images, prompts = [new_image(seed=1), new_image(seed=2)], ["a red cat", "a red dog"]
    ways = {"timesteps": [200], "preset": "default" if name == "UNet" else "columns", **options}
    both = explain(used, images, prompts, seed=7, **ways)
    assert [one["seed"] for one in both.info] == [7, 8]
    for i in range(2):
        alone = explain(used, images[i], prompts[i], seed=7 + i, **ways)
        found, own = both.heatmaps[i], alone.heatmaps[0]
        assert found.words == own.words
        torch.testing.assert_close(found["red"].map, own["red"].map, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["UNet", "FLUX.1"])
def test_what_is_seen_at_a_timestep_depends_on_no_other(pipe, name):
    used, options = (pipe, {}) if name == "UNet" else flow_pipeline(name)
    options = {"preset": "default" if name == "UNet" else "columns", **options}
    low, high, both = (
        explain(used, new_image(), PROMPT, timesteps=t, **options) for t in ([90], [10], [10, 90])
    )
    expected = {name: (maps + high.store.maps[name]) / 2 for name, maps in low.store.maps.items()}
    assert_same_maps(both.store, expected)


@pytest.mark.slow
def test_the_seed_decides_and_the_scheduler_does_not(pipe):
    mine = small_pipeline(scheduler=EulerDiscreteScheduler.from_config(pipe.scheduler.config))
    first, again, other = (
        explain(one, new_image(), PROMPT, seed=seed)
        for one, seed in ((pipe, 2**62), (mine, 2**62), (pipe, 1))
    )
    for name, maps in first.store.maps.items():
        assert torch.equal(maps, again.store.maps[name])
        assert not torch.equal(maps, other.store.maps[name])


@pytest.mark.slow
def test_what_is_held_does_not_grow_with_the_timesteps(pipe):
    few, many = (explain(pipe, new_image(), PROMPT, timesteps=range(9, n, 9)) for n in (20, 200))
    assert len(many.store.passes) == 22
    assert few.store.nbytes == many.store.nbytes


def test_a_run_tells_how_it_was_made(pipe, tmp_path):
    image = new_image((300, 200))
    run = explain(pipe, image, PROMPT, seed=5)
    told = run.info[0]["explained"]
    assert told["way"] == "noise"
    assert told["timesteps"] == [250, 150, 50]
    assert 0 < told["reconstruction_psnr"] < 99
    # of 300x200 the model sees 160x104, so all of the width but 200 / 300 < 104 / 160 of the height
    assert run.images[0].size == (300, 195)
    assert run.info[0]["size"] == [300, 195]
    assert "file" not in told
    kept = np.asarray(run.images[0].resize((160, 104), Image.Resampling.BOX), dtype=float)
    assert np.abs(kept - np.asarray(fit(pipe, image), dtype=float)).mean() < 8
    run.save(tmp_path / "run")
    saved = load_run(tmp_path / "run")
    assert saved.info["explained"] == told
    assert saved.info["seed"] == 5
    assert saved.image.tobytes() == run.images[0].tobytes()


def test_a_safety_checker_blanks_no_image_of_the_users_own():
    pipe = small_pipeline()
    pipe.run_safety_checker = lambda images, *_: (torch.zeros_like(images), [True])
    with pytest.warns(UserWarning, match="safety checker"):
        run = explain(pipe, new_image(), PROMPT)
    assert run.images[0].tobytes() == new_image().tobytes()
    assert "blanked" not in run.info[0]
    assert "reconstruction_psnr" not in run.info[0]["explained"]


@pytest.mark.parametrize(("name", "preset"), [("UNet", "sum"), ("SD3", "seg4diff")])
def test_words_presets_and_other_texts(pipe, name, preset):
    used, options = (pipe, {}) if name == "UNet" else flow_pipeline(name)
    run = explain(used, new_image(), PROMPT, words=["cat"], refine="self", ask="a dog", **options)
    assert run.heatmaps[0].words == ("cat",)
    assert run.asked_heatmaps[0].words == ("a", "dog")
    # the default preset is a part of a run, but all of the timesteps that were chosen
    assert run.store.kept_passes == 3
    chosen = find_denoiser(used).layers[-1].name if name == "SD3" else "mid"
    layers = {"capture_options": {"layers": chosen}}
    run = explain(used, new_image(), PROMPT, preset=preset, **layers, **options)
    assert len(run.store.maps) == 1 and run.store.kept_passes == 3


# -- the way back from the noise ------------------------------------------------------------------


@pytest.mark.slow
def test_inverted_images_are_watched_on_their_way_back(pipe, monkeypatch):
    monkeypatch.setattr("sdattn.runs.preparing.SMALL", 0)  # or generate() would keep each step
    images, prompts = [new_image(seed=1), new_image(seed=2)], ["a red cat", "a dog"]
    both = explain(pipe, images, prompts, invert=True, num_inference_steps=3)
    for i in range(2):
        found = invert(
            pipe,
            images[i],
            prompts[i],
            num_inference_steps=3,
            guidance_scale=1.0,
            null_text=False,
        )
        with found.replay(pipe):
            alone = generate(pipe, prompts[i], **found.options())
        assert_same_maps(both.store, maps_of(alone), slice(i, i + 1))
        told = both.info[i]["explained"]
        assert (told["way"], told["timesteps"]) == ("inversion", [667, 334, 1])
        apart = np.subtract(images[i], alone.images[0], dtype=np.float64)
        decibels = 10 * np.log10(255**2 / np.square(apart).mean())
        assert told["reconstruction_psnr"] == pytest.approx(decibels, abs=0.05)
        assert both.info[i]["seed"] is None
        assert both.images[i].tobytes() == images[i].tobytes()


@pytest.mark.slow
@needs_sprites
def test_the_demo_comes_back_to_its_image(demo):
    scene = random_scene(np.random.default_rng(0), n_objects=1)
    image = Image.fromarray(scene.draw())
    run = explain(demo, image, scene.prompts()[0], invert=True, num_inference_steps=20)
    assert run.info[0]["explained"]["reconstruction_psnr"] > 30


# -- what the maps are good for -------------------------------------------------------------------


@pytest.mark.slow
@needs_sprites
def test_words_point_at_their_own_objects_in_drawn_images(demo):
    rng = np.random.default_rng(3)
    scenes = [random_scene(rng, held_out=True, n_objects=2) for _ in range(10)]
    images = [Image.fromarray(scene.draw()) for scene in scenes]
    run = explain(demo, images, [scene.caption(rng) for scene in scenes])
    right = []
    for scene, heatmaps in zip(scenes, run.heatmaps, strict=True):
        masks = torch.from_numpy(scene.masks(64))
        for thing, own, other in zip(scene.objects, masks, masks.flip(0), strict=True):
            values = heatmaps[thing.noun].resize((64, 64))
            right.append(bool(values[own].mean() > 1.5 * values[~own].mean()))
            right.append(bool(values[own].mean() > values[other].mean()))
    assert len(right) == 40
    assert np.mean(right) > 0.9


# -- nothing is left behind -----------------------------------------------------------------------


WAYS = {"UNet": {}, "UNet, inverted": {"invert": True, "num_inference_steps": 2}}


@pytest.mark.parametrize("name", [*WAYS, "SD3", "FLUX.1"])
@pytest.mark.parametrize(
    "failing", tiered([None, "denoiser", "vae.encoder", "vae.decoder"], quick=2)
)
def test_explaining_restores_the_pipeline(failing, name):
    if name in WAYS:
        pipe, options = small_pipeline(scheduler=EulerDiscreteScheduler(steps_offset=1)), WAYS[name]
    else:
        pipe, options = flow_pipeline(name)
    scheduler, named, model = pipe.scheduler, pipe.config["scheduler"], find_denoiser(pipe).model
    processors = model.attn_processors

    class BoomError(RuntimeError):
        pass

    def fail(*_):
        raise BoomError

    if failing is None:
        explain(pipe, new_image(), PROMPT, **options)
    else:
        module = model if failing == "denoiser" else pipe.vae.get_submodule(failing[4:])
        hook = module.register_forward_hook(fail)
        with pytest.raises(BoomError):
            explain(pipe, new_image(), PROMPT, **options)
        hook.remove()
    assert pipe.scheduler is scheduler
    assert pipe.config["scheduler"] == named
    after = model.attn_processors
    assert all(after[name] is one for name, one in processors.items())
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    assert sum(hooks) == 0


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"image": "cat.png"}, FileNotFoundError, "no file"),
        ({"image": Image.new("RGB", (0, 4))}, ValueError, r"\(0, 4\) pixels"),
        ({"image": Image.new("F", (8, 8))}, ValueError, "mode F"),
        ({"image": []}, ValueError, r"0 image\(s\) and 1 prompt\(s\)"),
        ({"image": [], "prompt": []}, ValueError, r"0 image\(s\) and 0 prompt\(s\)"),
        ({"prompt": ["a cat", "a dog"]}, ValueError, r"1 image\(s\) and 2 prompt\(s\)"),
        (
            {"image": [new_image(), new_image((200, 100))], "prompt": ["a cat", "a dog"]},
            ValueError,
            "come to 128x128, 184x88 pixels",
        ),
        ({"prompt": "  "}, ValueError, "is empty"),
        ({"words": ["bird"]}, KeyError, "'bird'.*prompt"),
        ({"words": "cat"}, ValueError, "pass a list of words"),
        ({"timesteps": []}, ValueError, r"timesteps=\[\].*999"),
        ({"timesteps": [0]}, ValueError, "1 to 999"),
        ({"timesteps": [1000]}, ValueError, "1 to 999"),
        ({"timesteps": [-5]}, ValueError, "1 to 999"),
        ({"timesteps": [10.5]}, ValueError, "1 to 999"),
        ({"timesteps": [True]}, ValueError, "1 to 999"),
        ({"timesteps": "10"}, ValueError, "1 to 999"),
        ({"timesteps": 10}, ValueError, "timesteps=10"),
        ({"timesteps": [10, 20, 10]}, ValueError, "pass each once"),
        ({"timesteps": [10], "invert": True}, ValueError, "goes through its own"),
        ({"num_inference_steps": 5}, ValueError, "num_inference_steps"),
        ({"guidance_scale": 5, "width": 64}, ValueError, "guidance_scale"),
        ({"negative_prompt": "dog"}, ValueError, "negative_prompt"),
        ({"guidance_scale": 5.0, "invert": True}, ValueError, "num_inference_steps"),
        ({"num_inference_steps": 0, "invert": True}, ValueError, "pass 1 to 1000"),
        ({"clip_skipp": 1}, ValueError, "'clip_skipp'.*clip_skip"),
        ({"capture_options": {"branch": "both"}}, ValueError, "capture_options"),
        ({"capture_options": {"kinds": ("self",)}}, ValueError, "where the words"),
        ({"preset": "best"}, ValueError, "preset='best'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(pipe, changes, error, message):
    with refused_unrun(pipe, message, error):
        explain(pipe, **{"image": new_image(), "prompt": PROMPT, **changes})


def test_clip_skip_is_refused_where_diffusers_fails_on_it(pipe):
    """diffusers reads text_encoder.text_model, which transformers 5 has moved."""
    if hasattr(pipe.text_encoder, "text_model"):
        pytest.skip("this transformers has it")
    with pytest.raises(AttributeError, match="text_model"):  # else the refusal is out of date
        pipe.encode_prompt(PROMPT, "cpu", 1, False, clip_skip=1)
    told = r"`clip_skip=1`: diffusers cannot skip layers of a CLIPTextModel .*Leave it out"
    for call in (
        lambda: explain(pipe, new_image(), PROMPT, clip_skip=1),
        lambda: generate(pipe, PROMPT, clip_skip=1),
    ):
        with pytest.raises(OptionError, match=told):
            call()
    explain(pipe, new_image(), PROMPT, clip_skip=None, timesteps=[50])
    run = explain(make_sdxl_pipeline(), new_image(), PROMPT, clip_skip=1, timesteps=[50])
    assert run.heatmaps[0]["cat"].values.max() > 0


def test_other_pipelines_are_refused():
    with pytest.raises(TypeError, match="found a StableDiffusionImg2ImgPipeline"):
        explain(small_pipeline(StableDiffusionImg2ImgPipeline), new_image(), PROMPT)


@pytest.mark.slow
def test_a_photo_is_kept_as_fine_as_it_was_and_the_map_lies_where_it_lay(pipe, tmp_path):
    photo = Image.new("RGB", (1201, 900), (40, 60, 80))
    photo.paste((250, 240, 230), (900, 100, 1100, 300))
    photo.save(tmp_path / "my photo.png")
    run = explain(pipe, Image.open(tmp_path / "my photo.png"), PROMPT)
    assert run.info[0]["explained"]["file"] == "my photo.png"
    assert run.images[0].size == (1157, 900)  # the model sees 144x112, so 44 columns less
    row = [run.images[0].getpixel((x, 150))[0] for x in (870, 886, 1070, 1086)]
    assert np.abs(np.array(row) - (40, 250, 250, 40)).max() < 12
    run.heatmaps[0]["cat"].overlay(run.images[0])  # refused where proportions differ
    huge = explain(pipe, photo.resize((6005, 4500)), PROMPT)
    assert max(huge.images[0].size) == 1536
    assert "file" not in huge.info[0]["explained"]
    torch.testing.assert_close(huge.heatmaps[0].maps, run.heatmaps[0].maps, atol=0.02, rtol=0)
