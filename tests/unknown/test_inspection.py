"""`inspect_attention()`, and a capture by its own proposal, unedited."""

import diffusers
import pytest
import torch
from helpers.foreign import WIDTH, CompVisUNet, Decoder, InContext, JointTransformer, softmax64
from helpers.matrix_oracle import softmax_in_float64
from helpers.newer import newer
from helpers.unclaimed import UNCLAIMED
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import sdattn
from sdattn.unknown.dry_run import Tokens
from sdattn.unknown.inspection import _differing

T = 7


def built(name):
    torch.manual_seed(0)
    model = newer(name)(**UNCLAIMED[name].config).eval()
    for parameter in model.parameters():  # gates are zero in a new model, and hide the text
        if parameter.ndim == 1 or not parameter.any():
            parameter.data += torch.randn_like(parameter) / 10
    return model


class Calls(TorchFunctionMode):
    """What torch's kernel got: the softmax in float64, mean over heads, ``[B, N, T]``."""

    def __init__(self):
        super().__init__()
        self.probs = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            self.note(*args, **kwargs)
        return func(*args, **kwargs)

    def note(self, query, key, value, attn_mask=None, scale=None, enable_gqa=False, **_):
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        probs = softmax_in_float64(query, key, attn_mask, scale)
        self.probs.append(probs.nan_to_num().mean(1))


def of_text(probs, text):
    """What the image pays the text in one call, ``[1, N, T]``; None for a call without text."""
    queries, keys = probs.shape[1:]
    if not isinstance(text, slice):  # frames may be rows
        return probs.reshape(1, -1, keys) if keys == T else None
    columns = range(keys)[text]
    image = [row for row in range(queries) if queries < keys or row not in columns]
    return probs[:, image][..., list(columns)] if keys > T else None


@pytest.mark.parametrize("name", UNCLAIMED)
def test_its_own_proposal_is_right_and_works_unedited(name):
    model, truth = built(name), UNCLAIMED[name]
    table = sdattn.inspect_attention(model, **truth.call())
    assert (table.proposal.text, table.proposal.grid) == (truth.text, truth.grid)

    with torch.no_grad(), Calls() as calls:
        plain = model(**truth.call(), return_dict=False)[0]
    with torch.no_grad(), sdattn.capture(model, **table.proposal.options) as store:
        watched = model(**truth.call(), return_dict=False)[0]
    assert torch.equal(plain, watched)

    seeing = [call.name for call in table if call.kind in ("cross", "joint")]
    assert list(store.maps) == seeing and seeing
    found = (of_text(probs, table.proposal.text) for probs in calls.probs)
    expected = [probs for probs in found if probs is not None]
    for maps, probs in zip(store.maps.values(), expected, strict=True):
        assert (maps.flatten(1, -2) - probs).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["LatteTransformer3DModel", "UNet3DConditionModel"])
def test_attention_across_frames_is_temporal(name):
    table = sdattn.inspect_attention(built(name), **UNCLAIMED[name].call())
    temporal = {call.name for call in table if call.kind == "temporal"}
    across = ("temp_attentions", "transformer_in", "temporal_transformer_blocks")
    assert temporal == {call.name for call in table if any(part in call.name for part in across)}
    assert {call.kind for call in table} == {"cross", "self", "temporal"}


def test_as_many_frames_as_cells_are_not_told_apart():
    name = "LatteTransformer3DModel"
    torch.manual_seed(0)
    model = diffusers.LatteTransformer3DModel(**UNCLAIMED[name].config | {"video_length": 16})
    call = UNCLAIMED[name].call() | {"hidden_states": torch.randn(1, 4, 16, 8, 8)}
    table = sdattn.inspect_attention(model.eval(), **call)
    assert table.proposal.grid == (16, 4, 4)  # its rows tell the frames
    assert not any("grid" in line for line in table.proposal.unsure)
    assert {call.kind for call in table} == {"cross", "self"}


def test_four_frames_a_patch_may_be_two_cells_a_side():
    """A patch of 1x2x2 makes as many cells of 8 frames as one of 4x1x1, and is more usual."""
    name = "AllegroTransformer3DModel"
    call = UNCLAIMED[name].call() | {"hidden_states": torch.randn(1, 4, 8, 8, 12)}
    call["attention_mask"] = torch.ones(1, 8, 8, 12)
    proposal = sdattn.inspect_attention(built(name), **call).proposal
    assert proposal.grid == (8, 4, 6)
    [doubt] = [line for line in proposal.unsure if "grid" in line]
    assert "192 cells may also be 2x8x12" in doubt


