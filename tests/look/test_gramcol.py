"""GramCol and IMAP against their formulas, written out in float64 for each head and frame."""

import math

import pytest
import torch
from helpers.joint_models import COLS, MODELS, N_TEXT, ROWS, first_map, inputs
from helpers.joint_video_rows import JOINT_VIDEOS, cogvideox
from helpers.largest import Largest
from helpers.matrix_oracle import recorded, softmax_in_float64
from helpers.reads import copies_after_the_first, reads_by_call
from helpers.rows import Way
from helpers.transformer_rows import flux, sd3

from sdattn import TorchJointProcessor, capture
from sdattn.attention.device_copies import DeviceCopies
from sdattn.look.output_space import GramCol, separability
from sdattn.models.layers import find_denoiser

ROWS_OF = {row.name: row for row in JOINT_VIDEOS}
SIZE = (64, 96)  # 4 x 6 cells
CLOSE = {"atol": 2e-4, "rtol": 2e-3}


def operands(query, key, value, mask, scale):
    """What one call of torch's attention was given and made, float64."""
    made = softmax_in_float64(query, key, mask, scale) @ value.double()
    return query.double(), key.double(), made


def z_scores(query, key, output, words):
    """Of one head and frame: ``[P, d]``, ``[T, d]``, ``[P, d]`` to ``[P, T]``."""
    peaks = [max(range(len(query)), key=lambda p, k=k: float(query[p] @ k)) for k in key]
    found = torch.zeros(len(query), len(key), dtype=torch.float64)
    for cell, own in enumerate(output):
        gram = {word: float(output[peaks[word]] @ own) for word in words}
        mean = math.fsum(gram.values()) / len(gram)
        squares = math.fsum((one - mean) ** 2 for one in gram.values())
        for word, one in gram.items():
            found[cell, word] = (one - mean) / (math.sqrt(squares / (len(gram) - 1)) + 1e-6)
    return found


def calinski_harabasz(output, frames):
    """Of one head, ``[F * P, d]``."""
    clusters, mean = output.chunk(frames), output.mean(0)
    between = sum(len(one) * float(((one.mean(0) - mean) ** 2).sum()) for one in clusters)
    within = sum(float(((one - one.mean(0)) ** 2).sum()) for one in clusters)
    return (between / (frames - 1)) / (within / (len(output) - frames))


def of_heads(query, key, output, frames, words):
    """``[heads, N, T]``."""
    query, output = (part.unflatten(1, (frames, -1)) for part in (query, output))
    return torch.stack(
        [
            torch.cat([z_scores(q[f], k, o[f], words) for f in range(frames)])
            for q, k, o in zip(query, key, output, strict=True)
        ]
    )


def best_heads(output, frames, number):
    scores = [calinski_harabasz(one, frames) for one in output]
    return sorted(range(len(scores)), key=lambda head: -scores[head])[:number]


def split_texts(row, way, pipe, length, cells):
    """Of each row of the prompt: where its image and its text are."""
    lengths = [row.n_text or length - cells] * way.total
    lengths = row.lengths(pipe, way) if row.lengths else lengths
    if row.joint == "text first":
        return [(slice(n, n + cells), slice(0, n)) for n in lengths]
    return [(slice(0, cells), slice(cells, cells + n)) for n in lengths]


