"""Layers whose queries are no cells of their grid, and layers that are called twice in a pass."""

import pytest
import torch
from helpers.capture_runs import run
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_small_unet
from helpers.transformer_rows import flux
from torch import nn

import sdattn
from sdattn import CaptureError, CaptureWarning, capture
from sdattn.attention import MultiHeadAttention
from sdattn.models.denoiser import find_denoiser

DOWN, MID = "down_blocks.0.attentions.0.transformer_blocks.0.", "mid_block.attentions.0."


def merge(attn, ratio):
    """Token merging (Bolya et al. 2023): a layer gets means of some tokens, in an order of its own,
    and each token gets what its mean got."""
    forward = attn.forward

    def merged(hidden_states, *args, **kwargs):
        count = hidden_states.shape[1]
        of = torch.arange(count) % (count - int(ratio * count))
        mean = torch.stack([hidden_states[:, of == i].mean(1) for i in range(int(of.max()) + 1)], 1)
        return forward(mean, *args, **kwargs)[:, of]

    attn.forward = merged


def fewer_keys(attn, ratio):
    """Token downsampling (Smith et al. 2024): keys and values alone are fewer."""
    forward = attn.forward

    def downsampled(hidden_states, encoder_hidden_states=None, **kwargs):
        return forward(hidden_states, encoder_hidden_states=hidden_states[:, ::4], **kwargs)

    attn.forward = downsampled


def patched(how, part, ratio=0.75, **options):
    """A pipeline with that done to the layer of this name in its first block."""
    pipe = make_pipeline(**options)
    how(pipe.unet.get_submodule(DOWN + part), ratio)
    return pipe


ATTN1 = {"kinds": ("cross", "self")}


@pytest.mark.parametrize(
    ("part", "ratio", "options"),
    tiered(  # two of the ratios leave as many as another level has
        [
            ("attn2", 0.75, {}),
            ("attn1", 0.75, {"queries": [(4, 5)]}),
            *[("attn1", ratio, ATTN1) for ratio in (0.5, 0.75, 0.9375)],
        ],
        quick=2,
    ),
)
def test_merged_tokens_are_no_grid(part, ratio, options):
    pipe = patched(merge, part, ratio)
    problem = rf"{DOWN}{part} ran on \d+ queries, and its grid is 16x16 .* tomesd.remove_patch"
    with pytest.raises(CaptureError, match=problem), capture(pipe, **options):
        run(pipe)
    with capture(pipe, layers=["mid", "up"], **options) as store:
        run(pipe)
    assert store.maps


@pytest.mark.parametrize("how", [merge, fewer_keys])
@pytest.mark.slow
def test_maps_are_not_spread_along_merged_tokens(how):
    pipe = patched(how, "attn1")
    up = "up_blocks.3.attentions.{}.transformer_blocks.0.attn1"
    for number in range(3):
        how(pipe.unet.get_submodule(up.format(number)), 0.75)
    options = {"num_inference_steps": 2, "height": 128, "width": 128}
    problem = "ran on 64 queries" if how is merge else "has 64 keys here for 256 cells"
    with pytest.raises(CaptureError, match=problem):
        sdattn.generate(pipe, "a red cat", refine="self", **options)
    assert len(sdattn.generate(pipe, "a red cat", **options)[0].heatmaps) == 3


@pytest.mark.parametrize("passes", [{0}, {3}])
@pytest.mark.slow
def test_deep_layers_that_are_shrunk_in_some_steps(passes):
    """As by Kohya's hires fix."""
    pipe, calls = make_pipeline(), []
    forward = pipe.unet.mid_block.forward
    pipe.unet.register_forward_pre_hook(lambda *_: calls.append(1))

    def shrunk(hidden_states, *args, **kwargs):
        if (len(calls) - 1) % 4 not in passes:
            return forward(hidden_states, *args, **kwargs)
        made = forward(nn.functional.avg_pool2d(hidden_states, 2), *args, **kwargs)
        return nn.functional.interpolate(made, scale_factor=2)

    pipe.unet.mid_block.forward = shrunk
    problem = rf"{MID}.* ran on 1 queries, and its grid is 2x2 .* hires fix .*steps=\(0.5, 1.0\)"
    with pytest.raises(CaptureError, match=problem), capture(pipe):
        run(pipe, num_inference_steps=4)
    calls.clear()
    part = (0.5, 1.0) if passes == {0} else (0.0, 0.5)  # as the message says
    with capture(pipe, steps=part) as store:
        run(pipe, num_inference_steps=4)
    assert len(store.maps) == 16
    assert all((maps.sum(-1) - 1).abs().max() < 1e-5 for maps in store.maps.values())


# -- twice in a pass -------------------------------------------------------------------------------


def regional(attn):
    """Regional prompting: half of each of two texts."""
    forward = attn.forward

    def twice(hidden_states, encoder_hidden_states=None, **kwargs):
        texts = encoder_hidden_states, encoder_hidden_states.flip(1)
        return sum(forward(hidden_states, text, **kwargs) for text in texts) / 2

    attn.forward = twice


@pytest.mark.parametrize("steps", ["mean", "last", "all", [1]])
@pytest.mark.slow
def test_a_layer_that_is_called_twice_is_refused(steps):
    pipe = make_pipeline()
    regional(pipe.unet.get_submodule(DOWN + "attn2"))
    with pytest.raises(CaptureError, match=f"{DOWN}attn2 was called twice in one pass") as refused:
        with capture(pipe, steps=steps):
            run(pipe)
    assert "cache" not in str(refused.value)
    with capture(pipe, layers="mid"):
        run(pipe)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@torch.no_grad()
def test_a_compiled_layer_that_is_called_twice_is_refused(eagerly):
    unet = make_small_unet()
    given = torch.ones(1, 4, 16, 16), 5, torch.ones(1, 7, 32)
    unet.compile()
    with capture(unet) as store:
        unet(*given)
        unet(*given)
    assert all((maps.sum(-1) - 1).abs().max() < 1e-5 for maps in store.maps.values())
    regional(unet.get_submodule(DOWN + "attn2"))
    with pytest.raises(CaptureError, match=f"{DOWN}attn2 was called twice"), capture(unet):
        unet(*given)


def test_joint_attention_that_is_called_twice_is_refused():
    pipe = flux()
    attn = find_denoiser(pipe).layers[0].module
    forward = attn.forward
    attn.forward = lambda *args, **kwargs: forward(*args, **kwargs) and forward(*args, **kwargs)
    with pytest.raises(CaptureError, match="was called twice in one pass"), capture(pipe):
        run(pipe)


@torch.no_grad()
def test_a_module_of_a_model_of_ones_own_may_be_several_layers():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = MultiHeadAttention(8, 2)

        def forward(self, x):
            return self.attention(self.attention(x)[0])[0]

    model, given = Shared(), torch.randn(1, 6, 8)
    with pytest.warns(CaptureWarning, match="some were called several times in one"):
        with capture(model, kinds=("self",)) as store:
            model(given)
    assert store.maps["attention"].shape == (1, 1, 6, 6)
    with pytest.raises(CaptureError, match="ran on 6 queries, .* Pass the latent_size"):
        with capture(model, kinds=("self",), latent_size=(2, 2)):
            model(given)