def foreign(kind):
    torch.manual_seed(0)
    return kind().eval()


def image(rows=4, cols=6):
    return torch.randn(2, 4, rows, cols, generator=torch.Generator().manual_seed(1))


def text(length=T):
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(2))


def test_the_table_says_what_was_seen_and_the_line_to_type():
    table = sdattn.inspect_attention(foreign(CompVisUNet), image(), torch.ones(2), text())
    assert [(call.name, call.kind, call.heads, call.queries, call.keys) for call in table[:3]] == [
        ("attn1.down", "self", 2, 24, 24),
        ("attn2.down", "cross", 2, 24, T),
        ("attn1.mid", "self", 2, 6, 6),
    ]
    head, *rows, _, line, doubt = str(table).split("\n")
    assert " ".join(head.split()) == "layer made by heads queries keys mask kind text"
    assert " ".join(rows[1].split()) == "attn2.down softmax and product 2 24 7 cross 0:7"
    assert line == "sdattn.capture(model, text='context', grid=(4, 6))"
    assert doubt == "# not sure: that context holds the text is told by its name alone"


def test_a_marked_tensor_leaves_no_doubt():
    states = text()
    table = sdattn.inspect_attention(foreign(InContext), image(), states, text=states)
    assert table.proposal.text == slice(-T, None) and table.proposal.unsure == ()
    assert table.proposal.options == {"text": slice(-T, None), "grid": (4, 6)}


def test_nothing_of_the_model_and_of_the_random_numbers_changes():
    model = foreign(CompVisUNet)
    model.conv_out = nn.Sequential(model.conv_out, nn.BatchNorm2d(4))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    sdattn.inspect_attention(model, image(), torch.ones(2), text())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_text_whose_mean_reaches_every_token_is_told_by_another_image():
    class Pooled(CompVisUNet):
        def forward(self, x, timesteps, context):
            return super().forward(
                x + context.mean((1, 2))[:, None, None, None], timesteps, context
            )

    table = sdattn.inspect_attention(foreign(Pooled), image(), torch.ones(2), text())
    assert [call.kind for call in table] == ["self", "cross"] * 3
    assert table.proposal.text == "context"


def test_as_many_tokens_as_cells_are_told_apart_by_names_of_layers():
    table = sdattn.inspect_attention(foreign(CompVisUNet), image(), torch.ones(2), text(24))
    assert [call.kind for call in table] == ["self", "cross"] * 3
    assert table.proposal.layers == ("attn2.down", "attn2.mid", "attn2.up")
    model, call = foreign(CompVisUNet), (image(), torch.ones(2), text(24))
    with torch.no_grad(), sdattn.capture(model, **table.proposal.options) as store:
        model(*call)
    expected = softmax64(*model.seen["attn2.up"][0])
    assert (store.maps["attn2.up"].flatten(1, 2) - expected).abs().max() < 1e-5


def test_a_fourth_number_of_ids_is_no_side_of_the_grid():
    ids = torch.cartesian_prod(*map(torch.arange, (1, 4, 6, 1)))[None].expand(2, -1, -1)
    call = image().flatten(2).mT, ids, text(), torch.zeros(2, T, 4)
    assert sdattn.inspect_attention(foreign(JointTransformer), *call).proposal.grid == (4, 6)


def test_what_is_not_known_is_said():
    packed = image().flatten(2).mT
    ids = torch.zeros(2, 24, 3), torch.zeros(2, T, 3)
    proposal = sdattn.inspect_attention(
        foreign(JointTransformer), packed, ids[0], text(), ids[1]
    ).proposal
    assert proposal.text == slice(0, T) and proposal.grid is None
    assert "no argument tells the grid of 24 cells: 2x12, 3x8, 4x6?" in proposal.unsure
    with pytest.raises(ValueError, match="no argument tells the grid"):
        proposal.options  # noqa: B018
    table = sdattn.inspect_attention(foreign(Decoder), image(), text(), text="memory")
    assert table.proposal.text == "memory"
    with pytest.raises(ValueError, match="Its arguments: sample, memory"):
        sdattn.inspect_attention(foreign(Decoder), image(), text(), text="context")
    with pytest.raises(ValueError, match="meta device"):
        sdattn.inspect_attention(foreign(Decoder).to("meta"), image(), text())
    with pytest.raises(TypeError, match="is called once a step"):
        sdattn.inspect_attention("unet", image(), text())
    with pytest.raises(ValueError, match=r"text=slice\(0, 7.*the name of its argument; its place"):
        sdattn.inspect_attention(foreign(Decoder), image(), text(), text=slice(0, T))


