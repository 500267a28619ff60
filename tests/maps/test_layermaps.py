"""What presets read of a store, and what is told where the store does not hold it."""

from dataclasses import replace

import pytest
import torch
from helpers.presets import OF_UNETS
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import sd3

from sdattn import CaptureError, capture, generate, heatmaps
from sdattn.maps.details import details_of
from sdattn.maps.layermaps import LayerMap, LayerMaps, layer_maps, resize_maps
from sdattn.maps.presets import PRESETS, preset_of
from sdattn.models.denoiser import find_denoiser

PROMPT = "a red cat"
SMALL = {"num_inference_steps": 4, "height": 64, "width": 96}


def run(pipe, **options):
    pipe(PROMPT, generator=torch.Generator().manual_seed(0), output_type="np", **SMALL, **options)


def captured(**options):
    pipe = make_pipeline()
    with capture(pipe, **options) as store:
        run(pipe)
    return pipe, store


@pytest.fixture(scope="module")
def everything():
    return captured(steps="all", heads="all", kinds=("cross", "self"))[1]


# -- what is read ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_layer_that_sees_the_text_is_there_in_order(everything):
    found = layer_maps(everything, PRESETS["default"])
    layers = [layer for layer in everything.layers if layer.kind == "cross"]
    assert list(found.layers) == [layer.name for layer in layers]
    assert len(layers) == 16
    for layer in layers:
        one = found.layers[layer.name]
        assert (one.place, one.level, one.heads) == (layer.place, layer.level, layer.heads)
        assert one.grid == layer.grid((8, 12))
    assert found.columns == tuple(range(77))
    assert found.affinity is None


@pytest.mark.parametrize("name", OF_UNETS)
def test_the_heads_are_there_for_a_preset_that_reads_each(everything, name):
    preset = PRESETS[name]
    if preset.among_words:
        _, store = captured(among=[[0, 1, 2, 3, 4]])
    else:
        store = everything
    for one in layer_maps(store, preset).layers.values():
        assert one.maps.dtype == torch.float32
        assert one.maps.ndim == (5 if name == "daam" else 4)
        if name == "daam":
            assert one.maps.shape[1] == one.heads


@pytest.mark.parametrize(
    ("preset", "steps", "passes"),
    tiered(
        [("default", "all", [2, 3]), ("p2p", [0, 3, 1], [0, 1, 3]), ("p2p", (0.0, 0.5), [0, 1]),
         ("attend-and-excite", "all", [3]), ("p2p", "last", [3]), ("p2p", "mean", [0, 1, 2, 3]),
         ("p2p", "all", [0, 1, 2, 3]), ("default", (0.5, 1.0), [2, 3]), ("default", [0, 1], [0, 1]),
         ("daam", "last", [3])], quick=5),
)  # fmt: skip
def test_the_maps_are_the_mean_of_the_calls_that_are_kept_and_read(
    everything, preset, steps, passes
):
    preset = replace(PRESETS[preset], each_head=False)
    _, store = captured(steps=steps)
    assert list(store.read_passes(preset)) == passes
    found = layer_maps(store, preset)
    assert found.passes == len(passes)
    for name, one in found.layers.items():
        expected = everything.maps[name][:, passes].mean((1, 2))
        torch.testing.assert_close(one.maps, expected, atol=1e-6, rtol=0)


def test_the_affinity_is_the_mean_of_the_finest_self_attention(everything):
    found = layer_maps(everything, preset_of("default", "self"))
    layers = [one for one in find_denoiser(make_pipeline().unet).layers if one.kind == "self"]
    finest = [one for one in layers if one.level == 0]
    assert len(finest) == 5
    expected = sum(everything.maps[one.name][:, 2:].double().mean((1, 2)) for one in finest) / 5
    assert found.affinity_grid == (8, 12)
    torch.testing.assert_close(found.affinity.double(), expected.flatten(1, 2), atol=1e-6, rtol=0)
    assert list(found.layers) == list(layer_maps(everything, PRESETS["default"]).layers)


def test_the_graph_is_kept_where_the_store_has_one():
    pipe, latents = make_pipeline(), torch.randn(1, 4, 16, 16, requires_grad=True)
    with capture(pipe.unet, grad=True) as store:
        pipe.unet(latents, 1, torch.randn(1, 77, 32))
    found = layer_maps(store, PRESETS["p2p"])
    sum(one.maps[..., 2].sum() for one in found.layers.values()).backward()
    assert latents.grad.abs().sum() > 0


def test_one_image_and_some_columns_by_themselves():
    maps, cells = torch.rand(3, 4, 5, 4), torch.rand(3, 20, 20)
    held = {"a": LayerMap("up", 0, 2, maps), "b": LayerMap("mid", 1, 2, maps[:, :2, :2])}
    layers = LayerMaps(held, (3, 8, 5, 1), 7, cells, (4, 5))
    one = layers.image(1)
    assert torch.equal(one.layers["a"].maps, maps[1:2])
    assert torch.equal(one.layers["b"].maps, maps[1:2, :2, :2])
    assert torch.equal(one.affinity, cells[1:2])
    some = one.keep([5, 3])
    assert torch.equal(some.layers["a"].maps, maps[1:2, ..., [2, 0]])
    assert (some.columns, some.passes, some.affinity_grid) == ((5, 3), 7, (4, 5))
    assert (some.layers["b"].place, some.layers["b"].level) == ("mid", 1)
    assert layers.image(2).layers["a"].grid == (4, 5)


