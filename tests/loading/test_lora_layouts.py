"""Each layout of LoRA files that diffusers converts reaches the layers whole, or is refused."""

from types import SimpleNamespace

import pytest
import torch
from helpers.padded_rows import z_image
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_sdxl_pipeline, small_pipeline
from helpers.transformer_rows import flux, flux2, qwen_image, sd3
from helpers.wan_rows import wan22_small
from safetensors.torch import save_file

import sdattn
from sdattn.loading.lora import load_loras, read_loras
from sdattn.loading.options import LoadingOptions

RANK = 2
DOWN, UP = "lora_A.weight", "lora_B.weight"
KOHYA = "lora_down.weight", "lora_up.weight"
NAMED = "lora_A.default.weight", "lora_B.default.weight"
XLABS = "down.weight", "up.weight"
FLUX = "transformer.transformer_blocks.0.attn.to_q"
SINGLE = "transformer.single_transformer_blocks.0.attn.to_q"
UNET = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_q"
TEXT = "text_encoder.text_model.encoder.layers.0."


def layout(make, name, layer, matrices=(DOWN, UP), alpha=None, others=()):
    """Return a case: the pipeline, and the file's names for layers with their alphas.

    A name that ends in qkv stands for three layers.

    Args:
        make: makes the pipeline.
        name: the layer's name in the file.
        layer: its name in the pipeline.
        matrices: the ends of the two matrices' names.
        alpha: the file's alpha for it, whose scale is alpha / rank.
        others: further layers, as (name, layer, alpha).
    """
    pairs = [(name, layer, alpha), *others]
    return SimpleNamespace(make=make, pairs=pairs, matrices=matrices)


TEXT_FILE = "lora_te_text_model_encoder_layers_0_"
TEXT_ATTENTION = [
    (f"{TEXT_FILE}self_attn_{part}_proj", f"{TEXT}self_attn.{part}_proj", 3)
    for part in ("q", "k", "v", "out")
]


def kohya(name):
    return "lora_unet_" + name.partition(".")[2].replace(".", "_")


SGM = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_q"
XL = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_q"
WAN = "transformer.blocks.0.attn1.to_q"
Z = "transformer.layers.0.attention.to_q"
COMFY = "transformer", "diffusion_model", 1
QKV = "lora_unet_double_blocks_0_img_attn_qkv"
PROCESSOR = f"{UNET.rpartition('.')[0]}.processor.to_q_lora"  # of old versions of diffusers
LAYOUTS = {
    "kohya, fused": layout(flux, QKV, FLUX, KOHYA, 4),
    "kohya, text encoder": layout(
        small_pipeline, kohya(UNET), UNET, KOHYA, 1, TEXT_ATTENTION
    ),
    "alphas that differ": layout(flux, FLUX, FLUX, alpha=1, others=[(SINGLE, SINGLE, 3)]),
    "kohya, no alpha": layout(flux, QKV, FLUX, KOHYA),
    "kohya, MLP of the text": layout(
        flux, QKV, FLUX, KOHYA, 4, [(f"{TEXT_FILE}mlp_fc1", f"{TEXT}mlp.fc1", 1)]
    ),
    "xlabs": layout(flux, "double_blocks.0.processor.qkv_lora1", FLUX, XLABS),
    "sgm": layout(make_sdxl_pipeline, SGM, XL, KOHYA, 1),
    "SDXL": layout(make_sdxl_pipeline, kohya(XL), XL, KOHYA, 1),
    "wan": layout(wan22_small, "diffusion_model.blocks.0.self_attn.q", WAN),
    "wan, alpha": layout(wan22_small, "diffusion_model.blocks.0.self_attn.q", WAN, KOHYA, 1),
    "qwen, kohya": layout(qwen_image, kohya(FLUX), FLUX, KOHYA, 1),
    "qwen, comfy": layout(qwen_image, FLUX.replace(*COMFY), FLUX, alpha=1),
    "qwen, adapter's name": layout(qwen_image, FLUX.removeprefix("transformer."), FLUX, NAMED),
    "z, comfy": layout(z_image, Z.replace(*COMFY), Z, alpha=1),
    "z, kohya": layout(z_image, kohya(Z), Z, KOHYA, 1),
    "bfl, fused": layout(flux2, "diffusion_model.double_blocks.0.img_attn.qkv", FLUX),
    "SD3": layout(sd3, FLUX, FLUX),
    "UNet": layout(small_pipeline, UNET, UNET),
    "diffusers, processor": layout(small_pipeline, PROCESSOR, UNET, XLABS),
}  # fmt: skip


def layer_of(pipe, name):
    part, _, name = name.partition(".")
    model = getattr(pipe, part)
    if not hasattr(model, "text_model"):  # transformers 5
        name = name.removeprefix("text_model.")
    return model.get_submodule(name)


def load(pipe, tensors, folder):
    save_file(tensors, folder / "style.safetensors")
    options = LoadingOptions(lora=(str(folder / "style.safetensors"),))
    load_loras(pipe, read_loras(options))


