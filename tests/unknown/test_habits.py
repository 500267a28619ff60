"""Habits of foreign code that a capture of a model of no known family meets: what is shown is what
was used, or it is refused by name."""

import copy
from contextlib import ExitStack
from pickle import dumps, loads
from threading import Thread, get_ident

import pytest
import torch
from helpers.foreign import HEADS, WIDTH, by_heads, softmax64, tokens_of
from helpers.joint_models import inputs
from helpers.transformer_rows import flux
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.modules.module import _has_any_global_hook

import sdattn
from sdattn.errors import CaptureError, RunError
from sdattn.follow.passes import CaptureWarning
from sdattn.unknown.multi_head import _added

ROWS, COLS, T = 4, 6, 7
SCALE = (WIDTH // HEADS) ** -0.5
TOLD = {"text": "context", "grid": (ROWS, COLS)}


def image(batch, seed=1):
    return torch.randn(batch, 4, ROWS, COLS, generator=torch.Generator().manual_seed(seed))


def text(batch, length=T, seed=2):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    """Cross-attention by ``attend(self, q, k, v)``, which gets and returns ``[B, heads, N, d]``."""

    def __init__(self, attend=lambda _self, q, k, v: sdpa(q, k, v)):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.softmax = nn.Softmax(dim=-1)
        self.attend = attend
        self.seen = []

    def forward(self, x, context):
        q, k, v = by_heads(self.q(x)), by_heads(self.k(context)), by_heads(self.v(context))
        self.seen.append((q, k))
        return self.o(self.attend(self, q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """One block or several over the cells of the latents."""

    def __init__(self, *blocks):
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(blocks)

    def run(self, latents, context, blocks):
        x = self.proj_in(tokens_of(latents))
        for block in blocks:
            x = x + block(x, context)
        return self.proj_out(x).mT.unflatten(2, latents.shape[2:])

    def forward(self, latents, context):
        return self.run(latents, context, self.blocks)


def made(*blocks, kind=Model):
    torch.manual_seed(0)
    model = kind(*blocks).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) / 3
    return model


@torch.no_grad()
def captured(model, *call, **options):
    """Return the store of two calls, whose outputs are the plain ones."""
    plain = model(*call)
    for block in getattr(model, "blocks", ()):
        block.seen.clear()
    with sdattn.capture(model, **{**TOLD, **options}) as store:
        assert torch.equal(model(*call), plain)
        assert torch.equal(model(*call), plain)
    assert not torch.overrides._get_current_function_mode_stack()
    return store


def assert_shown(store, name, expected):
    assert (store.maps[name].flatten(1, 2) - expected).abs().max() < 1e-5


def probs(q, k):
    return (q @ k.mT * SCALE).softmax(-1)


def folded(_self, q, k, v):
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return torch.bmm(probs(q, k), v).unflatten(0, (-1, HEADS))


def by_a_softmax_module(self, q, k, v):
    return self.softmax(q @ k.mT * SCALE) @ v


def by_keywords(_self, q, k, v):
    return torch.matmul(input=probs(q, k), other=v)


def heads_last(_self, q, k, v):
    return torch.einsum("bhqk,bkhd->bqhd", probs(q, k), v.transpose(1, 2)).transpose(1, 2)


def keys_first(_self, q, k, v):
    return (k @ q.mT * SCALE).softmax(-2).mT @ v


@pytest.mark.parametrize("batch", [1, HEADS, 3])
@pytest.mark.parametrize(
    "attend", [folded, by_a_softmax_module, by_keywords, heads_last, keys_first]
)
def test_each_way_to_write_attention_is_shown_as_it_was(attend, batch):
    model = made(Attention(attend))
    store = captured(model, image(batch), text(batch))
    assert_shown(store, "blocks.0", softmax64(*model.blocks[0].seen[0]))


def test_heads_that_are_mixed_after_the_softmax_are_shown_as_they_were_used():
    mix, used = torch.tensor([[0.9, 0.3], [-0.4, 1.2]]), []

    def talking(_self, q, k, v):
        mixed = torch.einsum("bhij,hg->bgij", probs(q, k), mix)
        used.append(mixed.double().mean(1))
        return mixed @ v

    store = captured(made(Attention(talking)), image(3), text(3))
    assert_shown(store, "blocks.0", used[-1])


def test_a_softmax_without_a_product_is_named():
    attend = lambda _self, q, k, v: (v.mT @ probs(q, k).mT).mT  # noqa: E731
    with pytest.raises(CaptureError, match=r"blocks\.0 \(a softmax without a product\)"):
        captured(made(Attention(attend)), image(2), text(2))
    model = made(Attention(), Attention(attend))
    with pytest.warns(CaptureWarning, match=r"use was not seen.*: blocks\.1"):
        assert list(captured(model, image(2), text(2)).maps) == ["blocks.0"]


def in_slices(parts):
    def attend(_self, q, k, v):
        return torch.cat([probs(part, k) @ v for part in q.chunk(parts, dim=2)], dim=2)

    return attend


@pytest.mark.filterwarnings("ignore::sdattn.follow.passes.CaptureWarning")
def test_slices_of_queries_are_no_coarser_layers():
    with pytest.raises(RunError, match="blocks.0 attends .* in slices of its queries"):
        captured(made(Attention(in_slices(4))), image(1), text(1))


def test_a_layer_that_is_in_no_map_is_told():
    model = made(Attention(), Attention(in_slices(2)))
    with pytest.warns(CaptureWarning, match=r"in no map: blocks\.1 \(12 queries, 7 keys\)"):
        store = captured(model, image(2), text(2))
    assert list(store.maps) == ["blocks.0"]


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "FluxTransformer2DModel"])
def test_a_foreign_class_with_a_name_of_diffusers_is_watched_by_two_facts(name):
    model, call = made(Attention(), kind=type(name, (Model,), {})), (image(3), text(3))
    store = captured(model, *call, **sdattn.inspect_attention(model, *call).proposal.options)
    assert_shown(store, "blocks.0", softmax64(*model.blocks[0].seen[0]))
    said = rf"a {name}, which is of no family (.|\n)*text=\.\.\., grid=(.|\n)*classes of diffusers"
    with pytest.raises(TypeError, match=said):
        sdattn.capture(model).__enter__()
    with pytest.raises(ValueError, match="is of the family FLUX"):
        sdattn.capture(flux().transformer, **TOLD).__enter__()


