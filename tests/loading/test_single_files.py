"""Single files: diffusers reads them with the settings of a folder, and what it cannot read is
refused by the file's name."""

import json
import math
import shutil
import struct

import pytest
import torch
from helpers.ldm_checkpoints import filled, refiner, sd1, sd2, sdxl
from helpers.ldm_folders import save_settings
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline
from helpers.tiny_tokenizers import tiny_tokenizer
from safetensors.torch import save_file

import sdattn
from sdattn import load_pipeline

MADE = {"sd1": sd1, "sd2": sd2, "sdxl": sdxl, "refiner": refiner}
UNET, CLIP = "model.diffusion_model.", "cond_stage_model.transformer.text_model."
KEYS = f"{UNET}middle_block.1.transformer_blocks.0.attn2.to_k.weight"
FIRST = f"{UNET}input_blocks.0.0.weight"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No hub, and an empty cache."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    return {name: save_settings(name, folder / name) for name in MADE}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def save(tmp_path):
    def save(weights, name="tiny.safetensors"):
        save_file(weights, tmp_path / name)
        return tmp_path / name

    return save


def tiny(name, **changes):
    """The tensors of a checkpoint, some of them others; None takes one out."""
    weights = {**filled(MADE[name]()), **changes}
    return {key: value for key, value in weights.items() if value is not None}


# -- loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiered(["sd1", "sdxl", "sd2"]))
@pytest.mark.slow
def test_a_single_file_loads_draws_and_is_captured(name, save, settings):
    path = save(tiny(name))
    pipe = load_pipeline(path, device="cpu", config=settings[name])
    run = sdattn.generate(pipe, "a red cat", num_inference_steps=2, height=64, width=64)
    assert run.heatmaps[0].words == ("a", "red", "cat")
    assert run.info[0]["model"] == str(path)
    assert run.info[0]["loading"] == {"config": str(settings[name])}


@pytest.mark.slow
def test_weights_are_those_of_the_file(save, settings):
    """Under diffusers' names; the folder has other weights."""
    weights = tiny("sdxl")
    pipe = load_pipeline(save(weights), device="cpu", config=settings["sdxl"])
    unet, text = pipe.unet.state_dict(), pipe.text_encoder_2.state_dict()
    attention = "transformer_blocks.1.attn2.to_k.weight"
    assert torch.equal(
        unet[f"down_blocks.2.attentions.1.{attention}"],
        weights[f"{UNET}input_blocks.8.1.{attention}"],
    )
    assert torch.equal(
        unet["up_blocks.2.resnets.2.conv2.weight"],
        weights[f"{UNET}output_blocks.8.0.out_layers.3.weight"],
    )
    assert torch.equal(
        pipe.vae.state_dict()["decoder.up_blocks.0.resnets.0.conv1.weight"],
        weights["first_stage_model.decoder.up.3.block.0.conv1.weight"],
    )
    # queries, keys and values are one matrix there, and the projection stands on its side
    joined = weights["conditioner.embedders.1.model.transformer.resblocks.1.attn.in_proj_weight"]
    names = [f"text_model.encoder.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(torch.cat([text[name] for name in names]), joined)
    projection = weights["conditioner.embedders.1.model.text_projection"]
    assert torch.equal(text["text_projection.weight"], projection.T)


@pytest.mark.slow
def test_settings_are_those_of_the_folder(save, settings):
    path, options = save(tiny("sd2")), {"device": "cpu", "config": settings["sd2"]}
    pipe = load_pipeline(path, **options)
    other = load_pipeline(path, **options, scheduler="EulerDiscreteScheduler")
    assert type(other.scheduler).__name__ == "EulerDiscreteScheduler"
    for scheduler in (pipe.scheduler, other.scheduler):
        assert scheduler.config.prediction_type == "v_prediction"
    assert pipe.text_encoder.config.num_hidden_layers == 23  # the file has 24
    assert pipe.tokenizer.pad_token == "!"
    pipe = load_pipeline(save(tiny("sdxl")), device="cpu", config=settings["sdxl"])
    assert pipe.vae.config.scaling_factor == 0.13025


@pytest.mark.slow
def test_the_refiner_and_inpainting_load(save, settings, tmp_path):
    pipe = load_pipeline(save(tiny("refiner")), device="cpu", config=settings["refiner"])
    assert pipe.text_encoder is None and pipe.config.requires_aesthetics_score
    folder = save_settings("sd1", tmp_path / "inpaint", channels=9)
    pipe = load_pipeline(save(filled(sd1(9))), device="cpu", config=folder)
    assert type(pipe).__name__ == "StableDiffusionInpaintPipeline"


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", tiered([torch.float16, torch.bfloat16, torch.float8_e4m3fn], quick=2)
)
def test_weights_in_fewer_bits_load_in_the_dtype_that_is_asked_for(save, settings, dtype):
    weights = {name: weight.to(dtype) for name, weight in tiny("sd1").items()}
    pipe = load_pipeline(save(weights), device="cpu", config=settings["sd1"])
    assert pipe.unet.dtype == pipe.text_encoder.dtype == torch.float32
    assert torch.equal(pipe.unet.conv_in.weight, weights[FIRST].float())


