"""Wan 2.1 from an image: layers that attend to the text and, in another softmax, to an image."""

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from helpers.matrix_oracle import softmax_in_float64
from helpers.rows import Way
from helpers.small_images import new_image
from helpers.wan_rows import IMAGE, from_seen_image, seeing, wan_from_image
from torch.nn.functional import scaled_dot_product_attention

from sdattn import TorchAttnProcessor, capture, heatmaps
from sdattn.models.denoiser_call import Timestep

TEXT = 512
LAYER = "blocks.1.attn2"


def unseen(query, key, value):
    """A product that no one can tell for one."""
    return (
        (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)[..., None] * value[:, :, None]
    ).sum(3)


class Own(WanAttnProcessor):
    """As diffusers' own, by any kernel and in any order; notes what was used."""

    def __init__(self, kernel=scaled_dot_product_attention, order=(0, 1), shares=(1, 1)):
        super().__init__()
        self.kernel, self.order, self.shares, self.used = kernel, order, shares, [None, None]

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *_):
        image, text = encoder_hidden_states.split(
            [encoder_hidden_states.shape[1] - TEXT, TEXT], dim=1
        )
        query = self.heads(attn, attn.norm_q(attn.to_q(hidden_states)))
        keys = attn.norm_added_k(attn.add_k_proj(image)), attn.norm_k(attn.to_k(text))
        values = attn.add_v_proj(image), attn.to_v(text)
        made = 0
        for i in self.order:
            key, value = self.heads(attn, keys[i]), self.heads(attn, values[i])
            self.used[i] = softmax_in_float64(query, key, None, None)
            made = made + self.shares[i] * self.kernel(query, key, value)
        return attn.to_out[0](made.transpose(1, 2).flatten(2))

    def heads(self, attn, states):
        return states.unflatten(2, (attn.heads, -1)).transpose(1, 2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return seeing()


def ran(model, columns=TEXT, states=IMAGE, batch=1):
    noise = torch.Generator().manual_seed(0)
    latent = torch.randn(batch, 12, 2, 4, 6, generator=noise)
    text = 3 * torch.randn(batch, columns, 32, generator=noise)
    seen = torch.randn(batch, states, 16, generator=noise) if states else None
    return model(latent, torch.tensor([7]), text, seen, return_dict=False)[0]


@pytest.mark.parametrize(
    "processor", [Own(), Own(unseen), Own(order=(1, 0))], ids=["torch's", "unseen", "text first"]
)
@torch.no_grad()
def test_the_images_columns_are_behind_those_of_the_text(model, processor):
    before = ran(model)
    model.get_submodule(LAYER).set_processor(processor)
    plain = ran(model)
    torch.testing.assert_close(plain, before, atol=1e-5, rtol=0)  # it is as diffusers' own
    with capture(model) as store:
        assert torch.equal(ran(model), plain)
    own, text = processor.used
    expected = torch.cat([text, own], -1).mean(1)[0]
    found = store.maps[LAYER].flatten(0, 3).double()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert text.std() > 1e-4  # words differ
    assert store.nbytes == store.expected_nbytes


@pytest.mark.parametrize(
    ("processor", "error", "said"),
    [
        (Own(shares=(1, 2)), RuntimeError, "processor Own"),
        (Own(unseen, shares=(0, 1)), RuntimeError, "processor Own"),
        (TorchAttnProcessor(), TypeError, "image as well"),
    ],
)
@torch.no_grad()
def test_what_else_a_processor_makes_of_both_is_refused(model, processor, error, said):
    model.get_submodule(LAYER).set_processor(processor)
    with pytest.raises(error, match=said), capture(model):
        ran(model)


@torch.no_grad()
def test_an_image_of_as_many_tokens_as_the_text_is_not_taken_for_it(model):
    """Which call is the text's is then told by the projections."""
    processor = Own(order=(1, 0))
    model.get_submodule(LAYER).set_processor(processor)
    with capture(model) as store:
        ran(model, states=TEXT)
    expected = processor.used[1].mean(1)[0]
    found = store.maps[LAYER].flatten(0, 3).double()
    torch.testing.assert_close(found[..., :TEXT], expected, atol=1e-5, rtol=0)
    assert found.shape[-1] == 2 * TEXT


@torch.no_grad()
def test_some_columns_are_those_of_all(model):
    with capture(model) as every:
        ran(model, batch=2)
    for columns in ([2, 0], [1, TEXT + 3], [TEXT + IMAGE - 1]):
        with capture(model, tokens=columns) as some:
            ran(model, batch=2)
        for name, maps in some.maps.items():
            expected = every.maps[name][..., columns]
            torch.testing.assert_close(maps, expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_bare_transformer_without_an_image_has_the_texts_columns(model):
    with capture(model) as store:
        ran(model, states=0)
    assert {maps.shape[-1] for maps in store.maps.values()} == {TEXT}


@torch.no_grad()
def test_texts_of_another_length_are_refused_before_a_layer_runs(model):
    with (
        pytest.raises(ValueError, match="max_sequence_length=226.*512.*tokens"),
        capture(model) as store,
    ):
        ran(model, columns=226)
    assert not store.passes


def test_an_image_in_the_softmax_of_the_text_is_refused():
    model = seeing(added_kv_proj_dim=None)
    said = "WanTransformer3DModel without added_kv_proj_dim was given encoder_hidden_states_image"
    with torch.no_grad(), pytest.raises(ValueError, match=said), capture(model):
        ran(model)


def test_a_first_and_a_last_image_have_columns_each():
    pipe = wan_from_image(pos_embed_seq_len=2 * IMAGE)
    options = {**from_seen_image(pipe, Way(size=(64, 96))), "num_inference_steps": 1}
    options |= {"image": new_image((96, 64)), "last_image": new_image((96, 64), seed=1)}
    with capture(pipe) as store:
        pipe(prompt=["a red cat", "a dog"], negative_prompt=["dog", "dog"], **options)
    assert store.nbytes == store.expected_nbytes
    for maps in store.maps.values():
        assert maps.shape == (2, 2, 4, 6, TEXT + 2 * IMAGE)
        sums = maps.split([TEXT, 2 * IMAGE], dim=-1)
        assert all((one.sum(-1) - 1).abs().max() < 1e-5 for one in sums)
    assert [found.words for found in heatmaps(store)] == [("a", "red", "cat"), ("a", "dog")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.tensor([[0, 0, 7, 7], [0, 0, 9, 9]]), 7.0),  # a given first frame has 0
        (torch.tensor([5, 6]), 5.0),
        (torch.tensor([[5], [6]]), 5.0),
        (torch.tensor(4), 4.0),
        (3, 3.0),
    ],
)
def test_the_timestep_of_tokens_is_that_of_the_last(given, expected):
    timestep = Timestep(given)
    if isinstance(given, torch.Tensor):
        given.zero_()  # what the model got counts
    assert float(timestep) == expected
