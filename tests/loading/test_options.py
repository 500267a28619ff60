"""Loading as people load: LoRAs, quantized weights, offload, schedulers, variants; and what is
refused before any weights are read."""

import importlib.util
import json
import shutil

import pytest
import torch
from helpers.loras import draw, save_lora
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import flux, pixart, sd3
from safetensors.torch import load_file, save_file

import sdattn
from sdattn import load_pipeline
from sdattn.files.records import read_record
from sdattn.loading.digests import digest_model
from sdattn.loading.folder import PipelineFolder, _large, fitting_scheduler, quantized
from sdattn.loading.options import LoadingOptions, options_of
from sdattn.loading.weights import PipelineFiles
from sdattn.models.facts import PipelineFacts
from sdattn.models.families import registered
from sdattn.runs.info import RunSettings

NO_FILES = PipelineFiles([], [], None)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    pipe, targets = make_pipeline(), ("to_q", "to_k", "to_v")
    return save_lora(tmp_path_factory.mktemp("lora"), pipe, pipe.unet, targets)


# -- LoRAs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_lora_adds_its_product_to_the_weights_and_capture_leaves_the_image(whole_model, lora):
    """W + scale B A, computed here: a file without alphas has that of its rank."""
    weights, merged = load_file(lora), make_pipeline()
    modules = dict(merged.unet.named_modules())
    for name in [name for name in weights if name.endswith("lora_A.weight")]:
        path = name.removeprefix("unet.").removesuffix(".lora_A.weight")
        up, down = weights[name.replace("lora_A", "lora_B")].double(), weights[name].double()
        weight = modules[path].weight
        weight.data = (weight.double() + 0.5 * up @ down).float()
    pipe = load_pipeline(whole_model, device="cpu", lora=f"{lora}:0.5")
    found = draw(pipe)
    assert torch.allclose(found, draw(merged), atol=2e-4)
    assert not torch.allclose(found, draw(make_pipeline()), atol=1e-2)
    with sdattn.capture(pipe) as store:
        assert torch.equal(draw(pipe), found)
    assert len(store.maps) == 16


@pytest.mark.slow
def test_several_loras_act_together_each_with_its_scale(whole_model, lora):
    halves = load_pipeline(whole_model, device="cpu", lora=[f"{lora.parent}:0.25", f"{lora}:0.25"])
    one = load_pipeline(whole_model, device="cpu", lora=f"{lora}:0.5")
    assert torch.allclose(draw(halves), draw(one), atol=2e-4)
    # a batch that goes on knows them by the model's checksum, the scale among it
    other = load_pipeline(whole_model, device="cpu", lora=f"{lora}:0.6")
    assert len({digest_model(pipe) for pipe in (halves, one, other, make_pipeline())}) == 4


def test_a_pipeline_that_takes_no_lora_is_told_before_its_weights_are_read(tmp_path, lora):
    from diffusers import PixArtAlphaPipeline

    pixart(PixArtAlphaPipeline).save_pretrained(tmp_path)
    for weights in tmp_path.rglob("*.safetensors"):
        weights.write_bytes(b"broken")
    with pytest.raises(ValueError, match="PixArtAlphaPipeline"):
        load_pipeline(tmp_path, device="cpu", lora=lora)


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("a.safetensors", "a.safetensors", 1.0),
        ("a.safetensors:0.8", "a.safetensors", 0.8),
        ("owner/name:-1", "owner/name", -1.0),
        ("C:/a.safetensors", "C:/a.safetensors", 1.0),
        ("C:/a.safetensors:2", "C:/a.safetensors", 2.0),
    ],
)
def test_path_and_scale_are_told_apart(text, path, scale):
    assert list(LoadingOptions(lora=text).adapters()) == [(path, scale)]


# -- weights in few bits --------------------------------------------------------------------------


def write_gguf(model, path):
    gguf = pytest.importorskip("gguf")
    kind, writer = gguf.GGMLQuantizationType.Q8_0, gguf.GGUFWriter(str(path), "tiny")
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if weight.ndim == 2 and weight.shape[1] % 32 == 0:  # a block of Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("make", tiered([flux, sd3, make_pipeline], quick=2))
@pytest.mark.slow
def test_a_gguf_file_takes_the_denoisers_place(make, tmp_path):
    plain, file = make(), tmp_path / "tiny.gguf"
    part = "unet" if make is make_pipeline else "transformer"
    write_gguf(getattr(plain, part), file)
    plain.save_pretrained(tmp_path)
    pipe = load_pipeline(tmp_path, device="cpu", quantization=f"gguf:{file}")
    kinds = {type(module).__name__ for module in getattr(pipe, part).modules()}
    assert "GGUFLinear" in kinds
    found = draw(pipe)
    # 8 bits a weight: near, and not the same
    assert 0 < (found - draw(plain)).abs().max() < 0.05
    with sdattn.capture(pipe) as store:
        assert torch.equal(draw(pipe), found)
    assert not store.missing()
    assert digest_model(pipe) != digest_model(plain)