class Twice(Attention):
    """A block that attends to the image and then to the text, in its own ``forward``."""

    skips = False

    def forward(self, x, context):
        if not self.skips:
            q = by_heads(self.q(x))
            x = x + sdpa(q, q, by_heads(self.v(x))).transpose(1, 2).flatten(2)
        return super().forward(x, context)


@pytest.mark.parametrize("length", [T, ROWS * COLS])
@pytest.mark.parametrize("batch", [1, 3])
def test_each_call_of_a_module_has_a_name_to_choose_it_by(batch, length):
    model, call = made(Twice(), Twice()), (image(batch), text(batch, length))
    table = sdattn.inspect_attention(model, *call)
    names = [call.name for call in table]
    assert names == ["blocks.0", "blocks.0:1:cross", "blocks.1", "blocks.1:1:cross"]
    chosen = [{"layers": name} for name in (names[1], ["*:1:cross"])] + [table.proposal.options]
    if length == T:  # more cells than tokens, so that self-attention is no cross-attention
        chosen += [{}, {"kinds": ("self", "cross")}]
    for options in chosen:
        store = captured(model, *call, **options)
        assert_shown(store, names[1], softmax64(*model.blocks[0].seen[0]))
        if "kinds" in options:
            assert list(store.maps) == names


@pytest.mark.filterwarnings("ignore::sdattn.follow.passes.CaptureWarning")
@torch.no_grad()
def test_a_call_that_is_left_out_in_a_later_pass_mixes_no_layers():
    model = made(Twice())
    with sdattn.capture(model, **TOLD, kinds=("self", "cross")) as store:
        for model.blocks[0].skips in (False, True):
            model(image(3), text(3))
    shown = {name: maps.shape[-1] for name, maps in store.maps.items()}
    assert shown == {"blocks.0": 24, "blocks.0:1:cross": T, "blocks.0:0:cross": T}
    assert_shown(store, "blocks.0:0:cross", softmax64(*model.blocks[0].seen[1]))


