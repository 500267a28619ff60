"""Models of no known family: foreign code, watched by two facts."""

import pytest
import torch
from helpers.foreign import (
    WIDTH,
    CompVisUNet,
    Decoder,
    FewerQueries,
    InContext,
    JointTransformer,
    VideoTransformer,
    softmax64,
)
from torch import nn

import sdattn
from sdattn.errors import CaptureError
from sdattn.look import sdpa

ROWS, COLS, T = 4, 6, 7


def made(kind, **options):
    torch.manual_seed(0)
    model = kind(**options).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2)  # attention that is not nearly uniform
    return model


def latents(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text(batch, length=T):
    return latents(batch, length, WIDTH, seed=2)


def ids(batch, rows, cols):
    places = torch.cartesian_prod(
        torch.zeros(1), torch.arange(rows) * 1.0, torch.arange(cols) * 1.0
    )
    return places.expand(batch, -1, -1)


def unet_call(batch):
    return latents(batch, 4, ROWS, COLS), torch.full((batch,), 500.0), text(batch)


def joint_call(batch):
    states = latents(batch, ROWS * COLS, 4)
    return states, ids(batch, ROWS, COLS), text(batch), torch.zeros(batch, T, 3)


def image_call(batch):
    return latents(batch, 4, ROWS, COLS), text(batch)


def video_call(batch):
    return latents(batch, 4, 3, ROWS, COLS), text(batch)


# model, its call, what is told of it, queries of the image, keys of the text
ALL = slice(None)
BEHIND = slice(-T, None)
CASES = {
    "CompVis": (CompVisUNet, unet_call, {"text": "context"}, ALL, ALL),
    "BFL": (JointTransformer, joint_call, {"text": slice(0, T)}, slice(T, None), slice(0, T)),
    "nn.MultiheadAttention": (Decoder, image_call, {"text": "memory"}, ALL, ALL),
    "timm": (InContext, image_call, {"text": BEHIND}, slice(0, ROWS * COLS), BEHIND),
    "video": (VideoTransformer, video_call, {"text": "encoder_hidden_states"}, ALL, ALL),
    "fewer queries": (FewerQueries, image_call, {"text": slice(0, T)}, ALL, slice(0, T)),
}


def grid_of(name):
    return (3, ROWS, COLS) if name == "video" else (ROWS, COLS)


CAST = [(name, False) for name in CASES]
# Under autocast the others make their own products in bfloat16.
CAST += [(name, True) for name in ("BFL", "video", "fewer queries")]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "cast"), CAST)
def test_foreign_code_is_bit_equal_and_shown_as_it_was(name, batch, cast):
    kind, make_call, told, image, keys = CASES[name]
    model, call = made(kind), make_call(batch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        plain = [model(*call) for _ in range(2)]
        for pairs in model.seen.values():
            pairs.clear()
        getattr(model, "seen_states", []).clear()
        with sdattn.capture(model, grid=grid_of(name), **told) as store:
            watched = [model(*call) for _ in range(2)]
    assert all(map(torch.equal, plain, watched))
    assert set(store.maps) == set(model.seen)
    for layer, pairs in model.seen.items():
        expected = torch.stack([softmax64(*pair) for pair in pairs]).mean(0)[:, image, keys]
        found = store.maps[layer].flatten(1, -2)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("name", "asked"), [("BFL", 2), ("fewer queries", 1), ("video", 1)])
def test_a_logsumexp_is_asked_for_where_text_and_image_are_keys(name, asked, monkeypatch):
    """It makes the share of some keys cheap; cross-attention shows all of them, so it costs there.
    A dry run computes none, and calls the model three times."""
    kind, make_call, told, *_ = CASES[name]
    model, call, calls = made(kind), make_call(1), []
    kernel = sdpa.attend_with_logsumexp
    monkeypatch.setattr(sdpa, "attend_with_logsumexp", lambda *g: calls.append(g) or kernel(*g))
    captured(model, call, grid=grid_of(name), **told)
    assert len(calls) == asked
    model.register_forward_pre_hook(lambda *_: calls.append("dry run"))
    sdattn.inspect_attention(model, *call)
    assert calls[asked:] == ["dry run"] * 3