def test_one_frame_by_itself():
    maps, cells = torch.rand(2, 3, 4, 5, 6), torch.rand(2, 3, 20, 20)
    held = {"a": LayerMap("up", 0, 2, maps, is_video=True)}
    apart = LayerMaps(held, tuple(range(6)), 1, cells, (4, 5))  # a frame attends to itself
    one = apart.frame(2)
    assert torch.equal(one.layers["a"].maps, maps[:, 2])
    assert torch.equal(one.affinity, cells[:, 2])
    assert one.layers["a"].grid == one.affinity_grid == (4, 5)
    across = replace(apart, affinity=torch.rand(2, 60, 60), affinity_grid=(3, 4, 5)).frame(2)
    assert torch.equal(across.layers["a"].maps, maps[:, 2])
    assert across.affinity is across.affinity_grid is None


def test_resizing_keeps_means_and_leading_axes():
    maps = torch.rand(2, 3, 4, 6)
    larger = resize_maps(maps, (8, 18))
    assert larger.shape == (2, 3, 8, 18)
    torch.testing.assert_close(resize_maps(maps[1, 2], (8, 18)), larger[1, 2])
    assert torch.equal(resize_maps(maps, (4, 6)), maps)
    flat = torch.full((1, 2, 2), 0.25)
    assert resize_maps(flat, (5, 3), "bicubic").sub(0.25).abs().max() < 1e-6


@pytest.mark.slow
def test_details_are_of_the_words_in_the_layers_that_see_the_text(everything):
    store = everything
    (found,) = heatmaps(store, make_pipeline(), PROMPT)
    details = details_of(store, 0, found)
    cross = [layer.name for layer in store.layers if layer.kind == "cross"]
    words = [column for word in found.held for column in word.columns]
    for held in (details.steps, details.heads):
        assert [*held.layers] == cross and sorted(held.columns) == sorted(words)
    assert details.calls == (0, 1, 2, 3) and details.head_numbers == "all"
    name = cross[0]
    own = store.maps[name][0].float()  # [steps, heads, rows, cols, tokens]
    columns = list(details.steps.columns)
    torch.testing.assert_close(details.steps.layers[name].maps, own.mean(1)[..., columns])
    second = own[2:].mean(0)[..., columns]  # the half of the run that the default preset reads
    torch.testing.assert_close(details.heads.layers[name].maps[0], second)


# -- what the store does not hold -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "kept", "message"),
    [
        ("daam", {}, 'Capture with heads="all"'),
        ("daam", {"heads": [0]}, 'heads="all"'),
        ("attend-and-excite", {}, 'Capture with steps="last"'),
        ("attend-and-excite", {"steps": (0.5, 1.0)}, 'steps="last"'),
        ("attend-and-excite", {"steps": "last", "tokens": [1, 2, 3]}, "Capture with tokens=None;"),
        ("attend-and-excite", {"tokens": [1, 2, 3]}, 'Capture with steps="last", tokens=None;'),
        ("ovam", {"steps": "all", "heads": "all"}, "Capture with among=.*each image's words"),
    ],
)
@pytest.mark.slow
def test_a_store_without_what_the_preset_reads_is_told_what_to_capture(preset, kept, message):
    pipe, store = captured(**kept)
    with pytest.raises(CaptureError, match=f"The preset '{preset}' reads what.*{message}"):
        heatmaps(store, pipe, PROMPT, preset=preset)


def test_no_self_attention_is_told():
    pipe, store = captured()
    with pytest.raises(CaptureError, match="UNet.*kinds="):
        heatmaps(store, pipe, PROMPT, refine="self")


MID = {"layers": "mid"}
NO_PLACE = "reads layers of the places .* there are only: double"


@pytest.mark.parametrize(
    ("make", "name", "layers", "message"),
    [
        (make_pipeline, "p2p", MID, "down, up.*only: mid"),
        (make_pipeline, "daam", MID, "down, up.*level 2.*mid at level 3"),
        *[(sd3, name, {}, NO_PLACE) for name in ("daam", "p2p", "attend-and-excite", "ovam")],
    ],
)
def test_no_layer_of_the_presets_places_is_told(make, name, layers, message):
    """After a capture; before the run where that captures for the preset."""
    pipe, ran, message = make(), [], f"'{name}'.*{message}"
    model = find_denoiser(pipe).model
    hook = model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=message):
        generate(pipe, PROMPT, preset=name, capture_options=layers, **SMALL)
    assert not ran
    hook.remove()
    with capture(pipe, heads="all", steps="all", among=[[0, 1]], **layers) as store:
        run(pipe)
    with pytest.raises(CaptureError, match=message):
        heatmaps(store, pipe, PROMPT, preset=name)


@pytest.mark.parametrize("layers", ["down", "mid"])
def test_without_a_way_up_the_default_reads_all_there_is(layers):
    """On the finest grid: none has 16 cells here."""
    pipe, store = captured(layers=layers)
    [found] = heatmaps(store, pipe, PROMPT)
    finest = max(one.shape[1] for one in store.maps.values())
    kept = [one[0] for one in store.maps.values() if one.shape[1] == finest]
    assert len(kept) == (2 if layers == "down" else 1)
    torch.testing.assert_close(found.maps, torch.stack(kept).mean(0))


@pytest.mark.parametrize("name", ["columns", "sum"])
def test_the_others_read_a_transformer_too(name):
    pipe = sd3()
    run_ = generate(pipe, PROMPT, preset=name, max_sequence_length=16, **SMALL)
    [found] = run_.heatmaps
    assert found.preset == PRESETS[name]
    layers = [one.maps[0] for one in run_.layers.layers.values()]
    heads = 4 if name == "sum" else 1
    torch.testing.assert_close(found.maps, heads * torch.stack(layers).mean(0))