@pytest.mark.parametrize("case", tiered(LAYOUTS, quick=3))
def test_each_layout_adds_its_product_to_the_weights(tmp_path, case):
    """W + alpha / rank B A, computed here in float64."""
    case = LAYOUTS[case]
    pipe = case.make()
    generator = torch.Generator().manual_seed(0)
    tensors, expected = {}, {}
    for name, layer, alpha in case.pairs:
        parts = "qkv" if name.endswith(("qkv", "qkv_lora1")) else "q"
        layers = list(dict.fromkeys(layer.replace("to_q", f"to_{part}") for part in parts))
        weights = [layer_of(pipe, name).weight.detach().double().clone() for name in layers]
        down = torch.randn(RANK, weights[0].shape[1], generator=generator)
        up = torch.randn(sum(map(len, weights)), RANK, generator=generator)
        tensors |= {f"{name}.{case.matrices[0]}": down, f"{name}.{case.matrices[1]}": up}
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(float(alpha))
        products = (up.double() @ down.double() * (alpha or RANK) / RANK).split(len(weights[0]))
        for layer, weight, product in zip(layers, weights, products, strict=True):
            expected[layer] = weight + product
    load(pipe, tensors, tmp_path)
    for name, weight in expected.items():
        layer = layer_of(pipe, name)
        given = torch.randn(3, weight.shape[1], generator=generator)
        with torch.no_grad():
            found = layer(given) - (0 if layer.bias is None else layer.bias)
        assert torch.allclose(found.double(), given.double() @ weight.T, atol=1e-4)


def pair(name, down, up, width, out):
    return {f"{name}.{down}": torch.ones(RANK, width), f"{name}.{up}": torch.ones(out, RANK)}


def a_deeper_model(pipe):
    width = layer_of(pipe, FLUX).in_features
    blocks = [f"lora_unet_double_blocks_{block}_img_attn_proj" for block in (5, 6)]
    named = [(QKV, 3 * width), *((block, width) for block in blocks)]
    return {k: v for name, out in named for k, v in pair(name, *KOHYA, width, out).items()}


def magnitudes_that_diffusers_drops(pipe):
    width = layer_of(pipe, FLUX).in_features
    return {**pair(FLUX, DOWN, UP, width, width), f"{FLUX}.dora_scale": torch.ones(1, width)}


def norms_that_diffusers_drops(pipe):
    width = layer_of(pipe, WAN).in_features
    pairs = pair("diffusion_model.blocks.0.self_attn.q", DOWN, UP, width, width)
    return {**pairs, "diffusion_model.blocks.0.norm3.diff": torch.ones(width)}


def a_text_s_alpha_that_diffusers_drops(pipe):
    tensors = pair(kohya(UNET), *KOHYA, 8, 8)
    for name, _, alpha in TEXT_ATTENTION:
        tensors |= {**pair(name, *KOHYA, 32, 32), f"{name}.alpha": torch.tensor(float(alpha))}
    return {**tensors, f"{TEXT_FILE}self_attn_out_proj.alpha": torch.tensor(5.0)}


@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys")
@pytest.mark.parametrize(
    ("make", "tensors", "keys"),
    tiered([
        (small_pipeline, a_text_s_alpha_that_diffusers_drops, "1 of its 14 .*out_proj.alpha"),
        (flux, a_deeper_model, "4 of its 6 tensors.*double_blocks_5_.*double_blocks_6_"),
        (flux, magnitudes_that_diffusers_drops, "1 of its 3 tensors.*dora_scale"),
        (wan22_small, norms_that_diffusers_drops, "1 of its 3 tensors.*norm3.diff"),
    ], quick=2),
)  # fmt: skip
def test_what_diffusers_leaves_out_is_refused_with_its_keys(tmp_path, make, tensors, keys):
    pipe = make()
    with pytest.raises(sdattn.SdattnError, match=keys):
        load(pipe, tensors(pipe), tmp_path)


@pytest.mark.slow
def test_norms_that_are_zero_are_no_loss(tmp_path):
    pipe = wan22_small()
    tensors = {k: v * (".diff" not in k) for k, v in norms_that_diffusers_drops(pipe).items()}
    before = layer_of(pipe, WAN).weight.detach().clone()
    load(pipe, tensors, tmp_path)
    layer = layer_of(pipe, WAN)
    with torch.no_grad():
        weight = (layer(torch.eye(before.shape[1])) - layer.bias).T
    torch.testing.assert_close(weight, before + RANK)  # the product of two matrices of ones


@pytest.mark.slow
def test_dora_s_magnitudes_reach_the_layer(tmp_path):
    """m (W + B A) / |W + B A|, row by row (Liu et al. 2024)."""
    pipe = flux()
    layer = layer_of(pipe, FLUX)
    base, width = layer.weight.detach().double().clone(), layer.in_features
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{FLUX}.{DOWN}": torch.randn(RANK, width, generator=generator),
        f"{FLUX}.{UP}": torch.randn(width, RANK, generator=generator),
        f"{FLUX}.lora_magnitude_vector": torch.rand(width, generator=generator),
    }
    load(pipe, tensors, tmp_path)
    down, up, magnitude = (value.double() for value in tensors.values())
    summed = base + up @ down
    weight = magnitude[:, None] * summed / summed.norm(dim=1, keepdim=True)
    given = torch.randn(3, width, generator=generator)
    with torch.no_grad():
        found = layer_of(pipe, FLUX)(given) - layer.bias
    assert torch.allclose(found.double(), given.double() @ weight.T, atol=1e-4)
