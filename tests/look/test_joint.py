"""Joint attention: where its columns and rows are, its gradient, and that no [N, N] matrix is made.

That its values are those of the whole softmax in float64 is tested in test_matrix.py.
"""

import pytest
import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from helpers.joint_models import COLS, MODELS, N_TEXT, ROWS, attending, first_map, inputs
from helpers.largest import Largest
from helpers.transformer_rows import flux
from torch.nn.functional import scaled_dot_product_attention

from sdattn import capture

WAYS = ({"refine": "self"}, {"space": "output"})


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_a_column_belongs_to_its_token_and_a_cell_to_its_patch(kind):
    model = MODELS[kind]().transformer
    given = inputs(kind, model)
    before = first_map(model, given, heads="all").double().log()
    assert before.shape[-3:] == (ROWS, COLS, N_TEXT)

    # Another key in column 3 moves its scores alone: the rest of a row only loses or gains in sum.
    text = given["encoder_hidden_states"].clone()
    text[:, 3] += 1
    after = first_map(model, {**given, "encoder_hidden_states": text}, heads="all").double().log()
    moved = ((after - before) - (after - before)[..., :1]).abs()
    assert moved[..., 3].max() > 1e-2
    assert moved[..., [1, 2, 4, 5, 6]].max() < 1e-4

    # Another query at (1, 4) changes the ratios of the columns there alone.
    image = given["hidden_states"].clone()
    if kind == "SD3":
        image[:, :, 2:4, 8:10] += 1
    else:
        image[:, 1 * COLS + 4] += 1
    after = first_map(model, {**given, "hidden_states": image}, heads="all").double().log()
    moved = ((after - before) - (after - before)[..., :1]).abs().amax((0, -1))
    assert moved[1, 4] > 1e-2
    moved[1, 4] = 0
    assert moved.max() < 1e-4


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_looking_changes_no_bit(kind, options):
    model = MODELS[kind]().transformer
    given = inputs(kind, model)
    plain = model(**given).sample
    with capture(model, **options):
        assert torch.equal(model(**given).sample, plain)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("FLUX.1", {}), ("Qwen-Image", {}), *[("SD3", options) for options in ({}, *WAYS)]],
    ids=str,
)
def test_the_gradient_is_that_of_the_formula(kind, options):
    """Through the softmax, both products of refined maps, and both outputs."""
    model = MODELS[kind]().transformer.double()
    given = inputs(kind, model, torch.float64)
    given = {k: v.double() if torch.is_tensor(v) else v for k, v in given.items()}
    text = given["encoder_hidden_states"].requires_grad_()

    def loss(states):
        kept = {"grad": True, "dtype": torch.float64, **options}
        found = first_map(model, {**given, "encoder_hidden_states": states}, **kept)
        return found[..., 2].square().sum()

    (slope,) = torch.autograd.grad(loss(text), text)
    direction = torch.randn(text.shape, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        step = 1e-3  # the maps are float32
        numeric = (loss(text + step * direction) - loss(text - step * direction)) / (2 * step)
    torch.testing.assert_close((slope * direction).sum(), numeric, rtol=2e-2, atol=1e-7)


@pytest.mark.parametrize(
    ("told", "options"),
    [(True, {}), (False, {}), (True, {"refine": "self"})],
    ids=["kernel's logsumexp", "in slices", "refined"],
)
@torch.no_grad()
def test_no_matrix_of_all_by_all_is_made(told, options, monkeypatch):
    if not told:
        monkeypatch.setattr("sdattn.look.sdpa.backend_with_logsumexp", lambda *_: False)
        monkeypatch.setattr("sdattn.attention.plain.SLICE", 2**16)
    model = flux().transformer
    rows = cols = 32
    with Largest() as plain:
        model(**inputs("FLUX.1", model, rows=rows, cols=cols))
    with Largest() as watched, capture(model, **options):
        model(**inputs("FLUX.1", model, rows=rows, cols=cols))
    heads = model.config.num_attention_heads
    assert heads * (rows * cols) ** 2 > 10 * watched.numel
    assert options or watched.numel <= max(plain.numel, 2**16)


def test_a_gradient_keeps_no_matrix_of_all_by_all(monkeypatch):
    monkeypatch.setattr("sdattn.attention.plain.SLICE", 2**14)
    model = flux().transformer
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: kept.append(one.numel()) or one, lambda one: one
    ):
        with capture(model, grad=True):
            model(**inputs("FLUX.1", model, rows=32, cols=32))
    heads = model.config.num_attention_heads
    assert heads * (32 * 32 + N_TEXT) ** 2 > 10 * max(kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids * torch.tensor([1.0, 1.0, 0.0]), "15 cells.*grid of 3 x"),
        (lambda ids: ids.flip(0), "15 cells"),
        (lambda ids: ids + 1, "0 cells"),
    ],
)
def test_patches_that_are_no_grid_are_named(change, message):
    model = flux().transformer
    given = inputs("FLUX.1", model)
    with pytest.raises(ValueError, match=message), capture(model):
        model(**{**given, "img_ids": change(given["img_ids"])})


