"""TorchJointProcessor against diffusers' processors, and what it says to a controller."""

import pytest
import torch
from diffusers import AuraFlowTransformer2DModel, SanaTransformer2DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_flux import FluxAttention
from helpers.joint_parity import NAMES, controlled, sharp_inputs, sharp_model, shown, spans_of
from helpers.matrix_oracle import recorded
from torch import nn

from sdattn import TorchJointProcessor
from sdattn.models.denoiser import find_denoiser

CELLS, N_TEXT = 15, 7


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", NAMES)
def test_agrees_with_diffusers_and_with_the_softmax_of_its_operands(kind, batch):
    model = sharp_model(kind)
    given = sharp_inputs(kind, model, batch=batch)
    with recorded(model, ("joint", "self")) as record:
        expected = model(**given).sample
    found = shown(model)
    output = model(**given).sample
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    assert set(found) == set(record)
    for name, probs in found.items():
        [exact] = record[name]  # float64, in the order in which diffusers joins
        torch.testing.assert_close(probs.double(), exact, atol=1e-5, rtol=0)
    spread = torch.stack([p.std() for p in found.values()])
    assert spread.min() > 1e-3  # what is nearly even would hide a fault


@torch.no_grad()
@pytest.mark.parametrize("kind", ["FLUX.1", "FLUX.2", "Qwen-Image", "SD3"])
def test_fused_projections(kind):
    model = sharp_model(kind)
    given = sharp_inputs(kind, model)
    expected = model(**given).sample
    for layer in find_denoiser(model).layers:
        layer.module.fuse_projections()
        layer.module.set_processor(TorchJointProcessor())
    for layer in find_denoiser(model).layers:
        for name in ("to_q", "to_k", "to_v"):  # nothing of the unfused ones is used
            if hasattr(layer.module, name):
                getattr(layer.module, name).weight.data.zero_()
    torch.testing.assert_close(model(**given).sample, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_mask_of_qwens_text():
    """Padding of the second prompt; a hole in the first."""
    model = sharp_model("Qwen-Image")
    mask = torch.ones(2, N_TEXT, dtype=torch.bool)
    mask[0, 2] = mask[1, 4:] = False
    given = {**sharp_inputs("Qwen-Image", model, batch=2), "encoder_hidden_states_mask": mask}
    with recorded(model) as record:
        expected = model(**given).sample
    found = shown(model)
    torch.testing.assert_close(model(**given).sample, expected, atol=1e-5, rtol=0)
    for name, probs in found.items():
        torch.testing.assert_close(probs.double(), record[name][0], atol=1e-5, rtol=0)
        assert not probs[0, :, :, 2].any()
        assert not probs[1, :, :, 4:7].any()


@torch.no_grad()
@pytest.mark.parametrize("masked", ["keys", "keys of queries"])
def test_a_mask_over_all_tokens_of_flux(masked):
    """Chroma's, whose blocks are FLUX's."""
    torch.manual_seed(0)
    layer = FluxAttention(32, heads=2, dim_head=16, added_kv_proj_dim=32, context_pre_only=False)
    states, text = torch.randn(2, 5, 32), torch.randn(2, 3, 32)
    angles = torch.rand(8, 8).repeat_interleave(2, dim=1)
    keep = torch.rand(2, 1, 1 if masked == "keys" else 8, 8) > 0.3
    keep[..., 0] = True
    given = states, text, keep, (angles.cos(), angles.sin())
    expected = layer.processor(layer, *given)
    for ours, theirs in zip(TorchJointProcessor()(layer, *given), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", NAMES)
def test_bfloat16(kind):
    """Not farther from the float32 model than diffusers' own processors are, by half."""
    model = sharp_model(kind)
    exact = model(**sharp_inputs(kind, model)).sample
    model = model.to(torch.bfloat16)
    given = sharp_inputs(kind, model, torch.bfloat16)
    theirs = model(**given).sample.float() - exact
    model.set_attn_processor(TorchJointProcessor())
    ours = model(**given).sample.float() - exact
    assert ours.norm() < 1.5 * theirs.norm()
    assert 1e-4 < theirs.norm() / exact.norm() < 0.1


# -- the controller --------------------------------------------------------------------------------


def plain_probs(kind):
    model = sharp_model(kind)
    found = shown(model)
    output = model(**sharp_inputs(kind, model, batch=2)).sample
    return found, output


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"image": True}, {"queries": "all"}], ids=str)
@pytest.mark.parametrize("kind", NAMES)
def test_a_controller_sees_the_blocks_that_it_asks_for(kind, options):
    """The image's rows and the text's columns, the image's own block before them, or all rows in
    the order in which the layer joins them."""
    seen, expected = [], []
    model, given = controlled(kind, lambda *call: seen.append(call), **options)
    output = model(**given).sample
    probs, plain = plain_probs(kind)
    assert torch.equal(output, plain)
    image, text = spans_of(kind)
    for layer in find_denoiser(model).layers:
        whole = probs[layer.name]
        if layer.kind == "self":
            expected.append((whole, False, layer.place))
            continue
        if "image" in options:
            expected.append((whole[:, :, image, image], False, layer.place))
        rows = whole if "queries" in options else whole[:, :, image]
        expected.append((rows[..., text], True, layer.place))
    for (block, *about), (whole, *told) in zip(seen, expected, strict=True):
        assert about == told and block.is_contiguous()
        assert torch.equal(block, whole.flatten(0, 1))


