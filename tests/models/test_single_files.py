"""Single files: what they are follows from their tensors, and nothing is fetched for them."""

import math
import shutil

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders import single_file_utils as converters
from helpers.ldm_checkpoints import filled, refiner, sd1, sd2, sdxl
from helpers.tiny_tokenizers import tiny_tokenizer
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import sdattn
from sdattn import load_pipeline
from sdattn.models.outline import outline
from sdattn.models.single_file_configs import single_file_of
from sdattn.runs.again import command_of

# What stabilityai and runwayml published beside the weights, as far as diffusers' defaults differ.
SD1 = {
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
    "use_linear_projection": False,
    "transformer_layers_per_block": [1, 1, 1, 1],
    "sample_size": 64,
}
SD2 = {
    **SD1,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
    "upcast_attention": True,
    "sample_size": 96,
}
SDXL = {
    **SD1,
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 2048,
    "attention_head_dim": [5, 10, 20],
    "use_linear_projection": True,
    "transformer_layers_per_block": [1, 2, 10],
    "sample_size": 128,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
REFINER = {
    **SDXL,
    "block_out_channels": [384, 768, 1536, 1536],
    "down_block_types": ["DownBlock2D", *["CrossAttnDownBlock2D"] * 2, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 2, "UpBlock2D"],
    "cross_attention_dim": 1280,
    "attention_head_dim": [6, 12, 24, 24],
    "transformer_layers_per_block": [1, 4, 4, 4],
    "projection_class_embeddings_input_dim": 2560,
}
PUBLISHED = {
    "sd1": (sd1, SD1),
    "sd2": (sd2, SD2),
    "sdxl": (sdxl, SDXL),
    "refiner": (refiner, REFINER),
}
# Parameters, as these models are known to have them.
NUMBERS = {
    "sd1": {"unet": 859_520_964, "vae": 83_653_863, "text_encoder": 123_060_480},
    "sd2": {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840},
    "sdxl": {
        "unet": 2_567_463_684,
        "vae": 83_653_863,
        "text_encoder": 123_060_480,
        "text_encoder_2": 694_659_840,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_of_the_real_shapes_are_the_published_ones(name):
    make, published = PUBLISHED[name]
    found = single_file_of(make())
    assert found.unet == published
    assert found.vae["block_out_channels"] == [128, 256, 512, 512]
    xl = name in ("sdxl", "refiner")
    assert found.vae["scaling_factor"] == (0.13025 if xl else 0.18215)
    assert found.vae["sample_size"] == {"sd1": 512, "sd2": 768}.get(name, 1024)


def models_of(found):
    """Each of the models without weights, by the part of the pipeline."""
    with torch.device("meta"):
        yield "unet", UNet2DConditionModel.from_config(found.unet)
        yield "vae", AutoencoderKL.from_config(found.vae)
        for encoder in found.text_encoders:
            projected = encoder.kind == "CLIPTextModelWithProjection"
            kind = CLIPTextModelWithProjection if projected else CLIPTextModel
            yield encoder.name, kind(CLIPTextConfig(**encoder.config))


@pytest.mark.parametrize("name", NUMBERS)
def test_models_of_the_real_shapes_have_the_known_numbers_of_parameters(name):
    for part, model in models_of(single_file_of(PUBLISHED[name][0]())):
        assert sum(weight.numel() for weight in model.parameters()) == NUMBERS[name][part], part


@pytest.mark.parametrize("name", PUBLISHED)
def test_diffusers_converts_the_real_shapes_into_just_these_models(name):
    """Every tensor of UNet and VAE finds its place, and every place its tensor."""
    shapes = PUBLISHED[name][0]()
    found = single_file_of(shapes)
    given = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    models = dict(models_of(found))
    converted = {
        "unet": converters.convert_ldm_unet_checkpoint(given, dict(models["unet"].config)),
        "vae": converters.convert_ldm_vae_checkpoint(given, dict(models["vae"].config)),
    }
    for part, weights in converted.items():
        expected = {key: tuple(w.shape) for key, w in models[part].state_dict().items()}
        # diffusers makes matrices of the VAE's 1x1 convolutions later
        assert {key: math.prod(w.shape) for key, w in weights.items()} == {
            key: math.prod(shape) for key, shape in expected.items()
        }


@pytest.mark.parametrize(
    ("shapes", "step", "pipeline", "prediction", "size"),
    [
        (sd1(), None, "StableDiffusionPipeline", "epsilon", 64),
        (sd1(9), None, "StableDiffusionInpaintPipeline", "epsilon", 64),
        (sd1(8), None, "StableDiffusionInstructPix2PixPipeline", "epsilon", 64),
        (sd2(), None, "StableDiffusionPipeline", "v_prediction", 96),
        (sd2(), 875_000, "StableDiffusionPipeline", "epsilon", 64),
        (sd2(), 140_000, "StableDiffusionPipeline", "v_prediction", 96),
        (sd2(9), None, "StableDiffusionInpaintPipeline", "epsilon", 64),
        (sdxl(), None, "StableDiffusionXLPipeline", "epsilon", 128),
        (sdxl(9), None, "StableDiffusionXLInpaintPipeline", "epsilon", 128),
        (refiner(), None, "StableDiffusionXLImg2ImgPipeline", "epsilon", 128),
    ],
)
def test_which_pipeline_it_is_and_what_it_predicts(shapes, step, pipeline, prediction, size):
    found = single_file_of(shapes, step)
    assert found.pipeline == pipeline
    assert found.scheduler[1]["prediction_type"] == prediction
    assert found.unet["sample_size"] == size


# -- loading, of small ones ------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No hub, and an empty cache."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def save(tmp_path):
    def save(shapes, **more):
        path = tmp_path / "tiny.safetensors"
        save_file({**filled(shapes), **more}, path)
        return path

    return save


@pytest.mark.parametrize("make", [sd1, sd2, sdxl])
def test_a_single_file_loads_draws_and_is_captured(make, save, tokenizer):
    path = save(make(tiny=True))
    pipe = load_pipeline(path, device="cpu", tokenizer=tokenizer)
    run = sdattn.generate(pipe, "a red cat", num_inference_steps=2, height=64, width=64)
    assert run.heatmaps[0].words == ("a", "red", "cat")
    assert run.info[0]["model"] == str(path)
    assert f"--model {path}" in command_of(run[0])
    assert command_of(run[0]).endswith(f"--tokenizer {tokenizer}")
    assert outline(path) is None


def test_weights_are_those_of_the_file(save, tokenizer):
    weights = filled(sdxl(tiny=True))
    pipe = load_pipeline(save(sdxl(tiny=True)), device="cpu", tokenizer=tokenizer)
    unet, text = pipe.unet.state_dict(), pipe.text_encoder_2.state_dict()
    outer = "model.diffusion_model."
    attention = "transformer_blocks.1.attn2.to_k.weight"
    assert torch.equal(
        unet[f"down_blocks.2.attentions.1.{attention}"],
        weights[f"{outer}input_blocks.8.1.{attention}"],
    )
    assert torch.equal(
        unet["up_blocks.2.resnets.2.conv2.weight"],
        weights[f"{outer}output_blocks.8.0.out_layers.3.weight"],
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


def test_the_encoder_of_sd2_leaves_its_last_layer_out(save, tokenizer):
    pipe = load_pipeline(save(sd2(tiny=True)), device="cpu", tokenizer=tokenizer)
    assert pipe.text_encoder.config.num_hidden_layers == 23
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    base = save(sd2(tiny=True), global_step=torch.tensor(875_000))
    base = load_pipeline(base, device="cpu", tokenizer=tokenizer)
    assert base.scheduler.config.prediction_type == "epsilon"


def test_prompts_are_filled_up_as_the_encoders_were_trained(save, tokenizer):
    pipe = load_pipeline(save(sdxl(tiny=True)), device="cpu", tokenizer=tokenizer)
    given = {"padding": "max_length", "max_length": 8}
    ends = [one("cat", **given).input_ids[-1] for one in (pipe.tokenizer, pipe.tokenizer_2)]
    assert ends == [519, tiny_tokenizer().convert_tokens_to_ids("!")]


def test_the_refiner_and_inpainting_load(save, tokenizer):
    pipe = load_pipeline(save(refiner(tiny=True)), device="cpu", tokenizer=tokenizer)
    assert pipe.text_encoder is None and pipe.config.requires_aesthetics_score
    pipe = load_pipeline(save(sd1(9, tiny=True)), device="cpu", tokenizer=tokenizer)
    assert type(pipe).__name__ == "StableDiffusionInpaintPipeline"


def test_another_scheduler_keeps_what_the_model_predicts(save, tokenizer):
    options = {"tokenizer": tokenizer, "scheduler": "EulerDiscreteScheduler"}
    pipe = load_pipeline(save(sd2(tiny=True)), device="cpu", **options)
    assert type(pipe.scheduler).__name__ == "EulerDiscreteScheduler"
    assert pipe.scheduler.config.prediction_type == "v_prediction"


def test_the_tokenizer_of_a_diffusers_folder_will_do(save, tokenizer, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer").symlink_to(tokenizer)
    pipe = load_pipeline(save(sd1(tiny=True)), device="cpu", tokenizer=tmp_path / "model")
    assert len(pipe.tokenizer) == 520


def test_what_to_do_without_a_tokenizer_is_told(save, tmp_path):
    path = save(sd1(tiny=True))
    with pytest.raises(ValueError, match="Pass tokenizer: the folder tokenizer/ of any Sta"):
        load_pipeline(path, device="cpu")
    with pytest.raises(ValueError, match="there is no tokenizer.json or vocab.json in it"):
        load_pipeline(path, device="cpu", tokenizer=tmp_path)
    tiny_tokenizer(merges=("c a",)).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="its vocabulary has 515 tokens, .* with 520"):
        load_pipeline(path, device="cpu", tokenizer=tmp_path / "other")


def test_the_tokenizer_is_found_in_the_hubs_cache(save, tokenizer, tmp_path):
    repository = tmp_path / "cache" / "models--openai--clip-vit-large-patch14"
    shutil.copytree(tokenizer, repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    pipe = load_pipeline(save(sd1(tiny=True)), device="cpu")
    assert len(pipe.tokenizer) == 520


def without(name, shapes):
    return {key: shape for key, shape in shapes.items() if name not in key}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (without("middle_block", sd1(tiny=True)), "it has no tensor .*middle_block.1.proj_in"),
        (without("first_stage_model", sd1(tiny=True)), "has no tensor 'first_stage_model.decoder"),
        (without("ln_final", sd2(tiny=True)), "lack"),
        (without("output_blocks.3.", sd1(tiny=True)), "lack"),
        (sd1(7, tiny=True), "its UNet takes 7 channels, and those of 4, 9, 8 are known"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(save, tokenizer, shapes, message):
    with pytest.raises(ValueError, match=message):
        load_pipeline(save(shapes), device="cpu", tokenizer=tokenizer)