@pytest.mark.parametrize("twin_of", [copy.deepcopy, copy.copy, lambda m: loads(dumps(m))])
@torch.no_grad()
def test_a_copy_that_is_made_inside_is_not_watched(twin_of):
    model = made(Attention(folded))
    with sdattn.capture(model, **TOLD) as store:
        twin = twin_of(model)
        model(image(3), text(3))
        twin(image(3, seed=5), text(3, seed=6))
    assert len(store.passes) == 1
    assert_shown(store, "blocks.0", softmax64(*model.blocks[0].seen[0]))
    for part in twin.modules() if twin_of is not copy.copy else [twin]:
        assert not (part._forward_hooks or part._forward_pre_hooks or "__reduce_ex__" in vars(part))


class TimeFirst(Model):
    """The image tells the rows, and no timestep that they share."""

    def forward(self, timesteps, latents, context):
        return super().forward(latents, context) + timesteps


class TextFirst(Model):
    """All images share the text."""

    def forward(self, context, latents):
        return super().forward(latents, context.expand(len(latents), -1, -1))


class Pooled(Model):
    """A query that pools the text is no layer."""

    def forward(self, latents, context):
        pooled = self.blocks[1](context.mean(1, keepdim=True), context)
        return self.run(latents + pooled.mean(), context, self.blocks[:1])


class Scripted(Model):
    def forward(self, latents, context):
        return super().forward(latents, self.norm(context))


class Encoded(Model):
    """torch's own encoder reads the text first, fused, and of padded texts by nested tensors."""

    def __init__(self, *blocks):
        super().__init__(*blocks)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, latents, context, padding=None):
        context = self.encoder(context, src_key_padding_mask=padding)
        return super().forward(latents, context)


