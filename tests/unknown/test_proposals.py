"""What `inspect_attention` proposes for habits of foreign code is right, or refused."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers.foreign import (
    HEADS,
    WIDTH,
    CompVisUNet,
    KernelAttention,
    by_heads,
    softmax64,
    tokens_of,
)
from helpers.foreign_habits import (
    CELLS,
    COLS,
    HABITS,
    ROWS,
    Attention,
    T,
    ids,
    image,
    noise,
    text,
    truth,
)
from torch import nn

import sdattn
from sdattn.errors import CaptureError, RunError
from sdattn.unknown.dry_run import another_text
from sdattn.unknown.proposal import InspectedCall, _text


def made(kind):
    torch.manual_seed(0)
    model = kind().eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    return model


def captured(model, call, **options):
    with torch.no_grad(), sdattn.capture(model, **options) as store:
        output = model(**call)
    return store, output


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", HABITS)
def test_a_habit_of_foreign_code_is_shown_as_it_was_or_refused(name, batch):
    habit = HABITS[name]
    model, call = made(habit.model), habit.call(batch)
    proposal = sdattn.inspect_attention(model, **habit.told, **call).proposal
    if problem := habit.refused.get(batch):
        assert str(proposal).startswith("# sdattn.capture() refuses such a call: ")
        with pytest.raises(ValueError, match=problem):
            proposal.options  # noqa: B018
        told = {"text": proposal.text, "grid": habit.grid, "layers": list(proposal.layers)}
        with pytest.raises((CaptureError, RunError), match=problem):
            captured(model, call, **told)
        return
    assert proposal.grid == (habit.grid if habit.is_told else None)
    told = replace(proposal, grid=habit.grid).options
    with torch.no_grad():
        plain = model(**call)
    model.seen.clear()
    store, output = captured(model, call, **told)
    assert torch.equal(output, plain)
    expected = truth(model)
    assert sorted(store.maps) == sorted(expected)
    for layer, probs in expected.items():
        assert store.maps[layer].shape[1:-1] == habit.grid
        assert (store.maps[layer].flatten(1, -2) - probs).abs().max() < 1e-5
    assert_the_patch_is_a_cell(habit, model, call)


def assert_the_patch_is_a_cell(habit, model, call):
    """With one patch of the image changed, its cell's query differs in the first layer, and at most
    those around it within reach."""
    touched = copy.deepcopy(call)
    habit.touch(touched)
    queries = []
    for given in (call, touched):
        model.seen.clear()
        with torch.no_grad():
            model(**given)
        query, _, _, cells, _ = next(iter(model.seen.values()))
        queries.append(query[0, :, cells])
    moved = (queries[0] != queries[1]).any(-1).any(0).reshape(habit.grid)
    *frame, row, col = moved.nonzero().unbind(1)
    assert moved[(*[0] * len(frame), 1, 2)] and not any(map(torch.any, frame))
    assert (row - 1).abs().max() <= habit.reach and (col - 2).abs().max() <= habit.reach


def inspected(forward, *call, modules=(), **options):
    """Return a model that runs ``forward(self, *call)``, and what is proposed for it."""
    kind = type("Model", (nn.Module,), {"forward": forward})
    torch.manual_seed(0)
    model = kind()
    model.proj, model.attn = nn.Linear(4, WIDTH), Attention()
    for name, module in dict(modules).items():
        setattr(model, name, module)
    return model, sdattn.inspect_attention(model, *call, **options).proposal


def test_a_register_beside_the_text_that_its_mean_moves_is_doubted():
    def forward(self, latents, context):
        keys = torch.cat([self.register.weight.expand(len(latents), -1, -1), context], 1)
        keys = keys + context.mean(1, keepdim=True)
        return self.attn(self.proj(tokens_of(latents)), keys)

    register = nn.Embedding(1, WIDTH)
    _, proposal = inspected(forward, image(2), text(2), modules={"register": register})
    assert (
        "context has 7 tokens, and 8 keys change with it: some may be registers" in proposal.unsure
    )


def test_a_class_token_among_text_is_no_image_of_one_cell():
    def forward(self, image, context):
        x = torch.cat([context, self.token.weight.expand(len(context), -1, -1)], 1)
        return self.attn(x, x), image.mean()

    _, proposal = inspected(forward, image(1), text(1), modules={"token": nn.Embedding(1, WIDTH)})
    assert proposal.grid is proposal.text is None


@pytest.mark.parametrize("batch", [1, 3])
def test_a_grid_that_is_filled_in_by_hand_needs_nothing_else(batch):
    def forward(self, x, context):
        context = torch.cat([self.null.weight.expand(len(x), -1, -1), context], 1)
        return self.attn(self.proj(x), context)

    call = noise(batch, CELLS, 4), text(batch)
    model, proposal = inspected(forward, *call, modules={"null": nn.Embedding(1, WIDTH)})
    assert str(proposal).startswith(
        "sdattn.capture(model, text=slice(-7, None), grid=..., layers=['attn'])"
    )
    with (
        torch.no_grad(),
        sdattn.capture(
            model, text=proposal.text, grid=(ROWS, COLS), layers=list(proposal.layers)
        ) as store,
    ):
        model(*call)
    expected = softmax64(*model.attn.last)[..., 1:]
    assert (store.maps["attn"].flatten(1, 2) - expected).abs().max() < 1e-5


def test_a_proposal_is_shown_only_for_a_kernel_that_a_capture_takes(monkeypatch):
    torchs = nn.functional.scaled_dot_product_attention

    def forward(self, latents, context):
        return self.kernel(self.proj(tokens_of(latents)), context)

    for scale in (None, 3.0):
        replaced = lambda *qkv, scale=scale: torchs(*qkv, scale=scale)  # noqa: E731
        monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", replaced)
        modules = {"kernel": KernelAttention()}
        _, proposal = inspected(forward, image(2), text(2), modules=modules)
        assert ("is replaced by" in proposal.refused) == (scale is not None)


@pytest.mark.parametrize("batch", [1, 2, 3])  # 2 images of 2 heads
@pytest.mark.parametrize("heads_first", [False, True])
def test_rows_that_a_capture_cannot_tell_are_refused_before(heads_first, batch):
    torch.manual_seed(0)
    model = CompVisUNet(heads_first=heads_first)
    call = image(batch), torch.ones(batch), text(batch)
    proposal = sdattn.inspect_attention(model, *call).proposal
    assert bool(proposal.refused) == (heads_first and batch > 1)
    if not proposal.refused:
        with torch.no_grad(), sdattn.capture(model, **proposal.options):
            model(*call)


def test_guidance_inside_the_model_is_refused_before():
    def forward(self, latents, context):
        both = torch.cat([context * 0, context])
        x = self.proj(tokens_of(latents)).repeat(2, 1, 1)
        q, k = (by_heads(one).flatten(0, 1) for one in (x, both))
        made = torch.bmm(torch.bmm(q, k.mT).softmax(-1), k).unflatten(0, (-1, HEADS))
        return self.attn.o(made.transpose(1, 2).flatten(2))

    _, proposal = inspected(forward, image(1), text(1))
    assert "several images where the model got one" in proposal.refused


def test_another_text_of_ids_keeps_its_first_its_last_and_its_padding():
    given = ids(3)
    other = another_text(given)
    words = torch.tensor([[0, 1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 0]])
    assert torch.equal(other != given, words.bool())
    assert other.max() <= given.max() and other.dtype == given.dtype
    for odd in ([[7]], [[3, 3, 3]], [[0, 0]], [[1, 9, 2]]):
        odd = torch.tensor(odd)
        assert not torch.equal(another_text(odd), odd)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("make", "grids"),
    [
        (lambda b: torch.arange(16 * b).reshape(b, 4, 4) % 50, [(4, 4)]),
        (lambda b: torch.arange(16 * b).reshape(b, 16) % 50, [(4, 4)]),
        (lambda b: [noise(4, 3, 4, 6, seed=n) for n in range(b)], [(3, 4, 6)]),
        (lambda b: [noise(4, 4, 6, seed=n) for n in range(b)], [(4, 6)]),
    ],
)
def test_an_image_of_ids_or_in_a_list_has_its_batch(make, grids, batch):
    def forward(self, x, context):
        if isinstance(x, list):
            x = self.proj(torch.stack([one.flatten(1).mT for one in x]))
        else:
            x = self.embed(x.flatten(1))
        return self.kernel(x, context)

    modules = {"embed": nn.Embedding(50, WIDTH), "kernel": KernelAttention()}
    call = make(batch), text(batch)
    model, proposal = inspected(forward, *call, modules=modules)
    assert proposal.grid in grids
    with torch.no_grad(), sdattn.capture(model, **proposal.options) as store:
        model(*call)
    assert (
        store.maps["kernel"].flatten(1, -2) - softmax64(*model.kernel.seen[-1])
    ).abs().max() < 1e-5


def test_an_image_with_two_places_beside_the_text_is_asked_for():
    torch.manual_seed(0)
    model = HABITS["OmniGen"].model()
    call = HABITS["OmniGen"].call(1)
    told = {"text": slice(0, T), "grid": (ROWS, COLS), "layers": "attn"}
    with pytest.raises(ValueError, match=r"room at 2 places .*image=slice\(8, 32\).*inspect_atten"):
        captured(model, call, **told)
    store, _ = captured(model, call, image=slice(8, None), **told)
    assert (store.maps["attn"].flatten(1, 2) - truth(model)["attn"]).abs().max() < 1e-5
    with pytest.raises(CaptureError, match="No cross or joint attention of the TimeToken fits"):
        captured(model, call, image=slice(9, None), **told)
    for wrong in (8, slice(0, 24, 2)):
        with pytest.raises((ValueError, TypeError), match="a slice of the queries"):
            captured(model, call, image=wrong, **told)


def test_a_grid_that_is_turned_is_refused_where_an_argument_tells():
    torch.manual_seed(0)
    model, call = CompVisUNet(), {"x": image(1), "timesteps": torch.ones(1), "context": text(1)}
    with pytest.raises(ValueError, match=r"x \[1, 4, 4, 6\] makes \(4, 6\): rows come first"):
        captured(model, call, text="context", grid=(COLS, ROWS))
    store, _ = captured(model, call, text="context", grid=lambda _: (COLS, ROWS))
    assert store.maps["attn2.up"].shape == (1, COLS, ROWS, T)


def test_a_model_of_a_known_family_is_proposed_without_two_facts():
    from helpers.joint_models import inputs
    from helpers.transformer_rows import flux

    model = flux().transformer
    proposal = sdattn.inspect_attention(model, **inputs("FLUX.1", model)).proposal
    assert "is of the family FLUX.1. Leave it out." in proposal.refused


def test_queries_that_run_down_the_columns_are_refused_with_the_way_out():
    def forward(self, latents, context):
        return self.attn(self.proj(tokens_of(latents.mT)), context)

    model, proposal = inspected(forward, image(1), text(1))
    assert "run down its columns" in proposal.refused
    assert f"grid=lambda call: {(COLS, ROWS)}" in proposal.refused
    call = {"latents": image(1), "context": text(1)}
    store, _ = captured(model, call, text="context", grid=lambda _: (COLS, ROWS))
    expected = softmax64(*model.attn.last)
    assert (store.maps["attn"].flatten(1, 2) - expected).abs().max() < 1e-5


def test_an_image_with_a_token_after_each_row_is_said_to_be_in_pieces():
    def forward(self, latents, context):
        rows = self.proj(latents.movedim(1, -1))
        ends = self.end.weight.expand(len(rows), ROWS, 1, -1)
        x = torch.cat([context, torch.cat([rows, ends], 2).flatten(1, 2)], 1)
        return self.attn(x, x)

    _, proposal = inspected(forward, image(1), text(1), modules={"end": nn.Embedding(1, WIDTH)})
    assert proposal.grid is None
    assert "attn: its text, or its image, is not in one piece" in proposal.unsure


def test_a_square_is_no_guess_where_the_image_has_other_sides():
    def forward(self, latents, reference, context):
        x = torch.cat([tokens_of(latents), tokens_of(reference)], 1)
        return self.attn(self.proj(x), context)

    square = noise(1, 4, 5, 4), noise(1, 4, 4, 4, seed=3), text(1)
    _, proposal = inspected(forward, *square)
    assert proposal.grid is None and "no argument tells the grid of 36 cells" in proposal.unsure[-1]


def test_text_and_image_in_one_tuple_are_told_apart():
    def forward(self, tokens):
        return self.attn(*2 * [torch.cat(tokens, 1)])

    both = text(2), noise(2, CELLS, WIDTH)
    _, proposal = inspected(forward, both, text=both[0])
    assert proposal.text == slice(0, T) and proposal.layers is None


@pytest.mark.parametrize("of_layers", ["abb", "bab", "bba", "abcb"])
def test_the_text_is_where_it_is_in_most_layers(of_layers):
    """Four of twelve keys come last in most, and the slice counts from the end."""
    places = {"a": slice(0, 4), "b": slice(8, 12), "c": slice(4, 8)}
    calls = []
    for each in of_layers:
        calls.append(InspectedCall(each, "", 1, 2, 12, 12, False, "joint", places[each], None, 8))
    unsure = []
    assert _text(calls, torch.zeros(1, 4, 8), "text", unsure) == slice(-4, None)
    assert unsure == [
        f"the text is at {len(set(of_layers))} places, and this is the one of most layers"
    ]