def test_a_gguf_file_of_another_model_is_told(whole_model, tmp_path):
    write_gguf(sd3().transformer, tmp_path / "sd3.gguf")
    with pytest.raises(ValueError, match="sd3.gguf cannot be loaded as the weights of a UNet2D"):
        load_pipeline(whole_model, device="cpu", quantization=f"gguf:{tmp_path / 'sd3.gguf'}")


def test_bits_are_for_the_denoiser_and_large_text_encoders(whole_model):
    """As far as it can be seen without a GPU: what diffusers is asked for."""
    index = {
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    eight = LoadingOptions(quantization="8bit")
    asked = quantized(PipelineFolder(whole_model, index, eight, NO_FILES), torch.bfloat16)
    mapping = asked["quantization_config"].quant_mapping
    homes = {name: type(one).__module__.partition(".")[0] for name, one in mapping.items()}
    assert homes == {"transformer": "diffusers", "text_encoder_2": "transformers"}
    assert all(one.load_in_8bit and not one.load_in_4bit for one in mapping.values())
    plain = PipelineFolder(whole_model, index, LoadingOptions(), NO_FILES)
    assert quantized(plain, torch.bfloat16) == {}


@pytest.mark.parametrize("second", [None, "WanTransformer3DModel"])
def test_both_denoisers_of_wan_2_2_are_quantized(second):
    index = {
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [second and "diffusers", second],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
    }
    expected = {*index} - ({"transformer_2"} if second is None else set())
    assert {*_large(index)} == expected


# -- offload --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_group_offload_leaves_images_and_the_record_as_they_are(whole_model):
    pipe = load_pipeline(whole_model, device="cpu", offload="group")
    plain = make_pipeline()
    assert PipelineFacts(pipe).device.type == "cpu"
    found = draw(pipe)
    assert torch.allclose(found, draw(plain), atol=1e-3)
    with sdattn.capture(pipe):
        assert torch.equal(draw(pipe), found)
    assert digest_model(pipe) == digest_model(load_pipeline(whole_model, device="cpu"))
    run = sdattn.generate(pipe, "a red cat", num_inference_steps=2, height=64, width=64)
    assert run.info[0]["device"] == "cpu" and run.info[0]["loading"] == {"offload": "group"}


# -- schedulers and variants ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_scheduler_takes_the_settings_of_the_own_one(whole_model):
    name = "EulerDiscreteScheduler"
    pipe = load_pipeline(whole_model, device="cpu", scheduler=name)
    own = json.loads((whole_model / "scheduler" / "scheduler_config.json").read_text())
    assert type(pipe.scheduler).__name__ == name
    assert own["beta_start"] == pipe.scheduler.config.beta_start


@pytest.mark.parametrize(
    ("name", "own", "fits"),
    [
        ("LCMScheduler", "PNDMScheduler", True),
        ("DPMSolverMultistepScheduler", "EulerDiscreteScheduler", True),
        ("FlowMatchHeunDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", True),
        ("FlowMatchEulerDiscreteScheduler", "DDIMScheduler", False),
        ("DDIMScheduler", "FlowMatchEulerDiscreteScheduler", False),
        ("Euler", "DDIMScheduler", False),
        ("SchedulerMixin", "DDIMScheduler", False),
    ],
)
def test_which_schedulers_go_with_a_model(name, own, fits):
    if fits:
        assert fitting_scheduler(name, own).__name__ == name
    else:
        with pytest.raises(ValueError, match=f"scheduler='{name}'.*Pass one of .*{own}"):
            fitting_scheduler(name, own)


@pytest.mark.slow
def test_a_variant_is_that_of_its_files(whole_model, tmp_path):
    make_pipeline().to(torch.float16).save_pretrained(tmp_path, variant="fp16")
    pipe = load_pipeline(tmp_path, device="cpu", variant="fp16")
    half = make_pipeline().unet.half().float().state_dict()
    assert all(torch.equal(one, half[name]) for name, one in pipe.unet.state_dict().items())
    with pytest.raises(ValueError, match="variant='bf16'.*fp16"):
        load_pipeline(tmp_path, device="cpu", variant="bf16")
    with pytest.raises(ValueError, match="Leave it out"):
        load_pipeline(whole_model, device="cpu", variant="fp16")


@pytest.mark.slow
def test_the_half_type_is_that_of_the_models_authors(monkeypatch, tmp_path):
    """On CUDA; here the device is only said to be one."""
    halves = {family.name: family.half for family in registered()}
    singles = {name for name, half in halves.items() if half == "float16"}
    kin = {
        "Stable Diffusion 3",
        "PixArt",
        "AuraFlow",
        "HunyuanDiT",
        "ERNIE-Image",
        "CogVideoX",
        "AnimateDiff",
    }
    assert {one for one in singles if not one.startswith(("UNets", "models of"))} == kin
    monkeypatch.setattr("sdattn.loading.pipelines.checked_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("sdattn.loading.pipelines.place", lambda pipe, *_: pipe)
    for make, half in ((flux, torch.bfloat16), (make_pipeline, torch.float16)):
        make().save_pretrained(tmp_path / half.__repr__())
        pipe = load_pipeline(tmp_path / half.__repr__())
        assert pipe.vae.dtype == half
        assert load_pipeline(tmp_path / half.__repr__(), dtype=torch.float32).vae.dtype != half


# -- what is refused, before weights are read ------------------------------------------------------


@pytest.fixture
def broken(whole_model, tmp_path):
    """A folder whose weights cannot be read."""
    shutil.copytree(whole_model, tmp_path / "broken")
    for weights in (tmp_path / "broken").rglob("*.safetensors"):
        weights.write_bytes(b"broken")
    (tmp_path / "lora.bin").write_bytes(b"\x80\x02}q\x00.")
    save_file({"cond_stage_model.x": torch.zeros(1)}, tmp_path / "single.safetensors")
    return tmp_path / "broken"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "disk"}, "offload='disk'"),
        ({"offload": "model"}, "weights wait on the CPU until a GPU"),
        ({"offload": "sequential"}, "weights wait on the CPU until a GPU"),
        ({"quantization": "8bit"}, "quantization='8bit'.*GPU"),
        ({"quantization": "4bit"}, "quantization='4bit'.*GPU"),
        ({"quantization": "3bit"}, "pass '8bit', '4bit' or 'gguf:FILE'"),
        ({"quantization": "gguf:"}, "pass '8bit', '4bit' or 'gguf:FILE'"),
        ({"quantization": "gguf:no.gguf"}, "there is no such file"),
        ({"lora": "no/such.safetensors"}, "there is no such file or folder"),
        ({"lora": "lora.bin"}, "only .safetensors files are read"),
        ({"lora": "lora.bin:inf"}, "with a finite number"),
        ({"lora": ":0.5"}, "pass PATH"),
        ({"revision": "main"}, "only models of the hub have revisions"),
        ({"tokenizer": "x"}, "only a single .safetensors file needs one"),
        ({"scheduler": "Fast"}, "it is unknown. Pass one of "),
        ({"variant": "fp16"}, "no part of .* has files of it"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(broken, monkeypatch, options, message):
    monkeypatch.chdir(broken.parent)
    with pytest.raises(ValueError, match=message):
        load_pipeline(broken, device="cpu", **options)


@pytest.mark.parametrize("options", [{"variant": "fp16"}, {"quantization": "gguf:lora.bin"}])
def test_what_a_single_file_does_not_take(broken, monkeypatch, options):
    monkeypatch.chdir(broken.parent)
    with pytest.raises(ValueError, match="is a single file. Pass a diffusers folder"):
        load_pipeline("single.safetensors", device="cpu", **options)


@pytest.mark.parametrize(
    ("package", "options", "extra"),
    [
        ("peft", {"lora": "lora.safetensors"}, "lora"),
        ("bitsandbytes", {"quantization": "4bit"}, "quantization"),
        ("gguf", {"quantization": "gguf:lora.safetensors"}, "quantization"),
    ],
)
def test_a_missing_package_is_told(broken, monkeypatch, package, options, extra):
    monkeypatch.chdir(broken.parent)
    save_file({"x": torch.zeros(1)}, "lora.safetensors")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "sdattn.loading.options.find_spec",
        lambda name: None if name == package else found(name),
    )
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'sdattn\[{extra}\]'"):
        LoadingOptions(**options).check(broken, torch.device("cuda"))


# -- records --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_record_is_read_as_it_was_written(whole_model, lora):
    asked = {"lora": (f"{lora}:0.5",), "scheduler": "EulerDiscreteScheduler", "offload": "group"}
    for given in (asked, {}):
        pipe = load_pipeline(whole_model, device="cpu", **given)
        expected = LoadingOptions(**given) if given else None
        assert options_of(pipe) == expected
        run = sdattn.generate(pipe, "a red cat", num_inference_steps=2, height=64, width=64)[0]
        written = run.settings.to_json()
        in_json = {**given, "lora": [f"{lora}:0.5"]} if given else None
        assert written.get("loading") == in_json
        assert read_record(RunSettings, written).loading == expected