def first_layer_watched(kind, controller, **options):
    """The first layer's probabilities as they were used, and without a controller."""
    model, given = controlled(kind, controller, **options)
    used = []
    first = find_denoiser(model).layers[0].module.processor
    first.watchers.append(lambda call: used.append(call.probs))
    model(**given)
    probs, _ = plain_probs(kind)
    return used[0], next(iter(probs.values()))


@torch.no_grad()
@pytest.mark.parametrize("queries", ["image", "all"])
@pytest.mark.parametrize("kind", ["SD3", "FLUX.1"])
def test_a_key_set_to_zero_is_that_key_masked_out(kind, queries):
    def without_third(probs, is_cross, _place):
        if is_cross:
            probs[..., 3] = 0

    used, plain = first_layer_watched(kind, without_third, queries=queries)
    image, text = spans_of(kind)
    scores = plain.double().log()
    rows = slice(None) if queries == "all" else image
    scores[:, :, rows, text.start + 3] = -torch.inf
    torch.testing.assert_close(used.double(), scores.softmax(-1), atol=1e-6, rtol=0)
    if queries == "image":
        assert torch.equal(used[:, :, text], plain[:, :, text])


@torch.no_grad()
@pytest.mark.parametrize("returns", [True, False])
def test_a_column_times_f_is_log_f_added_to_its_scores(returns):
    def times(probs, is_cross, _place):
        target = probs.clone() if returns else probs
        target[..., 3] *= 1000.0 if is_cross else 0.5
        return target if returns else None

    used, plain = first_layer_watched("FLUX.1", times, image=True)
    image, text = spans_of("FLUX.1")
    scores = plain.double().log()
    scores[:, :, image, text.start + 3] += torch.tensor(1000.0).double().log()
    scores[:, :, image, image.start + 3] += torch.tensor(0.5).double().log()
    torch.testing.assert_close(used.double(), scores.softmax(-1), atol=1e-6, rtol=0)
    torch.testing.assert_close(used.sum(-1), torch.ones_like(used[..., 0]), atol=1e-6, rtol=0)