PADDING = torch.arange(T).expand(3, -1) >= torch.tensor([[T], [5], [T]])
HABITS = {
    "time first": (TimeFirst, folded, (torch.ones(1), image(2), text(2))),
    "text first": (TextFirst, folded, (text(1), image(3))),
    "pooled text": (Pooled, None, (image(3), text(3))),
    "a scripted part": (Scripted, None, (image(2), text(2))),
    "torch's encoder": (Encoded, None, (image(3), text(3))),
    "torch's encoder, padded": (Encoded, None, (image(3), text(3), PADDING)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", HABITS)
def test_what_else_a_model_does_is_let_be(name):
    kind, attend, call = HABITS[name]
    blocks = [Attention(attend) if attend else Attention() for _ in range(1 + (kind is Pooled))]
    model = made(*blocks, kind=kind)
    if kind is Scripted:
        model.norm = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    store = captured(model, *call)
    assert list(store.maps) == ["blocks.0"]
    assert_shown(store, "blocks.0", softmax64(*model.blocks[0].seen[0]))
    assert not _has_any_global_hook()


def test_guidance_inside_the_model_is_not_taken_for_heads():
    class Guided(Model):
        def forward(self, latents, context):
            both = torch.cat([context * 0, context])
            negative, positive = super().forward(torch.cat([latents] * 2), both).chunk(2)
            return negative + 3 * (positive - negative)

    with pytest.raises(RunError, match="several images where the model got one"):
        captured(made(Attention(folded), kind=Guided), image(1), text(1))


class Functional(Model):
    """A model that attends in its own ``forward``, after its blocks."""

    def forward(self, latents, context):
        x = self.proj_in(tokens_of(latents))
        x = x + self.blocks[0](x, context)
        q, k = by_heads(x), by_heads(context)
        self.used = q, k
        return self.proj_out(sdpa(q, k, k).transpose(1, 2).flatten(2))


def test_a_layer_inside_that_was_not_asked_for_stays_apart():
    model = made(Attention(), kind=Functional)
    store = captured(model, image(2), text(2), layers="model")
    assert list(store.maps) == ["model"]
    assert_shown(store, "model", softmax64(*model.used))


@pytest.mark.filterwarnings("ignore::sdattn.follow.passes.CaptureWarning")
@torch.no_grad()
def test_a_first_pass_that_breaks_off_loses_no_layer():
    model = made(Attention(folded), Attention(folded))
    with sdattn.capture(model, **TOLD) as store:
        model.blocks[1].attend = lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            model(image(2), text(2))
        model.blocks[1].attend = folded
        model(image(2), text(2))
    assert list(store.maps) == ["blocks.0", "blocks.1"]
    assert_shown(store, "blocks.1", softmax64(*model.blocks[1].seen[-1]))


@pytest.mark.filterwarnings("ignore::sdattn.follow.passes.CaptureWarning")
@torch.no_grad()
def test_blocks_that_run_in_later_passes_only_are_seen():
    class Experts(Model):
        def forward(self, latents, context, number):
            return self.run(latents, context, [self.blocks[number]])

    model = made(Attention(folded), Attention(folded), kind=Experts)
    with sdattn.capture(model, **TOLD) as store:
        for number in (0, 1):
            model(image(2), text(2), number)
    for number, name in enumerate(("blocks.0", "blocks.1")):
        assert store.seen[name] == (number,)
        assert_shown(store, name, softmax64(*model.blocks[number].seen[0]))


@pytest.mark.parametrize("inspects", [False, True])
def test_an_interrupt_leaves_no_mode_behind(inspects):
    def interrupted(_self, q, k, v):
        raise KeyboardInterrupt

    model = made(Attention(interrupted))
    with pytest.raises(KeyboardInterrupt):
        if inspects:
            sdattn.inspect_attention(model, image(1), text(1))
        else:
            with sdattn.capture(model, **TOLD):
                model(image(1), text(1))
    assert not torch.overrides._get_current_function_mode_stack()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.filterwarnings("ignore::sdattn.follow.passes.CaptureWarning")
@torch.no_grad()
def test_an_interrupt_inside_leaves_the_next_call_whole():
    model = made(Attention(), Attention())

    def interrupted(*_):
        raise KeyboardInterrupt

    whole = model.blocks[1].attend
    with sdattn.capture(model, **TOLD) as store:
        model.blocks[1].attend = interrupted
        with pytest.raises(KeyboardInterrupt):
            model(image(2), text(2))
        model.blocks[1].attend = whole
        model(image(2), text(2))
        assert not torch.overrides._get_current_function_mode_stack()
    assert_shown(store, "blocks.1", softmax64(*model.blocks[1].seen[-1]))


@torch.no_grad()
def test_a_capture_around_another_is_no_kernel():
    model = made(Attention())
    with sdattn.capture(model, **TOLD) as outer, sdattn.capture(model, **TOLD) as inner:
        model(image(2), text(2, 30))  # more keys than queries, so a logsumexp is asked for
    assert outer.kernels == inner.kernels == {}
    for store in (outer, inner):
        assert_shown(store, "blocks.0", softmax64(*model.blocks[0].seen[0]))


@pytest.mark.parametrize("is_inside", [False, True])
@torch.no_grad()
def test_a_capture_of_a_known_family_inside_or_around(is_inside):
    model = flux().transformer
    given = inputs("FLUX.1", model)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, **given):
            return self.inner(**given).sample

    wrapped, size = Wrapped(), tuple(given["img_ids"].amax(0)[1:].int().add(1).tolist())
    length = given["encoder_hidden_states"].shape[1]
    plain = wrapped(**given)
    told = sdattn.capture(wrapped, text=slice(0, length), grid=size)
    known = sdattn.capture(model)
    with ExitStack() as stack:
        stores = [stack.enter_context(one) for one in ((told, known)[:: 1 if is_inside else -1])]
        assert torch.equal(wrapped(**given), plain)
    store, known_store = stores if is_inside else stores[::-1]
    assert len(store.maps) == len(known_store.maps) == 4
    for name, maps in known_store.maps.items():
        assert (store.maps[f"inner.{name}"] - maps).abs().max() < 1e-6
    proposal = sdattn.inspect_attention(wrapped, **given).proposal
    assert proposal.options == {"text": slice(0, length), "grid": size}


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_encoder_of_text_and_image_is_shown_fused_or_not(norm_first):
    class Joint(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj_in = nn.Linear(4, WIDTH)
            self.layer = nn.TransformerEncoderLayer(
                WIDTH, HEADS, 32, dropout=0.0, batch_first=True, norm_first=norm_first
            )

        def forward(self, latents, context, mask=None):
            x = torch.cat([context, self.proj_in(tokens_of(latents))], dim=1)
            self.given = self.layer.norm1(x) if norm_first else x
            return self.layer(x, src_mask=mask)

    model, told = made(kind=Joint), {"text": slice(0, T)}
    weight, bias = model.layer.self_attn.in_proj_weight, model.layer.self_attn.in_proj_bias
    mask = torch.zeros(T + ROWS * COLS, T + ROWS * COLS, dtype=torch.bool)
    for is_masked in (False, True):
        mask[:, 2] = is_masked
        store = captured(model, image(3), text(3), mask, **told)
        q, k, _ = map(by_heads, nn.functional.linear(model.given, weight, bias).chunk(3, -1))
        if is_masked:
            k = k.clone()
            assert not store.maps["layer"][..., 2].any()
        else:
            assert_shown(store, "layer", softmax64(q, k)[:, T:, :T])
    model.train()
    with sdattn.capture(model, grid=(ROWS, COLS), **told) as store:
        model(image(3), text(3))
    q, k, _ = map(by_heads, nn.functional.linear(model.given, weight, bias).chunk(3, -1))
    assert_shown(store, "layer", softmax64(q, k)[:, T:, :T])


@pytest.mark.parametrize("grid", [lambda _: None, lambda _: (24,), lambda _: (4, 0)])
def test_a_grid_that_a_function_returns_wrong_is_refused(grid):
    with pytest.raises((ValueError, TypeError), match=r"grid=.*\(rows, cols\)"):
        captured(made(Attention()), image(1), text(1), grid=grid)


def test_a_text_in_a_list_is_refused_by_what_it_is():
    class Listed(Model):
        def forward(self, latents, context):
            return super().forward(latents, context[0])

    with pytest.raises(ValueError, match=r"no tensor of this name but a list.*text=slice"):
        captured(made(Attention(), kind=Listed), image(1), [text(1)])


class Rows(Model):
    """A video whose frames are rows of the batch."""

    def forward(self, latents, context):
        frames = latents.movedim(1, 2).flatten(0, 1)
        made = super().forward(frames, context.repeat_interleave(latents.shape[2], 0))
        return made.unflatten(0, (len(latents), -1)).movedim(2, 1)


@pytest.mark.parametrize("attend", [Attention().attend, folded])
def test_frames_that_are_rows_are_one_video_and_refused_for_several(attend):
    model, told = made(Attention(attend), kind=Rows), {"grid": (3, ROWS, COLS)}
    video = image(3).movedim(0, 1)[None]
    store = captured(model, video, text(1), **told)
    expected = softmax64(*model.blocks[0].seen[0]).flatten(0, 1)
    assert (store.maps["blocks.0"].flatten(0, 3) - expected).abs().max() < 1e-5
    with pytest.raises(CaptureError, match="frames of several videos"):
        captured(model, video.expand(2, -1, -1, -1, -1), text(2), **told)


class Together(Model):
    """The image attends to something before, the text, and something behind; ``parts`` makes them
    of image and text. All of them are queries if ``is_joint``."""

    def __init__(self, parts, is_joint):
        super().__init__(Attention())
        self.parts, self.is_joint = parts, is_joint

    def forward(self, latents, context):
        image = self.proj_in(tokens_of(latents))
        keys = torch.cat(self.parts(image, context), dim=1)
        return self.blocks[0](keys if self.is_joint else image, keys)


PARTS = {  # parts, whether all are queries, the text, the image
    "text behind": (lambda i, t: [i, t], False, slice(-T, None), slice(None)),
    "register first": (lambda i, t: [i[:, :1], t, i], True, slice(1, 1 + T), slice(1 + T, None)),
    "image first": (lambda i, t: [i, t, i[:, :2]], True, slice(24, 24 + T), slice(0, 24)),
}


@pytest.mark.parametrize("name", PARTS)
def test_text_and_image_stand_where_they_were_told(name):
    parts, is_joint, place, cells = PARTS[name]
    torch.manual_seed(0)
    model = Together(parts, is_joint)
    store = captured(model, image(2), text(2), text=place, layers="blocks.0")
    expected = softmax64(*model.blocks[0].seen[0])[:, cells, place]
    assert_shown(store, "blocks.0", expected)


def test_a_text_that_leaves_no_room_for_the_image_is_refused():
    model = Together(lambda i, t: [t, i], True)
    with pytest.raises(ValueError, match="no room for the 24 cells"):
        captured(model, image(2), text(2), text=slice(3, 3 + T))


@pytest.mark.parametrize("place", [slice(-5, 3), slice(2, -3), slice(5, 5), slice(0, 8, 2)])
def test_a_slice_without_a_length_of_its_own_is_refused(place):
    with pytest.raises(ValueError, match="a length of its own"):
        captured(made(Attention()), image(1), text(1), text=place)


class ByTorch(nn.Module):
    """``nn.MultiheadAttention`` with some ``options``; the sequence comes first."""

    def __init__(self, **options):
        super().__init__()
        self.proj_in = nn.Linear(4, WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, **options)

    def forward(self, latents, context):
        x, context = self.proj_in(tokens_of(latents)).transpose(0, 1), context.transpose(0, 1)
        self.given = x, context
        return self.attn(x, context, context)[0]


def test_torchs_attention_with_the_sequence_first():
    torch.manual_seed(0)
    model = ByTorch()
    store = captured(model, image(T), text(T))  # as many images as tokens
    (wq, wk, _), (bq, bk, _) = (
        one.chunk(3) for one in (model.attn.in_proj_weight, model.attn.in_proj_bias)
    )
    x, context = (one.transpose(0, 1) for one in model.given)
    assert_shown(store, "attn", softmax64(by_heads(x @ wq.T + bq), by_heads(context @ wk.T + bk)))


def test_masks_of_as_many_images_as_heads_are_of_their_own_image_and_head():
    query, mask = torch.zeros(2, 2, 3, 4), torch.randn(2 * 2, 3, T)  # torch's order: image, head
    found = _added(query, mask, None)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert torch.equal(found[i, j], mask[2 * i + j])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"add_zero_attn": True}, "attn .with keys of its own"),
        ({"add_bias_kv": True}, "attn .with keys of its own"),
        ({"dropout": 0.5}, "attn .dropout"),
    ],
)
def test_what_torchs_attention_adds_or_drops_is_refused(options, problem):
    model = ByTorch(**options).train()
    with pytest.raises(CaptureError, match=problem):
        with sdattn.capture(model, **TOLD):
            model(image(2), text(2))


