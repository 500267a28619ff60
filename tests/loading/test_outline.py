"""outline(): what it says of a model without weights, against the pipeline loaded with them."""

import inspect
import json
import logging
import math
from functools import partial

import huggingface_hub.constants
import pytest
import torch
from diffusers import DDPMPipeline, DiffusionPipeline, UNet2DModel
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from diffusers.utils import logging as diffusers_log
from helpers.matrix import ROWS, few_are_quick
from helpers.tiny_pipelines import make_pipeline, make_scheduler
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPImageProcessor
from transformers.utils import logging as transformers_log

from sdattn import load_pipeline, read_prompts
from sdattn.cli.info import shortcomings
from sdattn.loading.outline import outline
from sdattn.models.demos import demo_of
from sdattn.models.facts import cell_size, default_size, images_a_prompt, latent_size, size_unit
from sdattn.models.pipeline_call import checked_options

# Left out are those that differ from one of these in weights only or are not saved as they are
# (LoRA, IP-Adapter, FreeU), and Stable Diffusion 3 without T5, of which diffusers saves an index
# that it then refuses to load.
NAMES = (
    "Stable Diffusion 1.x",
    "SDXL",
    "SDXL refiner",
    "LCM",
    "image to image",
    "PAG",
    "ControlNet",
    "T2I-Adapter",
    "textual inversion",
    "AnimateDiff",
    "Heun scheduler (second order)",
    "Stable Diffusion 3",
    "Stable Diffusion 3.5 (dual attention, normed)",
    "FLUX.1",
    "FLUX.1 Kontext",
    "FLUX.2",
    "FLUX.2 klein",
    "Qwen-Image",
    "PixArt Alpha",
    "PixArt Sigma",
    "Sana",
)
MAKE = {row.name: row.make for row in ROWS}
FAST_TOKENIZER = ["transformers", "PreTrainedTokenizerFast"]
PROMPTS = ["a red cat", "dog, dog and a cat"]


def without_weights(folder):
    files = list(folder.rglob("*.safetensors"))
    assert files
    for file in files:
        file.unlink()
    return folder


@pytest.fixture(scope="module", params=["demo", *few_are_quick(NAMES)])
def both(request, tmp_path_factory):
    """A loaded pipeline, and the outline of its folder after the weights were deleted."""
    if request.param == "demo":
        return load_pipeline("demo", device="cpu"), outline("demo")
    folder = tmp_path_factory.mktemp("model")
    MAKE[request.param]().save_pretrained(folder)
    if request.param == "FLUX.2":  # its tiny processor is a class of these tests
        index = folder / "model_index.json"
        said = json.loads(index.read_text())
        index.write_text(json.dumps({**said, "tokenizer": FAST_TOKENIZER}))
    return load_pipeline(folder, device="cpu"), outline(without_weights(folder))


def answer(question, *args, **options):
    try:
        return question(*args, **options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


checked = partial(checked_options, videos=True)


def models(pipe):
    found = pipe.components.items()
    return {name: part for name, part in found if isinstance(part, torch.nn.Module)}


@pytest.mark.slow
def test_it_is_the_same_pipeline_on_the_meta_device(both):
    pipe, made = both
    assert type(made) is type(pipe)
    assert made.config == pipe.config
    assert {k: type(v) for k, v in made.components.items()} == {
        k: type(v) for k, v in pipe.components.items()
    }
    for name, part in models(made).items():
        tensors = part.state_dict()
        assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
        shapes = {key: tensor.shape for key, tensor in models(pipe)[name].state_dict().items()}
        assert {key: tensor.shape for key, tensor in tensors.items()} == shapes


def test_every_question_is_answered_alike(both):
    pipe, made = both
    for question in (size_unit, default_size, cell_size, latent_size, demo_of, shortcomings):
        assert question(made) == question(pipe)
    for options in ({}, {"num_images_per_prompt": 3}, {"num_frames": 5}):
        assert images_a_prompt(made, options) == images_a_prompt(pipe, options)
    known = inspect.signature(pipe.__call__).parameters
    good = {"num_inference_steps": 3}
    if "height" in known:
        good |= {"height": 4 * size_unit(pipe)}
    assert checked(made, good) == checked(pipe, good)
    for options, is_bad in (
        ({"num_inference_steps": 0}, True),
        ({"num_inference_steps": 10**6}, True),
        ({"height": size_unit(pipe) + 1}, True),
        ({"num_inference_step": 3}, True),
        ({"guidance_scale": math.nan}, True),
        ({"output_type": "np"}, True),
        ({}, False),
        ({"use_resolution_binning": True}, False),
        ({"guidance_scale": 1, "negative_prompt": "a"}, False),
    ):
        told = answer(checked, pipe, options)
        assert not is_bad or told.startswith(("OptionError", "InvalidValueError"))
        assert answer(checked, made, options) == told
    clean = {"clean_caption": False} if "clean_caption" in known else {}
    read = read_prompts(made, PROMPTS, **clean)
    assert read == read_prompts(pipe, PROMPTS, **clean)
    assert [word.text for word in read[0].words] == ["a", "red", "cat"]
    assert answer(read_prompts, made, "") == answer(read_prompts, pipe, "")


@pytest.mark.slow
def test_a_safety_checker_is_no_hindrance_and_all_is_silent(tmp_path, capfd, caplog):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "projection_dim": 8}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=sizes, vision_config=vision, projection_dim=8)
    checker = StableDiffusionSafetyChecker(config)
    make_pipeline(safety_checker=checker, feature_extractor=CLIPImageProcessor()).save_pretrained(
        tmp_path
    )

    diffusers_log.enable_progress_bar()
    logs = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    levels = [log.level for log in logs]
    for log in logs:
        log.addHandler(caplog.handler)
    capfd.readouterr()
    try:
        made = outline(without_weights(tmp_path))
    finally:
        for log in logs:
            log.removeHandler(caplog.handler)
    assert type(made.safety_checker) is StableDiffusionSafetyChecker
    assert (*capfd.readouterr(), caplog.text) == ("", "", "")
    assert diffusers_log.is_progress_bar_enabled()
    assert [log.level for log in logs] == levels