def expected(row, way, pipe, words, best=None):
    """Each layer's mean over passes and heads, ``[images, N, longest text]``."""
    model, passes = find_denoiser(pipe).model, []
    counter = model.register_forward_hook(lambda *_: passes.append(1))
    with recorded(model, ("joint",), operands) as record:
        drawn_image = row.run(pipe, way)
    counter.remove()
    frames, cells = row.grid(way)[0], math.prod(row.grid(way))
    found = {}
    for name, calls in record.items():
        assert len(calls) == len(passes)
        means = []
        for query, key, output in calls[:: 2 if row.in_turn and way.guided else 1]:
            rows = list(row.rows(way, len(query)))
            spans = split_texts(row, way, pipe, query.shape[2], cells)
            images = torch.zeros(len(rows), cells, max(t.stop - t.start for _, t in spans)).double()
            for i, (at, (of_image, of_text)) in enumerate(zip(rows, spans, strict=True)):
                q, o = query[at, :, of_image], output[at, :, of_image]
                k = key[at, :, of_text]
                compared = range(k.shape[1]) if words is None else words[i]
                scores = of_heads(q, k, o, frames, compared)
                heads = best_heads(o, frames, best) if best else range(len(q))
                images[i, :, : k.shape[1]] = scores[list(heads)].mean(0)
            means.append(images)
        found[name] = torch.stack(means).mean(0)
    return drawn_image, found


CASES = {
    "CogVideoX": ("CogVideoX", 1, {"num_attention_heads": 6}),
    "CogVideoX 1.5": ("CogVideoX 1.5", 1, {}),
    "HunyuanVideo": ("HunyuanVideo", 1, {}),
    "HunyuanVideo 1.5": ("HunyuanVideo 1.5", 2, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.weekly
def test_videos_have_the_mean_of_the_heads_that_tell_frames_apart(case, monkeypatch):
    name, prompts, changes = CASES[case]
    row = ROWS_OF[name]
    pipe = cogvideox(**changes) if changes else row.make()
    best = 5 if changes else 1  # of 2 heads
    monkeypatch.setattr("sdattn.look.joint.BEST", best)
    way = row.fitted(Way(prompts=prompts, size=SIZE))
    words = [[1, 2, 4], [0, 3]][:prompts]
    for space, among in (("imap", words), ("gramcol", None)):
        image, wanted = expected(row, way, pipe, among, best if space == "imap" else None)
        with capture(pipe, space=space, among=among) as store:
            assert (row.run(pipe, way) == image).all()
        assert list(store.maps) == list(wanted)
        assert max(maps.abs().max() for maps in wanted.values()) > 0.3
        for layer, maps in wanted.items():
            found = store.maps[layer]
            assert found.shape[1:4] == row.grid(way)
            torch.testing.assert_close(found.flatten(1, 3).double(), maps, **CLOSE)


def test_a_row_that_attends_by_itself_is_compared_with_its_own_words():
    """Of Mochi, whose rows leave out the padding of their text."""
    row = ROWS_OF["Mochi"]
    pipe, way = row.make(), row.fitted(Way(size=SIZE, guided=True))
    frames, cells = row.grid(way)[0], math.prod(row.grid(way))
    with recorded(find_denoiser(pipe).model, ("joint",), operands) as record:
        image = row.run(pipe, way)
    with capture(pipe, space="gramcol") as store:
        assert (row.run(pipe, way) == image).all()
    for layer, calls in record.items():
        passes = []
        for query, key, output in calls[1::2]:  # the prompt's row, behind the negative one's
            q, o, k = query[0, :, :cells], output[0, :, :cells], key[0, :, cells:]
            passes.append(of_heads(q, k, o, frames, range(k.shape[1])).mean(0))
        wanted, found = torch.stack(passes).mean(0), store.maps[layer][0].flatten(0, 2).double()
        own = wanted.shape[1]
        assert own < found.shape[1] and wanted.abs().max() > 0.3
        torch.testing.assert_close(found[:, :own], wanted, **CLOSE)
        assert not found[:, own:].any()


@pytest.fixture(scope="module")
def video():
    return cogvideox(num_attention_heads=6)


def drawn(pipe, **options):
    row = ROWS_OF["CogVideoX"]
    with capture(pipe, **options) as store:
        row.run(pipe, row.fitted(Way(size=SIZE)))
    return next(iter(store.maps.values()))


def test_single_heads_columns_and_frames_are_parts_of_it(video):
    words = {"space": "imap", "among": [[1, 2, 4]]}
    whole = drawn(video, **words)
    heads = drawn(video, heads="all", **words)  # [1, heads, frames, rows, cols, T]
    torch.testing.assert_close(heads.mean(1), whole, atol=1e-5, rtol=1e-5)
    every = drawn(video, heads="all", space="gramcol", among=words["among"])
    # in each of the two passes another head may have been left out
    parts = heads.flatten(2).abs().sum(2) / (every * 6 / 5).flatten(2).abs().sum(2)
    assert 1 <= (parts < 0.99).sum() <= 2 and (parts > 0.999).sum() >= 4
    some = drawn(video, tokens=[4, 9, 1], frames=[1], **words)
    torch.testing.assert_close(some, whole[:, 1:2][..., [4, 9, 1]], atol=1e-5, rtol=1e-5)
    assert not some[..., 1].any()  # it is not compared


@pytest.mark.slow
def test_nothing_is_read_of_the_device_and_words_are_copied_once(video, monkeypatch):
    # the CPU's hands out its logsumexp, so that capture may look at it: no other device has it
    monkeypatch.setattr("sdattn.look.sdpa.backend_with_logsumexp", lambda _call: 0)
    with reads_by_call(video.transformer) as plain:
        drawn_without = ROWS_OF["CogVideoX"].run(video, Way(size=SIZE))
    with reads_by_call(video.transformer) as watched:
        drawn(video, space="imap", among=[[1, 2, 4]])
    assert len(drawn_without) and watched[1:] == plain[1:]
    model = cogvideox().transformer.to("meta")
    with torch.device("meta"):
        given = {
            "hidden_states": torch.empty(1, 2, 4, 8, 12),
            "encoder_hidden_states": torch.empty(1, 12, 32),
            "timestep": torch.empty(1),
            "image_rotary_emb": (torch.empty(48, 16), torch.empty(48, 16)),
        }
    with torch.no_grad(), capture(model, space="imap", among=[[1, 2, 4]], tokens=[2, 1]):
        found = copies_after_the_first(lambda: model(**given))
    with torch.no_grad():
        assert found == copies_after_the_first(lambda: model(**given))


def test_rows_take_their_own_words_along():
    parts = [torch.randn(3, 2, number, 4) for number in (12, 5, 12)]
    kept = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 1, 1], [1, 0, 1, 0, 0]]).bool()
    held = DeviceCopies(kept[:, None, None])
    attended = GramCol(*parts, frames=3, best=1, kept=held)
    whole = attended.every_head(None)
    assert torch.equal(whole.flatten(1, 2).any(1), kept)
    for rows in (slice(1, 3), (2, 0)):
        wanted = whole[rows] if isinstance(rows, slice) else whole[list(rows)]
        torch.testing.assert_close(attended.of_rows(rows).every_head(None), wanted)


