"""The laws on a GPU. They run on a CPU with ``--device cpu``, where less is at stake."""

from importlib.util import find_spec

import pytest
import torch
from helpers.matrix import PROCESSORS, ROWS
from helpers.matrix_oracle import expected_maps, processors, run_recorded
from helpers.rows import Way
from helpers.transformer_rows import flux
from helpers.unet_rows import sd2
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdattn
from sdattn.models.denoiser import find_denoiser

HALVES = (torch.float16, torch.bfloat16)
NAMED = {row.name: row for row in ROWS}
NEGLIGIBLE = 1e-4  # of half types' probabilities
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.upcast_vae. is deprecated:FutureWarning"),  # SDXL's
]


def same(a, b):
    """Bit for bit, where random weights made NaN in float16 too."""
    return bool(torch.all((a == b) | (a.isnan() & b.isnan())))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_laws_in_half_types(row, dtype, device):
    way = row.fitted(Way(prompts=2, dtype=dtype))
    pipe = row.make()
    pipe.to(device, dtype)
    model = find_denoiser(pipe).model
    _, record, calls = run_recorded(row, pipe, way)
    plain, before = row.run(pipe, way), processors(model)
    with sdattn.capture(pipe) as store:
        watched = row.run(pipe, way)
    assert same(plain, watched)
    assert all(module.processor is before[module] for module in before)
    texts = [
        layer.name for layer in find_denoiser(model).layers if layer.kind in ("cross", "joint")
    ]
    assert list(store.maps) == texts
    lengths = None if row.lengths is None else row.lengths(pipe, way)
    for name, maps in store.maps.items():
        assert maps.device.type == torch.device(device).type
        found = maps.flatten(1, -2).double().cpu()
        expected = expected_maps(record[name], calls, row, way, lengths).cpu()
        torch.testing.assert_close(found, expected, atol=NEGLIGIBLE, rtol=0.02, equal_nan=True)


@pytest.mark.parametrize("processor", [*PROCESSORS, "xformers"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_every_processor(processor, dtype, device):
    row = ROWS[0]
    pipe = row.make()
    pipe.to(device, dtype)
    if processor == "xformers":
        if find_spec("xformers") is None or device == "cpu":
            pytest.skip("xformers is not installed, or this is no GPU")
        pipe.enable_xformers_memory_efficient_attention()
    else:
        PROCESSORS[processor](pipe.unet)
    plain = row.run(pipe, Way(dtype=dtype))
    with sdattn.capture(pipe) as store:
        watched = row.run(pipe, Way(dtype=dtype))
    assert same(plain, watched)
    assert len(store.maps) == row.layers
    for maps in store.maps.values():  # a row of the softmax, whole
        torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]), atol=5e-3, rtol=0)


@pytest.mark.parametrize(
    "kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"]
)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["Stable Diffusion 1.x", "Stable Diffusion 3", "FLUX.1"])
def test_every_kernel(name, dtype, kernel, device):
    row, way = NAMED[name], Way(dtype=dtype)
    pipe = row.make()
    pipe.to(device, dtype)
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        try:
            plain = row.run(pipe, way)
        except RuntimeError as error:
            pytest.skip(f"torch has no such kernel for this model here: {error}")
        with sdattn.capture(pipe) as store:
            watched = row.run(pipe, way)
    assert same(plain, watched)
    assert len(store.maps) == row.layers


@pytest.mark.parametrize("how", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_models_that_wait_on_the_cpu(how, device):
    if device == "cpu":
        pytest.skip("offload is from a GPU to the CPU")
    row, way = ROWS[0], Way(dtype=torch.float16)
    pipe = row.make()
    pipe.to(torch.float16)
    getattr(pipe, how)(device=device)
    plain = row.run(pipe, way)
    with sdattn.capture(pipe) as store:
        watched = row.run(pipe, way)
    assert same(plain, watched)
    assert len(store.maps) == row.layers


@pytest.mark.parametrize("make", [sd2, flux])
def test_maps_that_are_held_on_the_cpu(make, device):
    pipe = make()
    pipe.to(device)
    found = {}
    for where in (None, "cpu"):
        generator = torch.Generator().manual_seed(0)
        with sdattn.capture(pipe, steps="all", device=where) as store:
            pipe("a red cat", num_inference_steps=3, generator=generator, output_type="np")
        found[where] = {name: maps.cpu() for name, maps in store.maps.items()}
    assert found[None].keys() == found["cpu"].keys()
    for name, maps in found[None].items():
        torch.testing.assert_close(found["cpu"][name], maps, atol=1e-6, rtol=0)