def test_a_model_that_is_watched_is_not_inspected():
    model, call = foreign(Decoder), (image(), text())
    with torch.no_grad(), sdattn.capture(model, text="memory", grid=(4, 6)) as store:
        model(*call)
        with pytest.raises(sdattn.CaptureError, match="Decoder that is watched .* before"):
            sdattn.inspect_attention(model, *call)
    assert len(store.passes) == 1
    assert sdattn.inspect_attention(model, *call, text="memory").proposal.grid == (4, 6)


def test_a_long_text_is_told_by_more_than_one_number():
    """A single number would be alike in two runs for some of so many tokens."""
    model = foreign(CompVisUNet)
    for seed in range(3):
        states = torch.randn(1, 2000, WIDTH, generator=torch.Generator().manual_seed(seed))
        table = sdattn.inspect_attention(model, image()[:1], torch.ones(1), states)
        assert [call.kind for call in table] == ["self", "cross"] * 3


class Reading(nn.Module):
    """A decoder, whose text is ``read`` from the second argument of its call."""

    def __init__(self, read):
        super().__init__()
        self.decoder, self.read = Decoder(), read
        self.embed = nn.Embedding(9, WIDTH)

    def forward(self, sample, cond):
        return self.decoder(sample, self.read(self, cond))


@pytest.mark.parametrize(
    ("read", "cond", "name"),
    [
        (lambda _, cond: cond["crossattn"], {"crossattn": text()}, "crossattn"),
        (lambda model, cond: model.embed(cond), torch.ones(2, T, dtype=torch.long), "cond"),
        (lambda model, cond: model.embed(cond), torch.zeros(2, T, dtype=torch.long), "cond"),
    ],
)
def test_a_text_in_a_dict_and_ids_that_are_all_the_same_are_found(read, cond, name):
    torch.manual_seed(0)
    table = sdattn.inspect_attention(Reading(read).eval(), image(), cond, text=name)
    assert (table.proposal.text, table.proposal.grid) == (name, (4, 6))


def test_learned_queries_that_pool_the_text_are_no_image():
    class Resampled(CompVisUNet):
        def __init__(self):
            super().__init__()
            self.pool = Decoder()
            self.queries = nn.Parameter(torch.randn(1, 4, 2, 3))

        def forward(self, x, timesteps, context):
            pooled = self.pool(self.queries.expand(len(x), -1, -1, -1), context)
            return super().forward(x + pooled.mean(), timesteps, context)

    table = sdattn.inspect_attention(foreign(Resampled), image(), torch.ones(2), text())
    pools = [call for call in table if call.name == "pool.layer.multihead_attn"]
    assert [(call.queries, call.keys, call.kind) for call in pools] == [(6, T, None)]
    assert table.proposal.layers == ("attn2.down", "attn2.mid", "attn2.up")


class PlainlyNamed(nn.Module):
    """No argument has a usual name of a text but ``y``, a class."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x, c, mask=None, y=3):
        return self.attn(x.flatten(2).mT, c, c)[0]


def test_a_call_without_a_text_that_its_name_gives_away():
    model, call = foreign(PlainlyNamed), (torch.randn(1, WIDTH, 4, 6), text()[:1], None, 3)
    table = sdattn.inspect_attention(model, *call)
    assert [call.kind for call in table] == [None]
    assert "pass text= (x, c, mask, y)" in table.proposal.unsure[0]
    assert sdattn.inspect_attention(model, *call, text="c").proposal.grid == (4, 6)
    with pytest.raises(ValueError, match="a tensor or a list of some"):
        sdattn.inspect_attention(model, *call, text="y")


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_tokens_differ_by_more_than_the_rounding_of_their_own_size(scale):
    """Queries may be very small or very large: only the ratio to the largest counts."""
    one = torch.tensor([[1.0], [0.5], [-0.5]]) * scale
    other = one * torch.tensor([[1.0], [1.001], [1 + 1e-6]])
    found = _differing(Tokens(None, queries=one, keys=other), Tokens(None, queries=other, keys=one))
    assert found == ([False, True, False],) * 2