def test_no_matrix_of_cells_by_cells_is_made():
    query, output = torch.randn(2, 1, 4, 600, 8)
    attended = GramCol(query, torch.randn(1, 4, 3, 8), output, frames=3, best=2)
    with Largest() as largest:
        attended.add_to(None, None)
    assert largest.numel == query.numel()


def test_where_one_cell_stands_for_all_words_they_are_alike():
    """In place of the rounding of equal numbers over their own deviation."""
    query = torch.zeros(1, 1, 6, 4)
    query[:, :, 1::3, 0] = 1.0
    key, output = torch.rand(1, 1, 5, 4) + 0.1, 100 * torch.rand(1, 1, 6, 4)
    assert not GramCol(query, key, output, frames=2).every_head(None).any()


def test_the_index_is_that_of_the_formula():
    output = torch.randn(2, 3, 12, 5, generator=torch.Generator().manual_seed(0))
    wanted = [[calinski_harabasz(head.double(), 4) for head in row] for row in output]
    torch.testing.assert_close(separability(output, 4).double(), torch.tensor(wanted).double())


# -- images -------------------------------------------------------------------------------------


def image_scores(kind, model, given, words):
    """Of the first layer, ``[heads, N, T]``, and the image's part of its softmax."""
    cells = ROWS * COLS
    with recorded(model, ("joint",), lambda *call: (*operands(*call), softmax_of(*call))) as record:
        model(**given)
    query, key, output, probs = (part[0] for part in next(iter(record.values()))[0])
    image = slice(cells) if kind == "SD3" else slice(N_TEXT, N_TEXT + cells)
    text = slice(cells, cells + N_TEXT) if kind == "SD3" else slice(N_TEXT)
    pairs = probs[:, image, image]
    pairs = pairs / pairs.sum(-1, keepdim=True)
    return of_heads(query[:, image], key[:, text], output[:, image], 1, words), pairs