def test_maps_have_the_grid_of_each_layer():
    model = made(CompVisUNet)
    with sdattn.capture(model, text="context", grid=(ROWS, COLS)) as store:
        model(*unet_call(2))
    shapes = {name: tuple(maps.shape) for name, maps in store.maps.items()}
    assert shapes == {
        "attn2.down": (2, ROWS, COLS, T),
        "attn2.mid": (2, ROWS // 2, COLS // 2, T),
        "attn2.up": (2, ROWS, COLS, T),
    }


def captured(model, call, watched=None, layers=None, **options):
    with torch.no_grad(), sdattn.capture(watched or model, layers=layers, **options) as store:
        model(*call)
    return store


def test_layers_are_chosen_by_a_pattern_of_their_paths():
    told = {"text": "context", "grid": (ROWS, COLS)}
    store = captured(made(CompVisUNet), unet_call(1), layers=["*.up", "attn2.mid"], **told)
    assert list(store.maps) == ["attn2.mid", "attn2.up"]
    store = captured(made(CompVisUNet), unet_call(1), kinds=("self",), **told)
    assert {tuple(maps.shape[1:]) for maps in store.maps.values()} == {
        (ROWS, COLS, ROWS * COLS),
        (ROWS // 2, COLS // 2, ROWS * COLS // 4),
    }
    for misspelt in (["*.up", "attn3"], "attn3"):
        every = r"\n  attn2\.down \(block, cross 4x6\)\n  attn2\.mid .*\n  attn2\.up "
        with pytest.raises(ValueError, match=rf"fits 'attn3'. The model has:{every}"):
            captured(made(CompVisUNet), unet_call(1), layers=misspelt, **told)


def test_guidance_in_the_batch_is_told_as_for_any_loop():
    model, call = made(CompVisUNet), unet_call(4)
    told = {"text": "context", "grid": (ROWS, COLS)}
    every = captured(model, call, **told)
    kept = captured(model, call, guidance="batch", **told)
    assert torch.equal(kept.maps["attn2.up"], every.maps["attn2.up"][2:])


def test_heads_before_images_are_refused_unless_there_is_one_image():
    model = made(CompVisUNet, heads_first=True)
    told = {"text": "context", "grid": (ROWS, COLS)}
    store = captured(model, unet_call(1), **told)
    expected = softmax64(*model.seen["attn2.up"][0])
    assert (store.maps["attn2.up"].flatten(1, 2) - expected).abs().max() < 1e-5
    with pytest.raises(RuntimeError, match="which image each row belongs to"):
        captured(model, unet_call(3), **told)


def test_a_joint_layer_wants_a_slice_and_names_the_dry_run():
    with pytest.raises(ValueError, match="inspect_attention"):
        captured(made(JointTransformer), joint_call(1), text="txt", grid=(ROWS, COLS))


def test_a_grid_may_be_a_function_of_the_call():
    def grid(given):
        return given["img_ids"][0].amax(0)[1:].int().add(1).tolist()

    store = captured(made(JointTransformer), joint_call(2), text=slice(0, T), grid=grid)
    assert store.maps["double_blocks.1"].shape == (2, ROWS, COLS, T)


def test_padding_is_in_the_mask_of_torchs_own_attention():
    model, call = made(Decoder), image_call(2)
    padding = torch.arange(T).expand(2, -1) >= torch.tensor([[T], [4]])
    store = captured(model, (*call, padding), text="memory", grid=(ROWS, COLS))
    maps = store.maps["layer.multihead_attn"]
    assert not maps[1, ..., 4:].any() and maps[1, ..., :4].sum(-1).allclose(torch.ones(ROWS, COLS))
    query, key = model.seen["layer.multihead_attn"][0]
    assert (maps[:1].flatten(1, 2) - softmax64(query, key)[:1]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"text": "contxt", "grid": (ROWS, COLS)}, "no tensor of this name. Its arguments: x, "),
        ({"text": slice(None), "grid": (ROWS, COLS)}, "a length of its own"),
        ({"text": 77, "grid": (ROWS, COLS)}, "a slice of the keys, a tensor"),
        ({"text": "context", "grid": 64}, r"\(rows, cols\)"),
        ({"text": "context", "grid": (5, 5)}, r"No cross or .* attn2.up \(24 q"),
        ({"text": slice(0, 5), "grid": (ROWS, COLS)}, r"attn2.up \(24 q.* attn1.down \(self\)"),
        ({"text": "context", "grid": (ROWS, COLS), "refine": "self"}, "known family"),
        ({"text": "context", "grid": (ROWS, COLS), "max_bytes": 9}, "max_bytes"),
        ({"text": "context"}, "grid"),
        ({"grid": (ROWS, COLS)}, "text"),
    ],
)
def test_what_is_told_wrong_is_refused(told, problem):
    model = made(CompVisUNet)
    with pytest.raises((CaptureError, ValueError, TypeError), match=problem):
        captured(model, unet_call(1), **told)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_as_many_tokens_as_cells_are_refused_unless_layers_are_named():
    model = made(VideoTransformer)
    call = latents(1, 4, 1, 2, 4), text(1, 8)
    told = {"text": "encoder_hidden_states", "grid": (1, 2, 4)}
    with pytest.raises(ValueError, match="self- or cross-attention"):
        captured(model, call, **told)
    store = captured(model, call, layers="cross_attn", **told)
    expected = softmax64(*model.seen["cross_attn"][-1])
    assert (store.maps["cross_attn"].flatten(1, 3) - expected).abs().max() < 1e-5


