"""Inpainting "only masked" (padding_mask_crop): maps lie where the crop lies, in whatever holds
them."""

import inspect
import warnings
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    ControlNetModel,
    Flux2KleinInpaintPipeline,
    FluxInpaintPipeline,
    FluxKontextInpaintPipeline,
    QwenImageInpaintPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
)
from helpers.page_data import data_of
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline, make_small_unet
from helpers.transformer_rows import flux, klein, qwen_image, sd3, vae
from PIL import Image

import sdattn
from sdattn import AttentionStore, CaptureWarning, TorchAttnProcessor, capture, generate, load_run
from sdattn.figures import figure
from sdattn.models.crops import Crop, crop_in
from sdattn.runs.imagerun import group_heatmaps, head_heatmaps, step_heatmaps
from sdattn.runs.report import report

PROMPT, SIZE, BOX = "a red cat", (320, 256), (200, 150, 240, 190)
# where diffusers crops for BOX, 8 pixels more and 96x64: 56 pixels high, 1.5 times as wide
CROP = Crop((178, 142, 262, 198), SIZE, (96, 64))


def inpainted(**options):
    """What the pipelines are called with: noise, of which a square is masked."""
    numbers, mask = np.random.default_rng(0), Image.new("L", SIZE)
    mask.paste(255, BOX)
    image = Image.fromarray(numbers.integers(0, 256, (*SIZE[::-1], 3), np.uint8))
    given = {"image": image, "mask_image": mask, "strength": 1.0, "num_inference_steps": 2}
    return {**given, "height": 64, "width": 96, "padding_mask_crop": 8, **options}


def of(kind, pipe, **parts):
    made = kind(**{**pipe.components, **parts})
    made.set_progress_bar_config(disable=True)
    return made


def controlled():
    kind, unet = StableDiffusionControlNetInpaintPipeline, make_small_unet()
    return make_pipeline(kind, unet=unet, controlnet=ControlNetModel.from_unet(unet))


def small(**parts):
    return make_pipeline(StableDiffusionInpaintPipeline, unet=make_small_unet(**parts))


PIPELINES = {
    "Stable Diffusion": small,
    "9 channels": lambda: small(in_channels=9),
    "ControlNet": controlled,
    "XL": lambda: of(StableDiffusionXLInpaintPipeline, make_sdxl_pipeline()),
    "SD3": lambda: of(
        StableDiffusion3InpaintPipeline,
        sd3(in_channels=16, out_channels=16),
        vae=vae(shift_factor=0.1, latent_channels=16),
    ),
    "FLUX": lambda: of(FluxInpaintPipeline, flux()),
    "FLUX.2": lambda: of(Flux2KleinInpaintPipeline, klein()),
    "Qwen-Image": lambda: of(QwenImageInpaintPipeline, qwen_image()),
}


@pytest.fixture(scope="module")
def pipe():
    return small()


@pytest.fixture(scope="module")
def run(pipe):
    watch = {"steps": "all", "heads": "all", "branch": "both"}
    options = inpainted(negative_prompt="a dog", ask="a dog")
    return generate(pipe, PROMPT, capture_options=watch, **options)


@pytest.mark.parametrize("name", tiered(PIPELINES, quick=2, daily=4))
def test_maps_lie_where_the_pipeline_pastes(name, tmp_path):
    pipe, options = PIPELINES[name](), inpainted()
    if name == "ControlNet":
        options["control_image"] = options["image"]
    if name == "FLUX.2":  # it draws at the image's size
        del options["height"], options["width"]
        options["preset"] = "columns"  # the default sharpens, which makes the lowest value 0
    run = generate(pipe, PROMPT, **options)
    [image], [heatmaps] = run.images, run.heatmaps
    assert image.size == SIZE
    crop = heatmaps.crop
    drawn = options.get("width", 320), options.get("height", 256)
    box = pipe.mask_processor.get_crop_region(options["mask_image"], *drawn, pad=8)
    assert crop == Crop(box, SIZE, drawn) and crop == run[0].settings.crop
    heat = heatmaps["cat"].resize(SIZE[::-1])
    left, top, right, bottom = box
    assert (heat[top:bottom, left:right] > 0).all()
    heat[top:bottom, left:right] = 0
    assert not heat.any()
    # what was drawn and pasted is in the box
    changed = (np.asarray(image) != np.asarray(options["image"])).any(-1)
    assert changed[top:bottom, left:right].any()
    changed[top:bottom, left:right] = False
    assert not changed.any()
    back = load_run(run.save(tmp_path / "run")[0])
    assert back.heatmaps.crop == crop
    torch.testing.assert_close(back.heatmaps["cat"].map, heatmaps["cat"].map, atol=5e-3, rtol=0)


def test_without_a_crop_maps_are_of_the_whole_image(pipe):
    run = generate(pipe, PROMPT, **inpainted(padding_mask_crop=None))
    assert run.images[0].size == (96, 64) and run.heatmaps[0].crop is None
    assert "crop" not in run.info[0]