@torch.no_grad()
def test_scaled_and_shifted_patches_are_the_same_grid():
    model = flux().transformer
    given = inputs("FLUX.1", model)
    with capture(model) as store:
        model(**{**given, "img_ids": given["img_ids"] * 0.5 + torch.tensor([0.0, 2.0, 7.0])})
    assert store.latent_size == (ROWS, COLS)


# -- processors and models of other orders and kinds ----------------------------------------------


def odd_flux(attend):
    model = flux().transformer
    model.transformer_blocks[0].attn.set_processor(attending(FluxAttnProcessor, attend))
    return model


def image_first(query, key, value, **options):
    moved = [one.roll(-N_TEXT, dims=2) for one in (query, key, value)]
    return scaled_dot_product_attention(*moved, **options).roll(N_TEXT, dims=2)


def text_first(query, key, value, **options):
    moved = [one.roll(N_TEXT, dims=2) for one in (query, key, value)]
    return scaled_dot_product_attention(*moved, **options).roll(-N_TEXT, dims=2)


@pytest.mark.parametrize(
    ("kind", "processor", "attend", "place"),
    [
        ("FLUX.1", FluxAttnProcessor, image_first, "0 to 7"),
        ("SD3", JointAttnProcessor2_0, text_first, "15 to 22"),
    ],
)
@torch.no_grad()
def test_a_processor_that_joins_in_the_other_order_is_refused(kind, processor, attend, place):
    model, plain = MODELS[kind]().transformer, MODELS[kind]().transformer
    model.transformer_blocks[0].attn.set_processor(attending(processor, attend))
    given = inputs(kind, model)
    torch.testing.assert_close(model(**given).sample, plain(**given).sample)
    with pytest.raises(RuntimeError, match=f"Odd does not join .*{place}"):
        with capture(model):
            model(**given)


@torch.no_grad()
def test_a_second_attention_of_all_queries_to_other_keys_does_not_count():
    def twice(query, key, value, **options):
        scaled_dot_product_attention(query, key[:, :, 1:], value[:, :, 1:])
        return scaled_dot_product_attention(query, key, value, **options)

    model = odd_flux(twice)
    given = inputs("FLUX.1", model)
    expected = first_map(flux().transformer, given)
    assert torch.equal(first_map(model, given), expected)


def causal(query, key, value, **options):
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def causal_by_a_mask(query, key, value, **options):
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return scaled_dot_product_attention(query, key, value, mask)


def grouped(query, key, value, **options):
    return scaled_dot_product_attention(query, key[:, :1], value[:, :1], enable_gqa=True)


def grouped_by_copies(query, key, value, **options):
    key, value = (part[:, :1].repeat(1, query.shape[1], 1, 1) for part in (key, value))
    return scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize(
    ("attend", "written_out"), [(causal, causal_by_a_mask), (grouped, grouped_by_copies)]
)
@torch.no_grad()
def test_other_kinds_of_joint_attention_are_shown(attend, written_out):
    given = inputs("FLUX.1", flux().transformer)
    expected = first_map(odd_flux(written_out), given)
    torch.testing.assert_close(first_map(odd_flux(attend), given), expected, atol=1e-6, rtol=0)
    assert (first_map(flux().transformer, given) - expected).abs().max() > 1e-3


@torch.no_grad()
def test_joint_attention_with_dropout_is_refused():
    def attend(query, key, value, **options):
        return scaled_dot_product_attention(query, key, value, dropout_p=0.5)

    model = odd_flux(attend)
    with pytest.raises(RuntimeError, match="dropout"), capture(model):
        model(**inputs("FLUX.1", model))