@torch.no_grad()
def test_a_function_compiled_around_the_model_is_named():
    model, call = FewerQueries().eval(), image_call(2)
    model.attn.seen = NoList()  # a list that grows would have each call compiled anew
    told = {"text": slice(0, T), "grid": (ROWS, COLS), "layers": "attn"}
    plain = model(*call)
    step = torch.compile(lambda *given: model(*given), backend="eager")
    with pytest.raises(RuntimeError, match="compiles a function around .* plain function"):
        captured(step, call, model, **told)
    torch._dynamo.reset()
    assert torch.equal(step(*call), plain)
    with pytest.raises(
        CaptureError, match="never called inside .* torch.compile .* plain function"
    ):
        captured(step, call, model, **told)


class NoList:
    def append(self, _pair):
        """Keep nothing."""


def test_a_model_that_raises_is_left_as_it_was():
    model, call = made(CompVisUNet), unet_call(1)
    plain = model(*call)
    with pytest.raises(RuntimeError, match="shape"):
        with sdattn.capture(model, text="context", grid=(ROWS, COLS)):
            model(call[0], call[1], text(1)[..., :3])
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.equal(model(*call), plain)


def test_torchs_fused_operations_still_run():
    """nn.MultiheadAttention chooses other kernels while a mode of torch's is there."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True).eval()
    model = made(Decoder)
    model.before = encoder
    model.forward = lambda sample, memory: Decoder.forward(model, sample, encoder(memory))
    call = image_call(2)
    with torch.no_grad():
        plain = model(*call)
        with sdattn.capture(model, text=text(2), grid=(ROWS, COLS)) as store:
            assert torch.equal(model(*call), plain)
    assert set(store.maps) == {"layer.multihead_attn"}


def test_a_gradient_reaches_the_latents():
    model, call = made(JointTransformer), list(joint_call(1))
    call[0] = call[0].requires_grad_()
    with sdattn.capture(model, text=slice(0, T), grid=(ROWS, COLS), grad=True) as store:
        model(*call)
    of_word = store.maps["double_blocks.1"][..., 2].sum()
    (found,) = torch.autograd.grad(of_word, call[0], retain_graph=True)
    pair = model.seen["double_blocks.1"][-1]
    (expected,) = torch.autograd.grad(softmax64(*pair)[:, T:, 2].sum(), call[0])
    assert expected.abs().max() > 1e-4
    assert (found - expected).abs().max() < 1e-5


def test_heatmaps_read_labels():
    told = {"text": "context", "grid": (ROWS, COLS)}
    model = made(CompVisUNet)
    store = captured(model, unet_call(2), layers=["attn2.down", "attn2.up"], **told)
    found = store.heatmaps(prompt={"cat": [2], "red dog": [4, 5]})[1]["red dog"]
    layers = [softmax64(*model.seen[name][0])[1, :, 4:6].sum(-1) for name in store.maps]
    assert (found.values.flatten() - sum(layers) / 2).abs().max() < 1e-6


@torch.no_grad()
def test_a_text_without_what_read_it_says_what_reads_it():
    store = captured(made(CompVisUNet), unet_call(1), text="context", grid=(ROWS, COLS))
    with pytest.raises(ValueError, match=r"a tokenizer, .* or columns by name"):
        store.heatmaps(prompt="a cat")


def test_a_kernel_in_place_of_torchs_is_seen_and_named(monkeypatch):
    torchs = nn.functional.scaled_dot_product_attention

    def tiled(query, key, value):
        halves = (torchs(part, key, value) for part in query.chunk(2, dim=2))
        return torch.cat(list(halves), dim=2)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", tiled)
    model, call = made(JointTransformer), joint_call(2)
    plain = model(*call)
    with sdattn.capture(model, text=slice(0, T), grid=(ROWS, COLS)) as store:
        assert torch.equal(model(*call), plain)
    expected = softmax64(*model.seen["double_blocks.1"][-1])[:, T:, :T]
    assert (store.maps["double_blocks.1"].flatten(1, 2) - expected).abs().max() < 1e-5
    [(name, difference)] = store.kernels.items()
    assert name.endswith("tiled") and difference < 1e-5