def test_where_the_crop_itself_comes_out_maps_are_of_all_of_it():
    pipe = of(FluxKontextInpaintPipeline, flux())
    sizes = {"max_area": 64 * 96, "_auto_resize": False}
    options = inpainted(**sizes)
    run = generate(pipe, PROMPT, **options)
    [image] = run.images
    around = np.asarray(image) != np.asarray(options["image"].resize(image.size))
    assert around[:142].mean() > 0.9 and run.heatmaps[0].crop is None
    run.heatmaps[0]["cat"].overlay(image)


def crop_pipelines():
    """The pipelines of diffusers that know the option."""
    for name in dir(diffusers):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = getattr(diffusers, name) if name.endswith("Pipeline") else object
        call = vars(kind).get("__call__")
        if call is not None and "padding_mask_crop" in inspect.signature(call).parameters:
            yield kind


@pytest.mark.slow
def test_every_pipeline_with_the_option_is_read():
    kinds = list(crop_pipelines())
    assert len(kinds) >= 16
    image = Image.new("RGB", SIZE)
    about = {"crops_coords": CROP.box, "original_image": image, "width": 96, "height": 64}
    for kind in kinds:
        source = inspect.getsource(kind.__call__)
        code = inspect.unwrap(kind.__call__).__code__
        pastes = "apply_overlay(" in source  # else the crop itself is the image
        assert not pastes or set(about) <= {*code.co_varnames, *code.co_cellvars}
        assert crop_in(object.__new__(kind), about) == (CROP if pastes else None), kind


def test_a_subclass_with_a_call_around_it_is_read():
    class Own(StableDiffusionInpaintPipeline):
        def __call__(self, *args, **kwargs):
            crops_coords = "something else"  # noqa: F841
            return super().__call__(*args, **kwargs)

    own = make_pipeline(Own, unet=make_small_unet())
    with capture(own) as store:
        own(PROMPT, **inpainted())
    assert store.crop == CROP


def test_capture_and_an_attached_store_know_the_crop(pipe):
    store = AttentionStore(pipeline=pipe)
    before = pipe.unet.attn_processors
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    try:
        with capture(pipe) as captured:
            pipe(PROMPT, **inpainted())
    finally:
        pipe.unet.set_attn_processor(before)
        store.detach()
    for found in (captured.heatmaps()[0], sdattn.heatmaps(store)[0]):
        assert found.crop == CROP and not found["cat"].map[:15].any()
    store.reset()
    assert store.crop is None


@pytest.mark.slow
def test_all_that_a_run_holds_is_of_the_crop(run, tmp_path):
    [made] = run
    back = load_run(run.save(tmp_path / "run")[0])
    for held in (made, back):
        looks = [*group_heatmaps(held).values(), *step_heatmaps(held)]
        looks += [head for heads in head_heatmaps(held).values() for head in heads.values()]
        assert len(looks) > 4 and {maps.crop for maps in looks} == {CROP}
        assert {maps.crop for more in held.more.values() for maps in more.maps} == {CROP}
        assert [*held.more] == ["negative", "asked"]
    grey = np.asarray(made.image.convert("L").convert("RGB"))
    for folder in ("heatmaps", "negative/heatmaps", "asked/heatmaps"):
        for path in (tmp_path / "run" / folder).iterdir():
            shown = np.asarray(Image.open(path))[: SIZE[1]]
            assert np.array_equal(shown[:142], grey[:142])
            assert np.array_equal(shown[:, :178], grey[:, :178])


def test_a_page_says_where_the_crop_lies(run):
    page = report(run[0])
    assert data_of(page)["part"] == pytest.approx((178 / 320, 142 / 256, 262 / 320, 198 / 256))
    assert b"84x56 pixels, 178 from the left and 142 from the top" in page
    whole = replace(run[0], heatmaps=sdattn.Heatmaps(run.heatmaps[0].prompt, run.heatmaps[0].maps))
    assert data_of(report(whole))["part"] is None


@pytest.mark.slow
def test_figures_and_comparisons_lay_the_maps(run, pipe):
    from sdattn.runs.diff import diff

    shown = figure(run[0], "words", ["cat"])
    cat = shown.axes[1]
    assert np.array_equal(cat.images[0].get_array(), run.heatmaps[0]["cat"].map)
    other = generate(pipe, PROMPT, seed=1, **inpainted())
    [word] = diff(run, other, words=["cat"]).words
    assert word.difference.shape == run.heatmaps[0]["cat"].map.shape
    assert not word.difference[:15].any() and word.difference.any()
    pair = np.stack([r.heatmaps[0]["cat"].values.flatten() for r in (run, other)])
    assert word.correlation == pytest.approx(np.corrcoef(pair)[0, 1], abs=1e-6)


def test_a_knockout_refuses_a_crop_before_it_draws(pipe):
    with pytest.raises(ValueError, match="padding_mask_crop=8"):
        generate(pipe, PROMPT, causal=True, **inpainted())


def test_looking_changes_nothing_and_warns_of_nothing(pipe):
    plain, seen = (torch.Generator().manual_seed(0) for _ in range(2))
    before = pipe(PROMPT, generator=plain, **inpainted()).images[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        with capture(pipe):
            after = pipe(PROMPT, generator=seen, **inpainted()).images[0]
    assert before.tobytes() == after.tobytes()
