"""A model's folder is data: no code of its own runs, no pickle is read, and what it asks for is
told before diffusers sees it."""

import inspect
import json
import re
import shutil
import sys

import diffusers
import pytest
import torch
import transformers
from diffusers.utils import dummy_torch_and_torchsde_objects
from safetensors.torch import load_file, save_file

from sdattn import generate, load_pipeline
from sdattn.errors import is_bug
from sdattn.loading.index import _LAYERS, MOST_LAYERS, _largest

CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
class Own(StableDiffusionPipeline): pass
class OwnUnet(UNet2DConditionModel): pass
"""


@pytest.fixture
def folder(whole_model, tmp_path):
    """A copy that may be spoilt; the weights are links."""
    made = tmp_path / "model"
    for file in whole_model.rglob("*"):
        if file.is_file():
            copy = made / file.relative_to(whole_model)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".safetensors":
                copy.symlink_to(file)
            else:
                copy.write_bytes(file.read_bytes())
    return made


def change(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refuse(folder, message):
    with pytest.raises(ValueError, match=message):
        load_pipeline(folder, device="cpu")


HOSTILE = {
    "a pipeline beside it": ("hostile.py", {"_class_name": ["hostile", "Own"]}),
    "a part's own class": ("unet/hostile.py", {"unet": ["hostile", "OwnUnet"]}),
    "a part's library shadowed": ("unet/diffusers.py", {"unet": ["diffusers", "OwnUnet"]}),
    "what diffusers takes for no custom pipeline": ("None.py", {}),
    "a module of the working directory": ("../hostile.py", {"unet": ["hostile", "OwnUnet"]}),
    "a part that is elsewhere": ("hostile.py", {"../model": ["hostile", "OwnUnet"]}),
}


@pytest.mark.parametrize("way", HOSTILE)
def test_no_code_of_a_folder_runs(folder, tmp_path, monkeypatch, way):
    file, index = HOSTILE[way]
    mark = tmp_path / "it ran"
    (folder / file).write_text(CODE.format(mark=str(mark)))
    change(folder / "model_index.json", **index)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as python -m sdattn has it
    refuse(folder, "asks for code")
    assert not mark.exists() and "hostile" not in sys.modules


@pytest.mark.parametrize(
    "entry",
    [
        ["torch.nn", "Module"],  # imported already, so that no version of diffusers refuses it
        ["pathlib", "Path"],
        ["os", "system"],
        ["diffusers", "DiffusionPipeline"],  # a folder in the folder, with an index of its own
        ["diffusers", "OnnxRuntimeModel"],
        ["diffusers", "utils"],
        ["transformers", "AutoModel"],
        ["pipeline_utils", "DiffusionPipeline"],
    ],
    ids=".".join,
)
def test_only_models_and_what_belongs_to_them_are_loaded(folder, entry):
    change(folder / "model_index.json", unet=entry)
    refuse(folder, "asks for code")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_of_the_hub_is_refused(folder, key):
    change(folder / "text_encoder/config.json", text_config={key: {"": "owner/kernel"}})
    refuse(folder, "attn_implementation=.*owner/kernel")


def test_an_adapter_that_names_another_model_is_refused(folder):
    (folder / "text_encoder/adapter_config.json").write_text(
        '{"base_model_name_or_path": "../elsewhere"}'
    )
    refuse(folder, "names another model to load")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "model_index.json is not JSON"),
        ("[" * 100_000, "model_index.json is not JSON"),
        ("[]", "holds a list, not an object"),
        ("{}", "has no _class_name"),
        ('{"_class_name": "NoSuchPipeline"}', "has no pipeline of that name"),
        ('{"_class_name": "UNet2DModel"}', "has no pipeline of that name"),
        ('{"_class_name": "__version__"}', "has no pipeline of that name"),
        ('{"_class_name": "KandinskyCombinedPipeline"}', "loads other models"),
    ],
)
def test_an_index_that_is_none_is_told(tmp_path, text, message):
    (tmp_path / "model_index.json").write_text(text)
    refuse(tmp_path, message)


def as_pickle(part, names):
    """The weights of a part as the pickle that diffusers and transformers call so."""
    (file,) = part.glob("*.safetensors")
    torch.save(load_file(file), part / names[file.name])
    return file


@pytest.mark.slow
@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_weights_in_pickles_are_refused_and_how_to_convert_is_told(folder, part):
    names = {
        "diffusion_pytorch_model.safetensors": "diffusion_pytorch_model.bin",
        "model.safetensors": "pytorch_model.bin",
    }
    file = as_pickle(folder / part, names)
    assert type(load_pipeline(folder, device="cpu")).__name__ == "StableDiffusionPipeline"
    file.unlink()
    refuse(folder, r"Pickles are not read.*use_safetensors=False\).save_pretrained")


@pytest.mark.parametrize("name", ["index", "index.fp16", "fp16.index"])
def test_pickled_shards_of_a_safetensors_index_are_refused(folder, name):
    part = folder / "unet"
    as_pickle(part, {"diffusion_pytorch_model.safetensors": "shard.bin"})
    index = part / f"diffusion_pytorch_model.safetensors.{name}.json"
    index.write_text('{"metadata": {}, "weight_map": {"conv_in.weight": "shard.bin"}}')
    refuse(folder, "names 'shard.bin', which is not a .safetensors file")


def test_a_package_that_a_scheduler_needs_is_named(folder, monkeypatch):
    """diffusers has a stand-in for a class without its package, which is no model."""
    name = "DPMSolverSDEScheduler"
    monkeypatch.setattr(diffusers, name, getattr(dummy_torch_and_torchsde_objects, name))
    change(folder / "model_index.json", scheduler=["diffusers", name])
    with pytest.raises(ImportError, match="pip install torchsde"):
        load_pipeline(folder, device="cpu")


@pytest.mark.parametrize("part", ["tokenizer", "scheduler", "unet"])
def test_a_part_that_is_missing_is_told(folder, part):
    shutil.rmtree(folder / part)
    refuse(
        folder, f"names a {part}, and there is no file in .*{part}. Get the model's folder again"
    )


@pytest.mark.skipif(
    transformers.__version__ < "5", reason="transformers 4 takes it for an empty vocabulary"
)
@pytest.mark.slow
def test_a_broken_tokenizer_file_is_told(folder):
    for file in (folder / "tokenizer").glob("*.json"):
        file.write_text("{}")
    refuse(folder, r"cannot be loaded: .* is broken, or of another model \(\w+: ")


@pytest.mark.slow
def test_a_tokenizer_without_its_length_is_told_before_the_model_runs(folder):
    (folder / "tokenizer/tokenizer_config.json").unlink()
    pipe = load_pipeline(folder, device="cpu")
    pipe.tokenizer.model_max_length = 10**30  # as transformers says of a file that is not there
    with pytest.raises(ValueError, match="has no model_max_length"):
        generate(pipe, "a cat")


def test_weights_that_are_missing_are_named(folder):
    file = folder / "unet/diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["conv_out.weight"]
    file.unlink()
    save_file(weights, file)
    with pytest.raises(ValueError, match=r"unet lack 1 of its weights, e.g. conv_out\.weight"):
        load_pipeline(folder, device="cpu")


ODD = (3, "x", True, None, [], {}, [None, "x"], ["diffusers"], ["diffusers", None], [3, 4])
ODD = (*ODD, ["diffusers", "UNet2DConditionModel", "x"])


@pytest.mark.parametrize("entry", ODD, ids=str)
@pytest.mark.parametrize("part", ["unet", "tokenizer", "image_encoder"])
def test_an_entry_of_the_index_that_is_no_part_is_named(folder, part, entry):
    change(folder / "model_index.json", **{part: entry})
    refuse(folder, f"{folder}/model_index.json has .* for its {part}, where a part is")


@pytest.mark.parametrize("entry", [3, "x", None, [True]], ids=str)
def test_a_setting_of_the_pipeline_is_no_part(folder, entry):
    change(folder / "model_index.json", requires_safety_checker=entry, of_nobody=entry)
    load_pipeline(folder, device="cpu")


def test_the_base_class_is_no_pipeline(folder):
    change(folder / "model_index.json", _class_name="DiffusionPipeline")
    refuse(folder, f"{folder}/model_index.json asks for a 'DiffusionPipeline'")


OF_ANOTHER = {
    "the VAE's class for the UNet": ("model_index.json", {"unet": ["diffusers", "AutoencoderKL"]}),
    "a tokenizer for the UNet": ("model_index.json", {"unet": ["transformers", "CLIPTokenizer"]}),
    "a setting that has no type": ("model_index.json", {"requires_safety_checker": {}}),
    "no such class": ("model_index.json", {"unet": ["diffusers", "NoSuchModel"]}),
    "heads of no size": ("unet/config.json", {"attention_head_dim": 0}),
    "a text for a number": ("unet/config.json", {"block_out_channels": "x"}),
    "no blocks": ("unet/config.json", {"down_block_types": []}),
    "three tokens": ("text_encoder/config.json", {"vocab_size": 3}),
    "no heads": ("text_encoder/config.json", {"num_attention_heads": 0}),
    "a list for a number": ("vae/config.json", {"latent_channels": []}),
    "a schedule of no steps": ("scheduler/scheduler_config.json", {"num_train_timesteps": -1}),
}


@pytest.mark.parametrize("name", OF_ANOTHER)
def test_files_that_the_libraries_choke_on_are_told_with_the_folder(folder, name):
    file, changes = OF_ANOTHER[name]
    change(folder / file, **changes)
    with pytest.raises(ValueError, match=re.escape(str(folder))) as caught:
        load_pipeline(folder, device="cpu")
    assert not is_bug(caught.value) and "\n" not in str(caught.value)


LAYERS = {
    "text_encoder": [{"num_hidden_layers": 10**8}, {"vision_config": {"num_hidden_layers": 1e9}}],
    "unet": [
        {"layers_per_block": 10**8},
        {"layers_per_block": [2, 10**8]},
        {"transformer_layers_per_block": [[1], [1, 10**8]]},
        {"transformer_layers_per_block": MOST_LAYERS + 1},
    ],
    "vae": [{"layers_per_block": 10**8}, {"num_res_blocks": 10**8}, {"stage_depths": [10**8]}],
}
CASES = [(part, changes) for part, every in LAYERS.items() for changes in every]


@pytest.mark.parametrize(("part", "changes"), CASES, ids=str)
def test_no_end_of_layers_is_built(folder, part, changes):
    change(folder / part / "config.json", **changes)
    refuse(folder, f"{folder}/{part}/config.json has .* over 1,000 layers or blocks")


def test_no_known_default_is_taken_for_too_many_layers():
    """The numbers of layers of every class that diffusers has, and other settings by such names."""
    known = 0
    for name in dir(diffusers.models):
        kind = getattr(diffusers.models, name)
        if not isinstance(kind, type):
            continue
        for key, one in inspect.signature(kind.__init__).parameters.items():
            if _LAYERS.search(key):
                known += 1
                assert _largest(json.loads(json.dumps(one.default, default=str))) <= MOST_LAYERS
    assert known > 100
