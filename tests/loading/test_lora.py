"""LoRAs that are broken or only half fit are refused by name."""

import json
import math

import pytest
import torch
from helpers.loras import draw
from helpers.tiers import tiered
from safetensors.torch import save_file

import sdattn
from sdattn import load_pipeline

LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_q"  # 8 wide
DOWN, UP = f"unet.{LAYER}.lora_A.weight", f"unet.{LAYER}.lora_B.weight"
KOHYA = f"lora_unet_{LAYER.replace('.', '_')}"
TEXT = "text_encoder.text_model.encoder.layers.{}.self_attn.q_proj"  # 32 wide, of 2 layers


@pytest.fixture
def load(whole_model, tmp_path):
    """Load the tiny pipeline with a LoRA of these tensors and metadata."""

    def load(tensors, metadata=None, scale=1):
        said = metadata if isinstance(metadata, (str, type(None))) else json.dumps(metadata)
        save_file(tensors, tmp_path / "style.safetensors", {"lora_adapter_metadata": said or ""})
        return load_pipeline(
            whole_model, device="cpu", lora=f"{tmp_path / 'style.safetensors'}:{scale}"
        )

    return load


def pair(down=DOWN, up=UP, width=8, rank=2):
    generator = torch.Generator().manual_seed(0)
    return {
        down: torch.randn(rank, width, generator=generator),
        up: torch.randn(width, rank, generator=generator),
    }


def refused(load, noun, *arguments):
    with pytest.raises(sdattn.SdattnError, match=noun) as told:
        load(*arguments)
    assert "style.safetensors" in str(told.value)
    return str(told.value)


# -- what loads ------------------------------------------------------------------------------------


def test_a_text_encoder_s_lora_loads_beside_the_unet_s(load):
    text = TEXT.format(1)
    held = {**pair(), **pair(f"{text}.lora_A.weight", f"{text}.lora_B.weight", width=32)}
    assert load(held).get_list_adapters() == {"unet": ["lora_0"], "text_encoder": ["lora_0"]}


def test_each_lora_has_the_scale_that_was_asked_for(whole_model, tmp_path):
    asked = {"one": 0.5, "two": 3.0, "same": 0.25}
    for name in asked:
        save_file(pair(), tmp_path / f"{name}.safetensors")
    files = [f"{tmp_path / name}.safetensors:{scale}" for name, scale in asked.items()]
    pipe = load_pipeline(whole_model, device="cpu", lora=files)
    layer = pipe.unet.get_submodule(LAYER)
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(1))
    down, up = pair().values()
    expected = layer.base_layer(x) + sum(asked.values()) * x @ down.T @ up.T
    torch.testing.assert_close(layer(x), expected)
    assert [layer.scaling[f"lora_{number}"] for number in range(3)] == [*asked.values()]


@pytest.mark.slow
def test_what_peft_writes_of_its_own_configuration_is_let_in(load):
    from peft import LoraConfig

    config = LoraConfig(r=2, lora_alpha=6, lora_dropout=0.9).to_dict()
    metadata = {f"unet.{name}": value for name, value in config.items()}
    metadata["unet.target_modules"] = [LAYER]
    pipe = load(pair(), metadata)
    assert not any(part.training for part in pipe.unet.modules())
    assert torch.equal(draw(pipe), draw(pipe))  # no dropout
    assert torch.equal(draw(pipe), draw(load(pair(), scale=3)))  # alpha / rank