# -- where settings and tokenizers come from -------------------------------------------------------


def test_what_to_do_without_settings_is_told(save):
    with pytest.raises(ValueError, match="`config`") as told:
        load_pipeline(save(tiny("sd1")), device="cpu")
    assert "stable-diffusion-v1-5/stable-diffusion-v1-5" in str(told.value)
    assert "tiny.safetensors" in str(told.value)


@pytest.mark.slow
def test_settings_are_found_in_the_hubs_cache(save, settings, tmp_path):
    name = "models--stable-diffusion-v1-5--stable-diffusion-v1-5"
    repository = tmp_path / "cache" / name
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(settings["sd1"], repository / "snapshots" / "0123", ignore=ignore)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    path = save(tiny("sd1"))
    assert len(load_pipeline(path, device="cpu").tokenizer) == 520
    pipe = load_pipeline(path, device="cpu", config="stable-diffusion-v1-5/stable-diffusion-v1-5")
    assert torch.equal(pipe.unet.conv_in.weight, tiny("sd1")[FIRST])
    with pytest.raises(OSError, match="'no/such'"):
        load_pipeline(path, device="cpu", config="no/such")
    for index in repository.rglob("model_index.json"):  # a cache with other files of it alone
        index.unlink()
    with pytest.raises(ValueError, match="no model_index.json.*config"):
        load_pipeline(path, device="cpu")


def test_settings_that_do_not_fit_are_told(save, settings, tmp_path):
    path = save(tiny("sd1"))
    with pytest.raises(ValueError, match=r"tiny.safetensors.*StableDiffusionXLPipeline.*xl"):
        load_pipeline(path, device="cpu", config=settings["sdxl"])
    with pytest.raises(ValueError, match="config=.*no such folder"):
        load_pipeline(path, device="cpu", config=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="config=.*model_index.json"):
        load_pipeline(path, device="cpu", config=tmp_path / "empty")
    with pytest.raises(ValueError, match="config=.*only a single"):
        load_pipeline(settings["sd1"], device="cpu", config=settings["sd1"])


def test_code_in_the_settings_is_refused(save, settings, tmp_path):
    folder = shutil.copytree(settings["sd1"], tmp_path / "hostile")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "unet": ["os", "system"]}))
    with pytest.raises(ValueError, match="asks for code"):
        load_pipeline(save(tiny("sd1")), device="cpu", config=folder)


