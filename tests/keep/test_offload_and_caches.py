"""Capture of models whose weights wait elsewhere or are held in fewer bits, and of models of which
a cache skips layers in some steps."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from diffusers import ContextParallelConfig, FirstBlockCacheConfig
from diffusers.models._modeling_parallel import ParallelConfig
from helpers.newer import newer
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_unet
from helpers.transformer_rows import flux, qwen_image, sd3

import sdattn
from sdattn import CaptureError, capture
from sdattn.follow.passes import CaptureWarning
from sdattn.maps.layermaps import layer_maps
from sdattn.maps.presets import PRESETS
from sdattn.models.denoiser import find_denoiser

CPU = torch.device("cpu")
DRAW = {"num_inference_steps": 4, "height": 64, "width": 64, "output_type": "latent"}


def draw(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe("a red cat", generator=torch.Generator().manual_seed(0), **DRAW).images


def model_of(pipe):
    return find_denoiser(pipe).model


def cast(pipe):
    model_of(pipe).enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
    )


def group(pipe):
    pipe.enable_group_offload(CPU, offload_type="leaf_level")


def blocks(pipe):
    model_of(pipe).enable_group_offload(CPU, offload_type="block_level", num_blocks_per_group=1)


WAYS = {
    "model": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    "group": group,
    "blocks": blocks,
    "float8": cast,
    "float8 and group": lambda pipe: (cast(pipe), group(pipe)),
}


@pytest.mark.parametrize("make", tiered([make_pipeline, sd3, flux]))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_where_weights_wait_changes_neither_image_nor_maps(make, way):
    plain, pipe = make(), make()
    WAYS[way](pipe)
    if "float8" in way:  # which rounds the weights
        cast(plain)
    expected = draw(pipe)
    with capture(plain) as known:
        draw(plain)
    with capture(pipe) as store:
        assert torch.equal(draw(pipe), expected)
    assert known.maps.keys() == store.maps.keys() and not store.missing()
    for name, maps in known.maps.items():
        assert torch.allclose(store.maps[name], maps, atol=1e-5)
    assert torch.equal(draw(pipe), expected)


@torch.no_grad()
@pytest.mark.slow
def test_weights_on_the_meta_device_between_the_layers_calls():
    """Sequential offload, of a UNet alone: accelerate does not offload these text encoders, whose
    weights are tied, from the CPU to itself."""
    generator = torch.Generator().manual_seed(0)
    given = (
        torch.randn(2, 4, 16, 16, generator=generator),
        torch.tensor(5),
        torch.randn(2, 77, 32, generator=generator),
    )
    plain, unet = make_unet(), make_unet()
    cpu_offload(unet, CPU)
    assert all(weight.is_meta for weight in unet.parameters())
    expected = unet(*given).sample
    with capture(plain) as known:
        plain(*given)
    with capture(unet) as store:
        assert torch.equal(unet(*given).sample, expected)
    for name, maps in known.maps.items():
        assert torch.allclose(store.maps[name], maps, atol=1e-5)
    assert all(weight.is_meta for weight in unet.parameters())


# -- caches ---------------------------------------------------------------------------------------


@pytest.fixture(params=[flux, qwen_image])
def cached(request):
    """A pipeline whose blocks but the first run in some of the four steps only."""
    pipe = request.param()
    model_of(pipe).enable_cache(FirstBlockCacheConfig(threshold=0.5))
    return pipe


def watched(pipe, **options):
    with pytest.warns(CaptureWarning, match=r"is a cache enabled\?.*blocks\.\d\.attn in "):
        with capture(pipe, **options) as store:
            draw(pipe)
    return store


def test_a_store_knows_which_steps_a_cache_left_out(cached):
    """Against a hook of our own on each layer."""
    ran = {layer.name: [] for layer in find_denoiser(cached).layers}
    calls, hooks = [], []
    hook = model_of(cached).register_forward_pre_hook(lambda *_: calls.append(len(calls)))
    hooks.append(hook)
    for layer in find_denoiser(cached).layers:
        note = lambda *_, name=layer.name: ran[name].append(calls[-1])  # noqa: E731
        hooks.append(layer.module.register_forward_pre_hook(note))
    expected = draw(cached)
    for hook in hooks:
        hook.remove()
    assert {len(steps) for steps in ran.values()} in ({1, 4}, {2, 4})  # some, and not all
    with pytest.warns(CaptureWarning, match="is a cache enabled"):
        with capture(cached) as store:
            assert torch.equal(draw(cached), expected)
    assert {name: list(steps) for name, steps in store.seen.items()} == ran


def test_a_mean_is_of_the_steps_in_which_the_layer_ran(cached):
    every, mean, last = (watched(cached, steps=steps) for steps in ("all", "mean", "last"))
    for name, maps in every.maps.items():
        assert maps.shape[1] == len(every.seen[name])
        assert torch.allclose(mean.maps[name], maps.mean(1), atol=1e-6)
        assert torch.allclose(last.maps[name], maps[:, -1], atol=1e-6)
        assert mean.seen[name] == every.seen[name]
        assert last.seen[name] == every.seen[name][-1:]


def test_steps_that_were_kept_one_by_one_are_read_by_their_numbers(cached):
    """A preset that reads the second half takes of each layer those of its steps that are there."""
    store = watched(cached, steps="all")
    if any(max(calls) < 2 for calls in store.seen.values()):
        newer("LTX2DFRPipeline")  # before, a cache left FLUX's layers out from the second step on
    preset = PRESETS["columns"]
    assert preset.part is not None
    found = layer_maps(store, preset).layers
    for name, layer in found.items():
        calls = store.seen[name]
        places = [i for i, call in enumerate(calls) if call >= 2]
        assert places
        assert torch.allclose(layer.maps, store.maps[name][:, places].mean(1), atol=1e-6)


def test_what_cannot_be_read_of_a_cached_run_is_refused(cached):
    store = watched(cached, steps="all")
    assert 3 not in store.seen[store.uneven()[0]]  # the last step
    with pytest.raises(CaptureError, match="steps"):
        layer_maps(store, replace(PRESETS["columns"], steps="last"))
    with pytest.raises(CaptureError, match="layers"):
        layer_maps(store, replace(PRESETS["columns"], steps="sum"))


def test_an_array_has_the_steps_in_which_the_layer_ran(cached):
    pytest.importorskip("xarray")
    store = watched(cached, steps="all")
    for name, calls in store.seen.items():
        array = store.to_xarray(name)
        assert tuple(array.step.values) == calls
        assert np.allclose(array.timestep, [store.timesteps[call] for call in calls])


def test_without_a_cache_every_layer_is_seen_in_every_step():
    pipe = make_pipeline()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture(pipe, steps=(0.5, 1.0)) as store:
            draw(pipe)
    assert set(store.seen.values()) == {(2, 3)} and not store.uneven()


# -- parallelism ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["context", "tensor"])
def test_a_model_that_is_shared_by_processes_is_refused(kind):
    pipe = flux()
    if kind == "context":
        config = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=2))
    else:
        parallel = pytest.importorskip("diffusers.models._modeling_parallel")
        if not hasattr(parallel, "TensorParallelConfig"):
            pytest.skip("this diffusers has no tensor parallelism")
        config = ParallelConfig(tensor_parallel_config=parallel.TensorParallelConfig(tp_degree=2))
    pipe.transformer._parallel_config = config
    for target in (pipe, pipe.transformer):
        with pytest.raises(ValueError, match=f"FluxTransformer2DModel.*{kind}"):
            with sdattn.capture(target):
                pass