@pytest.mark.slow
def test_a_folder_has_one_file_or_the_standard_one(whole_model, tmp_path, load):
    load(pair())
    with_one = load_pipeline(whole_model, device="cpu", lora=tmp_path)
    save_file(pair(rank=1), tmp_path / "other.safetensors")
    with pytest.raises(sdattn.SdattnError, match=r"other.safetensors, style.safetensors"):
        load_pipeline(whole_model, device="cpu", lora=tmp_path)
    (tmp_path / "style.safetensors").rename(tmp_path / "pytorch_lora_weights.safetensors")
    assert torch.equal(
        draw(load_pipeline(whole_model, device="cpu", lora=tmp_path)), draw(with_one)
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(sdattn.SdattnError, match="none"):
        load_pipeline(whole_model, device="cpu", lora=tmp_path / "empty")


# -- what is refused -------------------------------------------------------------------------------

ODD = f"unet.{LAYER}x"
TENSORS = {
    "no second matrix of one layer": (
        {**pair(), DOWN.replace("to_q", "to_k"): torch.ones(2, 32)},
        r"1 of its 3 tensors.*to_k.lora_B",
    ),
    "one layer that is nowhere": (
        {**pair(), **pair(f"{ODD}.lora_A.weight", f"{ODD}.lora_B.weight", rank=3)},
        r"2 of its 4 tensors.*to_qx.lora_A.*to_qx.lora_B",
    ),
    "the same numbers for a layer that is nowhere": (
        {name: torch.ones_like(value) for name, value in (
            {**pair(), **pair(f"{ODD}.lora_A.weight", f"{ODD}.lora_B.weight")}
        ).items()},
        r"2 of its 4 tensors.*to_qx.lora_A.*to_qx.lora_B",
    ),
    "a model that is nowhere": (
        {**pair(), **pair("vae.conv.lora_A.weight", "vae.conv.lora_B.weight", rank=3)},
        r"2 of its 4 tensors.*vae.conv.lora_A",
    ),
    "the name of an adapter": (
        {name.replace(".weight", ".default.weight"): value for name, value in pair().items()},
        r"2 of its 2 tensors.*lora_A.default",
    ),
    "no second matrix": ({DOWN: torch.ones(2, 8)}, "cannot be loaded"),
    "kohya's down alone": ({f"{KOHYA}.lora_down.weight": torch.ones(2, 8)}, "up"),
    "ranks that differ": ({DOWN: torch.ones(2, 8), UP: torch.ones(8, 3)}, "size mismatch"),
    "another width": (pair(width=9), "size mismatch"),
    "scalars": ({DOWN: torch.tensor(1.0), UP: torch.tensor(1.0)}, "cannot be loaded"),
    "rank 0": ({DOWN: torch.ones(0, 8), UP: torch.ones(8, 0)}, "positive"),
    "whole numbers": ({n: w.to(torch.int8) for n, w in pair().items()}, "cannot be loaded"),
    "NaN": ({**pair(), UP: torch.full((8, 2), math.nan)}, "not finite.*lora_B"),
    "infinite alpha": (
        {
            **pair(f"{KOHYA}.lora_down.weight", f"{KOHYA}.lora_up.weight"),
            f"{KOHYA}.alpha": torch.tensor(math.inf),
        },
        "not finite.*alpha",
    ),
    "two alphas": (
        {
            **pair(f"{KOHYA}.lora_down.weight", f"{KOHYA}.lora_up.weight"),
            f"{KOHYA}.alpha": torch.ones(2),
        },
        "cannot be loaded",
    ),
    "nothing": ({}, "holds no tensor"),
    "a checkpoint": ({"model.diffusion_model.out.2.weight": torch.ones(4)}, "LoRA"),
    "LoKr": ({f"{KOHYA}.lokr_w1": torch.ones(4, 4), f"{KOHYA}.lokr_w2": torch.ones(2, 2)}, "lokr"),
    "LoHa": ({f"{KOHYA}.hada_w1_a": torch.ones(8, 2)}, "hada"),
    "kohya's layer that is nowhere": (
        pair("lora_unet_nowhere.lora_down.weight", "lora_unet_nowhere.lora_up.weight"),
        "nowhere",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", tiered(TENSORS, quick=5))
def test_tensors_that_are_not_loaded_as_they_are_are_refused_with_their_keys(load, case):
    tensors, noun = TENSORS[case]
    refused(load, noun, tensors)


METADATA = {
    "no JSON": ("{", "cannot be loaded"),
    "deep": ("[" * 100_000, "cannot be loaded"),
    "rank": ({"r": "2"}, "LoRA"),
    "a rank that is not the file's": ({"r": 3}, "size mismatch"),
    "an infinite alpha": ('{"unet.r": 2, "unet.lora_alpha": 1e999}', "cannot be loaded"),
    "targets that are numbers": ({"r": 2, "target_modules": [3]}, "LoRA"),
    "layers to repeat": ({"r": 2, "layer_replication": [[0, 10**9]]}, "cannot be loaded"),
    "DoRA without its magnitudes": ({"r": 2, "use_dora": True}, "magnitude"),
}  # fmt: skip


@pytest.mark.parametrize("case", tiered(METADATA, quick=2))
def test_metadata_that_are_not_a_plain_loras_are_refused(load, case):
    metadata, noun = METADATA[case]
    if isinstance(metadata, dict):
        named = {"target_modules": [LAYER], "lora_alpha": 2, **metadata}
        metadata = {f"unet.{name}": value for name, value in named.items()}
    refused(load, noun, pair(), metadata)


@pytest.mark.parametrize("cut", tiered([1, 40, 200, 10_000], quick=2))
def test_a_file_that_is_cut_off_is_refused(whole_model, tmp_path, load, cut):
    load(pair())
    path = tmp_path / "style.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(sdattn.SdattnError, match=r"style.safetensors cannot be loaded"):
        load_pipeline(whole_model, device="cpu", lora=path)