def test_padding_of_torchs_encoder_layer_has_no_attention():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj_in = nn.Linear(4, WIDTH)
            self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)

        def forward(self, latents, context, padding):
            x = torch.cat([context, self.proj_in(tokens_of(latents))], dim=1)
            return self.layer(x, src_key_padding_mask=padding)

    padding = torch.zeros(3, T + ROWS * COLS, dtype=torch.bool)
    padding[1, 4:T] = True
    store = captured(made(kind=Padded), image(3), text(3), padding, text=slice(0, T))
    maps = store.maps["layer"]
    assert not maps[1, ..., 4:].any() and maps[0].all() and maps[1, ..., :4].all()


def test_an_image_whose_part_alone_goes_on_is_known_by_it():
    class Last(Together):
        def forward(self, latents, context):
            tokens = torch.cat([context, self.proj_in(tokens_of(latents))], dim=1)
            q, k, v = (by_heads(one(tokens)) for one in self.qkv)
            self.used = q, k
            return self.o(sdpa(q, k, v).transpose(1, 2).flatten(2)[:, T:])

    torch.manual_seed(0)
    model = Last(None, True)
    model.qkv, model.o = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), model.proj_out
    store = captured(model, image(HEADS), text(HEADS), text=slice(0, T))
    assert_shown(store, "model", softmax64(*model.used)[:, T:, :T])


