"""Loading pipelines: a folder as it is, and what is said of a model that cannot be had."""

import json

import pytest
import torch
from diffusers import DDPMPipeline, UNet2DModel
from helpers.matrix import ROWS, WAYS, few_are_quick
from helpers.tiny_pipelines import make_pipeline, make_scheduler
from helpers.transformer_rows import sana, sd3
from safetensors.torch import save_file

import sdattn
from sdattn import load_pipeline
from sdattn.models.facts import cell_size, latent_size, size_unit


@pytest.mark.slow
def test_a_folder_loads_as_the_pipeline_that_it_is(whole_model):
    pipe = load_pipeline(whole_model, device="cpu")
    assert type(pipe).__name__ == "StableDiffusionPipeline"
    assert pipe.unet.dtype == torch.float32
    expected = make_pipeline().unet.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in pipe.unet.state_dict().items())
    assert (
        load_pipeline(whole_model, device="cpu", dtype=torch.bfloat16).unet.dtype == torch.bfloat16
    )


@pytest.mark.slow
def test_a_pipeline_that_was_saved_without_a_part_loads_without_it(tmp_path):
    """diffusers asks for SD 3's T5 by name, though the folder says that there is none."""
    made = sd3(text_encoder_3=None, tokenizer_3=None)
    made.save_pretrained(tmp_path)
    pipe = load_pipeline(tmp_path, device="cpu")
    assert pipe.text_encoder_3 is None and pipe.tokenizer_3 is None
    expected = made.transformer.state_dict()
    weights = pipe.transformer.state_dict()
    assert all(torch.equal(one, expected[name]) for name, one in weights.items())


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("./nowhere", FileNotFoundError, "There is no model at"),
        ("dmeo", FileNotFoundError, "Pass 'demo' or 'demo-mmdit' or 'demo-video', a diff"),
        ("demoo", FileNotFoundError, "Did you mean 'demo'"),
        ("demo-mmdt", FileNotFoundError, "Did you mean 'demo-mmdit'"),
        ("empty", ValueError, "without model_index.json"),
        ("pickle.ckpt", ValueError, "Pickled checkpoints are not read"),
        ("lora.safetensors", ValueError, "has no text encoder"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told(tmp_path, monkeypatch, model, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickle.ckpt").write_bytes(b"\x80\x02}q\x00.")
    save_file({"lora.up": torch.zeros(2)}, tmp_path / "lora.safetensors")
    with pytest.raises(error, match=message):
        load_pipeline(model)


def test_a_model_of_no_family_is_refused_before_its_weights_are_read(tmp_path):
    from diffusers import DiTTransformer2DModel

    make_pipeline().save_pretrained(tmp_path)
    shape = {"num_attention_heads": 1, "attention_head_dim": 4, "num_layers": 1, "in_channels": 4}
    DiTTransformer2DModel(**shape, norm_num_groups=4).save_pretrained(tmp_path / "transformer")
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "DiTTransformer2DModel"]
    del index["unet"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for weights in tmp_path.rglob("*.safetensors"):
        weights.write_bytes(b"broken")  # reading them would be reported
    with pytest.raises(
        TypeError, match="(?s)holds a DiTTransformer2DModel, of no family .*Known are: "
    ):
        load_pipeline(tmp_path, device="cpu")


@pytest.mark.parametrize("row", few_are_quick(ROWS), ids=str)
def test_sizes_are_those_that_the_pipeline_makes(row):
    pipe, way = row.make(), row.fitted(WAYS[1])
    assert cell_size(pipe) == row.cell
    assert row.unit % size_unit(pipe) == 0
    height, width = way.size
    cells = (height // row.cell, width // row.cell)
    assert latent_size(pipe, {"height": height, "width": width}) == cells


def test_an_image_that_would_be_cut_is_refused():
    with pytest.raises(ValueError, match="another size"):
        sdattn.generate(sana(), "a red cat", use_resolution_binning=True)


@pytest.mark.slow
def test_a_folder_that_cannot_be_loaded_is_told(tmp_path):
    folder = tmp_path / "unconditional"
    unet = UNet2DModel(
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        norm_num_groups=1,
    )
    DDPMPipeline(unet, make_scheduler()).save_pretrained(folder)
    with pytest.raises(TypeError):
        load_pipeline(folder, device="cpu")

    folder = tmp_path / "unknown"
    make_pipeline().save_pretrained(folder)
    index = folder / "model_index.json"
    said = index.read_text()
    index.write_text(said.replace("StableDiffusionPipeline", "NoSuchPipeline"))
    with pytest.raises(ValueError, match="NoSuchPipeline"):
        load_pipeline(folder, device="cpu")
    index.write_text(said.replace("UNet2DConditionModel", "NoSuchModel"))
    with pytest.raises((AttributeError, ValueError), match="NoSuchModel"):
        load_pipeline(folder, device="cpu")
    index.write_text(said)
    (folder / "unet" / "config.json").unlink()
    with pytest.raises(OSError, match=r"config\.json"):
        load_pipeline(folder, device="cpu")