def test_an_old_name_of_a_class_is_understood(tmp_path):
    MAKE["PixArt Alpha"]().save_pretrained(tmp_path)
    for file in (tmp_path / "model_index.json", tmp_path / "transformer/config.json"):
        file.write_text(file.read_text().replace("PixArtTransformer2DModel", "Transformer2DModel"))
    pipe = load_pipeline(tmp_path, device="cpu")
    assert type(outline(tmp_path).transformer) is type(pipe.transformer)


@pytest.mark.slow
def test_what_only_loading_tells_has_no_outline(tmp_path):
    save_file({"cond_stage_model.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert outline(tmp_path / "model.safetensors") is None
    MAKE["ControlNet, two at once"]().save_pretrained(tmp_path / "two")
    assert outline(tmp_path / "two") is None


@pytest.mark.parametrize("model", ["./nowhere", "dmeo", "empty", "~/no such model", "no/such"])
def test_a_model_that_is_nowhere_is_told_as_by_loading(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    kind = check_errors(model)
    assert issubclass(kind, ValueError if model == "empty" else OSError)


@pytest.mark.slow
def test_a_folder_that_cannot_be_loaded_is_told_as_by_loading(tmp_path):
    folder = tmp_path / "unconditional"
    unet = UNet2DModel(
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        norm_num_groups=1,
    )
    DDPMPipeline(unet, make_scheduler()).save_pretrained(folder)
    assert issubclass(check_errors(folder), TypeError)

    folder = tmp_path / "unknown"
    make_pipeline().save_pretrained(folder)
    index = folder / "model_index.json"
    said = index.read_text()
    index.write_text(said.replace("StableDiffusionPipeline", "NoSuchPipeline"))
    assert issubclass(check_errors(folder), ValueError)
    index.write_text(said.replace("UNet2DConditionModel", "NoSuchModel"))
    check_errors(folder)
    index.write_text(said)
    (folder / "unet" / "config.json").unlink()
    assert issubclass(check_errors(folder), OSError)


def check_errors(model):
    bars, level = diffusers_log.is_progress_bar_enabled(), transformers_log.get_verbosity()
    with pytest.raises((ValueError, TypeError, AttributeError, OSError)) as told:
        load_pipeline(model, device="cpu")
    with pytest.raises(type(told.value)) as told_without_weights:
        outline(model)
    assert str(told_without_weights.value) == str(told.value)
    assert diffusers_log.is_progress_bar_enabled() == bars
    assert transformers_log.get_verbosity() == level
    return type(told.value)


@pytest.mark.slow
def test_a_model_of_the_hub_keeps_its_name(tmp_path, monkeypatch):
    make_pipeline().save_pretrained(tmp_path)
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(DiffusionPipeline, "download", download)
    made = outline("owner/name")
    loaded = load_pipeline("owner/name", device="cpu")
    of_its_own = {"variant": None, "revision": None}
    options = {"use_safetensors": True, "trust_remote_code": False, **of_its_own}
    assert asked == [("owner/name", options)] * 2
    assert made.name_or_path == loaded.name_or_path == "owner/name"


def test_the_hub_s_folder_is_judged_like_any_other(tmp_path, monkeypatch):
    make_pipeline().save_pretrained(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace('"transformers"', '"pathlib"'))
    monkeypatch.setattr(DiffusionPipeline, "download", lambda *_, **__: str(tmp_path))
    assert issubclass(check_errors("owner/name"), ValueError)