@pytest.mark.slow
def test_another_tokenizer_keeps_padding_and_length(save, settings, tokenizer, tmp_path):
    path, options = save(tiny("sdxl")), {"device": "cpu", "config": settings["sdxl"]}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer").symlink_to(tokenizer)
    pipe = load_pipeline(path, **options, tokenizer=tmp_path / "model")
    given = {"padding": "max_length", "max_length": 8}
    ends = [one("cat", **given).input_ids[-1] for one in (pipe.tokenizer, pipe.tokenizer_2)]
    assert ends == [519, tiny_tokenizer().convert_tokens_to_ids("!")]
    assert pipe.tokenizer_2.model_max_length == 77
    with pytest.raises(ValueError, match="there is no tokenizer.json or vocab.json in it"):
        load_pipeline(path, **options, tokenizer=tmp_path)
    tiny_tokenizer(merges=("c a",)).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="its vocabulary has 515 tokens, .* with 520"):
        load_pipeline(path, **options, tokenizer=tmp_path / "other")


# -- hostile files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    tiered(
        [
            f"{UNET}output_blocks.{'9' * 5000}.x",
            "a\0b",
            f"{UNET}input_blocks.300000000.x",
            "conditioner.embedders.0.transformer.resblocks.99999999.x",
            "first_stage_model.encoder.down.99999999999.block.0.x",
            "🙂" * 500,
        ],
        quick=2,
    ),
    ids=ascii,
)
@pytest.mark.slow
def test_odd_names_beside_a_whole_model_change_nothing(save, settings, name):
    path = save({**tiny("sd1"), name: torch.zeros(1)})
    pipe = load_pipeline(path, device="cpu", config=settings["sd1"])
    assert torch.equal(pipe.unet.conv_in.weight, tiny("sd1")[FIRST])


HOSTILE = {
    "a scalar for a convolution": ({FIRST: torch.tensor(1.0)}, "conv_in"),
    "one axis for a matrix": ({KEYS: torch.zeros(64)}, "shape"),
    "no elements": ({KEYS: torch.zeros(64, 0)}, "shape"),
    "a state within": ({"state_dict": torch.zeros(3)}, "cannot be loaded"),
    "NaN alone": ({KEYS: torch.full((64, 64), math.nan)}, "not finite"),
    "one infinity": ({f"{CLIP}final_layer_norm.bias": torch.full((64,), math.inf)}, "not finite"),
    "no keys": ({KEYS: None}, "lack"),
    "no first norm": ({f"{CLIP}final_layer_norm.weight": None}, "lack"),
    "no positions": ({f"{CLIP}embeddings.position_embedding.weight": None}, "text encoder"),
}


@pytest.mark.parametrize("case", tiered(HOSTILE, quick=3))
def test_a_tensor_that_cannot_be_is_refused_by_the_files_name(save, settings, case):
    changes, noun = HOSTILE[case]
    path = save(tiny("sd1", **changes))
    with pytest.raises(sdattn.SdattnError, match=noun) as told:
        load_pipeline(path, device="cpu", config=settings["sd1"])
    assert "tiny.safetensors" in str(told.value)
    with pytest.raises(sdattn.SdattnError, match=r"tiny.safetensors"):  # with nothing to go by
        load_pipeline(path, device="cpu")


PARTS = {
    "sd1": (UNET, CLIP, "first_stage_model."),
    "sd2": (UNET, "cond_stage_model.model.transformer.", "first_stage_model.decoder."),
    "sdxl": (UNET, "conditioner.embedders.0.", "conditioner.embedders.1.", "first_stage_model."),
}


@pytest.mark.parametrize("name", tiered(PARTS, quick=0))
def test_a_checkpoint_without_a_part_is_refused_and_no_weights_are_the_folders(
    save, settings, name
):
    weights = tiny(name)
    for part in PARTS[name]:
        path = save({key: held for key, held in weights.items() if not key.startswith(part)})
        told = r"tiny.safetensors.*(no text encoder|cannot be loaded|lack)"
        with pytest.raises(ValueError, match=told):
            load_pipeline(path, device="cpu", config=settings[name])