@torch.no_grad()
def test_where_next_to_nothing_is_left_the_row_still_sums_to_one():
    """Almost everything on the text, which is taken away: 1 + (what was added) has no digits."""
    torch.manual_seed(0)
    layer = FluxAttention(16, heads=1, dim_head=16, added_kv_proj_dim=16, context_pre_only=False)
    layer.norm_added_k.weight.data *= 8  # scores of the text to +-32, of the image to +-4
    turns = torch.ones(15, 16), torch.zeros(15, 16)
    given = torch.randn(1, 12, 16), torch.randn(1, 3, 16), None, turns
    shares = []
    for controller in (None, lambda probs, *_: probs.zero_()):
        processor = TorchJointProcessor(controller, "double")
        processor.watchers.append(lambda call: shares.append(call.probs))
        processor(layer, *given)
    left = shares[0][:, :, 3:, 3:].double()
    assert left.sum(-1).min() < 1e-6  # two digits of float32 at the most
    expected = left / left.sum(-1, keepdim=True)
    torch.testing.assert_close(shares[1][:, :, 3:, 3:].double(), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_rows_that_attend_to_nothing_stay_zero_and_negative_shares_are_none():
    torch.manual_seed(0)
    layer = FluxAttention(32, heads=2, dim_head=16, added_kv_proj_dim=32, context_pre_only=False)
    states, text = torch.randn(1, 5, 32), torch.randn(1, 3, 32)
    keep = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    keep[:, :, 4] = False  # the second cell sees nothing

    def below_zero(probs, _cross, _place):
        return probs * -2 if below else probs + 0.1

    angles = torch.zeros(8, 16)
    for below in (True, False):
        used = []
        processor = TorchJointProcessor(below_zero, "double")
        processor.watchers.append(lambda call, used=used: used.append(call.probs))
        processor(layer, states, text, keep, (angles.cos(), angles.sin()))
        [probs] = used
        assert not probs[:, :, 4].any()
        sums = probs[:, :, [3, 5, 6, 7]].sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
        if below:
            assert not probs[:, :, 3:, :3].any()


@torch.no_grad()
def test_what_the_controller_was_shown_holds_what_was_used():
    kept = []

    def halve(probs, is_cross, _place):
        kept.append(probs)
        probs[..., 2] /= 2

    used, _ = first_layer_watched("SD3", halve)
    image, text = spans_of("SD3")
    assert torch.equal(kept[0], used[:, :, image, text].flatten(0, 1))


def test_gradients_reach_the_latents_through_an_edit():
    """Of the loss of Attend-and-Excite, against finite differences in float64."""
    torch.manual_seed(0)
    layer = FluxAttention(8, heads=2, dim_head=4, added_kv_proj_dim=8, context_pre_only=False)
    layer = layer.double()
    text = torch.randn(1, 3, 8, dtype=torch.float64)
    angles = torch.zeros(7, 4, dtype=torch.float64)

    for edit in (lambda probs, *_: probs * 2, lambda probs, *_: probs.mul_(3), lambda *_: None):
        kept = []

        def loss(states, kept=kept, edit=edit):
            def look(probs, *call):
                kept.append(probs)
                return edit(probs, *call)

            processor = TorchJointProcessor(look, "double", image=True)
            made, words = processor(layer, states, text, None, (angles.cos(), angles.sin()))
            return made.square().sum() + words.sum() + kept[-1][..., 1].max()

        states = torch.randn(1, 4, 8, dtype=torch.float64, requires_grad=True)
        # float32 sums of the rows: 1e-7 / 1e-3
        assert torch.autograd.gradcheck(loss, [states], eps=1e-3, atol=1e-2)


# -- what is refused -------------------------------------------------------------------------------


def test_a_controller_without_a_known_split_is_refused():
    model = sharp_model("FLUX.1")
    model.set_attn_processor(TorchJointProcessor(lambda *_: None, "double"))
    with pytest.raises(RuntimeError, match="FluxAttention.*joined.*spans="):
        model(**sharp_inputs("FLUX.1", model))


@pytest.mark.parametrize("kind", ["SD3", "FLUX.1"])
def test_a_split_that_the_layer_contradicts_is_refused(kind):
    other = spans_of("FLUX.1" if kind == "SD3" else "SD3")
    model = sharp_model(kind)
    processor = TorchJointProcessor(lambda *_: None, "double", spans=lambda: other)
    model.set_attn_processor(processor)
    with pytest.raises(RuntimeError, match="spans|text"):
        model(**sharp_inputs(kind, model))


def test_options_and_shapes_are_checked():
    with pytest.raises(ValueError, match="queries='text'.*'image'"):
        TorchJointProcessor(queries="text")
    model, given = controlled("SD3", lambda probs, *_: probs[:1])
    with pytest.raises(ValueError, match=r"\[8, 15, 7\].*returned \[1, 15, 7\]"):
        model(**given)


def flux_layer(**options):
    return FluxAttention(16, heads=2, dim_head=8, **options)


TEXT = {"encoder_hidden_states": torch.randn(1, 3, 16)}
TURNS = torch.ones(4, 8), torch.zeros(4, 8)  # of the image's tokens alone, as in HunyuanVideo
MASK = torch.ones(1, 7, dtype=torch.bool)
TWO_STREAMS = {"added_kv_proj_dim": 16, "context_pre_only": False}
SMALL = {"heads": 2, "dim_head": 8}
REFUSED = {
    "given text and has no projections": (Attention(16, cross_attention_dim=16, **SMALL), TEXT),
    "given no text and has projections": (flux_layer(**TWO_STREAMS), {}),
    r"rotary embeddings \[\(4, 8\), \(4, 8\)\] for": (
        flux_layer(**TWO_STREAMS),
        {**TEXT, "image_rotary_emb": TURNS},
    ),
    "keys and values of fewer heads": (Attention(16, heads=4, kv_heads=2, dim_head=4), {}),
    "IP-Adapter": (flux_layer(pre_only=True), {"ip_hidden_states": [1]}),
    "a cache of keys": (flux_layer(pre_only=True), {"kv_cache_mode": "extract"}),
    "freqs_cis": (flux_layer(pre_only=True), {"freqs_cis": torch.ones(4, 4)}),
    "residual_connection": (Attention(16, residual_connection=True, **SMALL), {}),
    "unknown order": (Attention(16, **SMALL, **TWO_STREAMS), {**TEXT, "attention_mask": MASK}),
    "has no heads": (nn.Linear(16, 16), {}),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_other_layers_are_refused_by_name(problem):
    layer, given = REFUSED[problem]
    with pytest.raises(TypeError, match=rf"{type(layer).__name__}.*{problem}.*capture\(\)"):
        TorchJointProcessor()(layer, torch.randn(1, 4, 16), **given)


def test_other_models_are_refused_by_name():
    torch.manual_seed(0)
    sana = SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=8,
        num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16,
        caption_channels=16, sample_size=8,
    )  # fmt: skip
    sana.set_attn_processor(TorchJointProcessor())
    with pytest.raises(TypeError, match=r"Attention that"):
        sana(torch.randn(1, 4, 8, 8), torch.randn(1, 3, 16), torch.tensor([1]))


@torch.no_grad()
def test_aura_flows_attention_has_no_rotation_either():
    """A layer of the same parts that joins the text first: the softmax has no order."""
    torch.manual_seed(0)
    model = AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=1,
        num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pos_embed_max_size=16,
    )  # fmt: skip
    given = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 16), torch.tensor([0.5])
    expected = model(*given).sample
    model.set_attn_processor(TorchJointProcessor())
    torch.testing.assert_close(model(*given).sample, expected, atol=1e-5, rtol=0)