@torch.no_grad()
def test_a_replacement_that_calls_torchs_own_is_one_call(monkeypatch):
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", lambda *qkv: sdpa(*qkv))
    attend = lambda _self, *qkv: nn.functional.scaled_dot_product_attention(*qkv)  # noqa: E731
    model = made(Attention(attend))
    store = captured(model, image(2), text(2))
    assert list(store.maps) == ["blocks.0"] and len(store.kernels) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_encoder_inside_a_module_that_attends_stays_nested():
    class Both(Encoded):
        def run(self, latents, context, blocks):
            x = self.proj_in(tokens_of(latents))
            q, k = by_heads(x), by_heads(context)
            self.used = q, k
            return self.proj_out(x + sdpa(q, k, k).transpose(1, 2).flatten(2))

    model = made(kind=Both)
    store = captured(model, image(3), text(3), PADDING)
    assert_shown(store, "model", softmax64(*model.used))


@torch.no_grad()
def test_another_thread_that_runs_the_model_meanwhile_is_not_watched():
    def attend(self, q, k, v):
        if get_ident() == main:
            other = Thread(target=torch.no_grad()(model), args=(image(2, seed=5), text(2, seed=6)))
            other.start()
            other.join()
        return sdpa(q, k, v)

    main, model = get_ident(), made(Attention(attend))
    with sdattn.capture(model, **TOLD) as store:
        model(image(2), text(2))
    assert_shown(store, "blocks.0", softmax64(*model.blocks[0].seen[0]))
    assert len(store.passes) == 1