def softmax_of(query, key, _value, mask, scale):
    return softmax_in_float64(query, key, mask, scale)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_an_image_is_a_video_of_one_frame(kind):
    model, words = MODELS[kind]().transformer, [1, 2, 5]
    given = inputs(kind, model)
    wanted, pairs = image_scores(kind, model, given, words)
    along, mean = pairs.mean(0), wanted.mean(0)
    found = first_map(model, given, space="gramcol", among=[words]).flatten(0, 1)
    torch.testing.assert_close(found.double(), mean, **CLOSE)
    found = first_map(model, given, space="gramcol", among=[words], refine="self").flatten(0, 1)
    torch.testing.assert_close(found.double(), along @ (along @ mean), **CLOSE)
    model.set_attn_processor(TorchJointProcessor())
    found = first_map(model, given, space="gramcol", among=[words]).flatten(0, 1)
    torch.testing.assert_close(found.double(), mean, **CLOSE)
    found = first_map(model, given, space="gramcol", among=[words], refine="self").flatten(0, 1)
    torch.testing.assert_close(found.double(), along @ (along @ mean), **CLOSE)


def test_the_gradient_goes_through_the_outputs():
    model = sd3().transformer
    given = inputs("SD3", model)
    text = given["encoder_hidden_states"].requires_grad_()
    with capture(model, space="gramcol", grad=True) as store:
        model(**given)
    next(iter(store.maps.values()))[..., 2].square().sum().backward()
    assert 0 < text.grad.abs().max() < torch.inf


# -- what is refused ------------------------------------------------------------------------------


def test_images_have_no_frames_to_tell_apart():
    with pytest.raises(ValueError, match="space='imap'.*'gramcol'"):
        with capture(flux(), space="imap"):
            pass


def test_a_video_of_one_frame_is_refused_before_its_layers_run(video):
    row, ran = ROWS_OF["CogVideoX"], []
    hook = video.transformer.patch_embed.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(RuntimeError, match=r"grid.*\(1, 4, 6\)"):
        with capture(video, space="imap"):
            row.run(video, Way(size=SIZE), num_frames=1)
    hook.remove()
    assert not ran


def test_one_column_has_none_to_be_compared_with(video):
    with pytest.raises(ValueError, match="space='imap'.*columns"):
        with capture(video, space="imap", among=[[3, 3]]):
            pass


class Products:
    """A processor that multiplies by probabilities of its own."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *_, **__):
        def heads(x):
            return x.unflatten(2, (attn.heads, -1)).transpose(1, 2)

        cells, text = hidden_states.shape[1], encoder_hidden_states
        q = torch.cat([heads(attn.to_q(hidden_states)), heads(attn.add_q_proj(text))], 2)
        k = torch.cat([heads(attn.to_k(hidden_states)), heads(attn.add_k_proj(text))], 2)
        v = torch.cat([heads(attn.to_v(hidden_states)), heads(attn.add_v_proj(text))], 2)
        out = ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        words = out[:, cells:]
        words = words if attn.context_pre_only else attn.to_add_out(words)
        return attn.to_out[0](out[:, :cells]), words


@torch.no_grad()
def test_products_without_a_query_and_key_are_refused_by_name():
    model = sd3().transformer
    given = inputs("SD3", model)
    model.set_attn_processor(Products())
    with pytest.raises(RuntimeError, match="Products.*probabilities"):
        with capture(model, space="gramcol"):
            model(**given)