OTHERS = {
    "a LoRA": ({"unet.down_blocks.0.to_q.lora_A.weight": (2, 8)}, "is a LoRA.*`lora="),
    "a VAE": ({"encoder.conv_in.weight": (8, 3, 3, 3)}, "no text encoder"),
    "a text encoder": ({f"{CLIP}embeddings.position_embedding.weight": (77, 8)}, "`config`"),
    "a UNet": ({FIRST: (8, 4, 3, 3)}, "no text encoder"),
    "nothing": ({}, "no text encoder"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_files_of_other_things_are_refused(save, settings, case):
    shapes, noun = OTHERS[case]
    path = save({name: torch.zeros(shape) for name, shape in shapes.items()})
    with pytest.raises(ValueError, match=rf"tiny.safetensors.*{noun}"):
        load_pipeline(path, device="cpu")
    with pytest.raises(ValueError, match=r"tiny.safetensors"):
        load_pipeline(path, device="cpu", config=settings["sd1"])


def long_header(size, document=b"{}"):
    return struct.pack("<Q", size) + document


def entry(start, end, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def written(document, data=b"\0" * 4):
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + data


BYTES = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "a longer header than the file": long_header(2**63),
    "no header": long_header(0, b""),
    "no JSON": long_header(2, b"{["),
    "a list": long_header(2, b"[]"),
    "deep JSON": long_header(100_000, b"[" * 100_000),
    "cut off": written({"a": entry(0, 8, (2,))}),
    "a gap": written({"a": entry(4, 8)}, b"\0" * 8),
    "two in one place": written({"a": entry(0, 4), "b": entry(0, 4)}),
    "ends before it begins": written({"a": entry(4, 0)}),
    "a negative axis": written({"a": entry(0, 4, (-1,))}),
    "an endless axis": written({"a": entry(0, 4, (2**63, 2**63))}),
    "an unknown dtype": written({"a": entry(0, 4, dtype="Q7")}),
    "four bits": written({"a": entry(0, 4, (8,), "F4")}),
    "numbers for metadata": written({"a": entry(0, 4), "__metadata__": {"b": 1}}),
    "a pickle": b"\x80\x02}q\x00.",
    "a page": b"<!DOCTYPE html><html>" * 9,
    "a pointer of git": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
}


@pytest.mark.parametrize("case", BYTES)
def test_a_file_that_is_not_whole_is_refused(tmp_path, settings, case):
    (tmp_path / "broken.safetensors").write_bytes(BYTES[case])
    with pytest.raises(ValueError, match="broken.safetensors"):
        load_pipeline(tmp_path / "broken.safetensors", device="cpu", config=settings["sd1"])


def test_pickles_are_refused_unread(save, settings, tmp_path):
    torch.save(tiny("sd1"), tmp_path / "model.ckpt")
    with pytest.raises(ValueError, match=r"model.ckpt.*Pickled checkpoints are not read"):
        load_pipeline(tmp_path / "model.ckpt", device="cpu", config=settings["sd1"])
    save(tiny("sd1")).rename(tmp_path / "renamed.ckpt")
    with pytest.raises(ValueError, match=r"renamed.ckpt.*does not end in .safetensors"):
        load_pipeline(tmp_path / "renamed.ckpt", device="cpu", config=settings["sd1"])
    torch.save(tiny("sd1"), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be loaded"):
        load_pipeline(tmp_path / "model.safetensors", device="cpu", config=settings["sd1"])


@pytest.mark.slow
def test_numbers_that_float16_cannot_hold_are_told(save, settings):
    path = save(tiny("sd1", **{KEYS: torch.full((64, 64), 1e6)}))
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        load_pipeline(path, device="cpu", dtype=torch.float16, config=settings["sd1"])


def test_a_family_of_which_diffusers_reads_no_single_file_is_told(save, tmp_path):
    from diffusers import LDMTextToImagePipeline

    pipe = make_pipeline()
    pipe.save_pretrained(tmp_path / "folder")
    index = json.loads((tmp_path / "folder" / "model_index.json").read_text())
    index["_class_name"] = LDMTextToImagePipeline.__name__
    (tmp_path / "folder" / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="LDMTextToImagePipeline"):
        load_pipeline(save(tiny("sd1")), device="cpu", config=tmp_path / "folder")
