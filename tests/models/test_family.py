"""A family of models from outside the package, in one record; and what a record refuses.

The toy is a transformer with the image first in its joint sequence, of layers that call torch's
``scaled_dot_product_attention``. Its maps are compared with a softmax in float64, written out.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import diffusers
import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    PRXTransformer2DModel,
    UNet2DConditionModel,
)
from helpers.joint_models import first_map, inputs
from helpers.matrix import ROWS
from helpers.newer import newer
from helpers.tiny_pipelines import make_unet
from helpers.tiny_tokenizers import tiny_tokenizer
from helpers.transformer_rows import flux
from helpers.unet_rows import UNETS
from torch import nn

import sdattn
from sdattn.models import Family, Names, register, unregister
from sdattn.models.denoiser import find_denoiser
from sdattn.models.encoders import read_clip
from sdattn.models.families import closest, family_of, registered
from sdattn.models.parts import Guidance

WIDTH, HEADS, N_TEXT, ROWS_COLS = 16, 2, 5, (3, 4)


class ToyProcessor:
    """Joins image and text, attends, and parts them again."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None):
        states = (hidden_states, encoder_hidden_states)
        projected = zip((attn.to_qkv, attn.add_qkv), states, strict=True)
        parts = [project(of).chunk(3, dim=-1) for project, of in projected]
        query, key, value = (
            torch.cat(pair, dim=1).unflatten(-1, (attn.heads, -1)).transpose(1, 2)  # [B, h, N, d]
            for pair in zip(*parts, strict=True)
        )
        attn.seen.append((query, key))
        made = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return made.transpose(1, 2).flatten(2).split([part.shape[1] for part in states], dim=1)


class ToyAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.seen = HEADS, []
        self.to_qkv, self.add_qkv = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.processor = ToyProcessor()

    def set_processor(self, processor):
        self.processor = processor

    def forward(self, image, text):
        return self.processor(self, image, encoder_hidden_states=text)


class ToyTransformer(nn.Module):
    """Two blocks over an image ``[B, width, rows, cols]`` and a text ``[B, T, width]``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": ToyAttention()}) for _ in range(2))

    def forward(self, hidden_states, encoder_hidden_states, timestep):
        image, text = hidden_states.flatten(2).mT, encoder_hidden_states
        for block in self.blocks:
            more, other = block["attn"](image, text)
            image, text = image + 4 * more, text + 4 * other  # so that attention is uneven
        return image


def cells(_model, given):
    return given["hidden_states"].shape[-2:]


TOY = Family(
    name="Toy",
    denoisers=(ToyTransformer,),
    layers={"blocks.*.attn": ("double", "joint")},
    joined="image first",
    grid=cells,
    patch=1,
)


@pytest.fixture
def known():
    """Registers families, and takes them out again."""
    added = []

    def add(family):
        register(family)
        added.append(family)

    yield add
    for family in added:
        unregister(family)


@torch.no_grad()
def maps_and_truth():
    """Captured maps, and those of the toy's own queries and keys, by the layers' names."""
    model = ToyTransformer()
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, WIDTH, *ROWS_COLS, generator=generator)
    text = torch.randn(2, N_TEXT, WIDTH, generator=generator)
    plain = model(image, text, 7)
    for block in model.blocks:
        block["attn"].seen.clear()
    with sdattn.capture(model) as store:
        assert torch.equal(model(image, text, timestep=7), plain)
    assert store.timesteps == [7.0]
    truth = {}
    for i, block in enumerate(model.blocks):
        [(query, key)] = block["attn"].seen
        scores = query.double() @ key.double().mT / math.sqrt(WIDTH // HEADS)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        probs = (weights / weights.sum(-1, keepdim=True)).mean(1)  # [B, N, N]
        n_cells = math.prod(ROWS_COLS)
        truth[f"blocks.{i}.attn"] = probs[:, :n_cells, n_cells:].unflatten(1, ROWS_COLS)
    return store.maps, truth


def test_a_model_from_outside_gets_right_maps_through_one_record(known):
    known(TOY)
    maps, truth = maps_and_truth()
    assert set(maps) == set(truth)
    for name, expected in truth.items():
        assert maps[name].shape == (2, *ROWS_COLS, N_TEXT)
        torch.testing.assert_close(maps[name].double(), expected, atol=1e-6, rtol=0)


def test_the_record_s_order_is_the_one_that_is_used(known):
    known(replace(TOY, joined="text first"))
    with pytest.raises(RuntimeError, match="join text"):
        maps_and_truth()  # the other cells reach the output projection


class ToyPipeline:
    """Runs its model on the negative prompt and the prompt in one batch."""

    def __init__(self):
        self.transformer, self.tokenizer = ToyTransformer(), tiny_tokenizer()
        self.scheduler = SimpleNamespace(timesteps=torch.tensor([7.0]))

    @property
    def do_classifier_free_guidance(self):
        return True

    def __call__(self):
        generator = torch.Generator().manual_seed(1)
        text = torch.randn(2, N_TEXT, WIDTH, generator=generator)
        image = torch.randn(1, WIDTH, *ROWS_COLS, generator=generator).expand(2, -1, -1, -1)
        output = self.transformer(image, text, 7)
        return image, text, output


PIPELINES = {
    "readers": {"ToyPipeline": read_clip},
    "guidance": {"ToyPipeline": Guidance(("unconditional", "conditional"))},
}


@torch.no_grad()
def test_the_record_has_how_its_pipelines_read_and_guide(known):
    pipe = ToyPipeline()
    known(replace(TOY, **PIPELINES))
    assert sdattn.read_prompts(pipe, "a cat") == [sdattn.read_prompt(pipe.tokenizer, "a cat")]
    with sdattn.capture(pipe) as store:
        image, text, _ = pipe()
    with sdattn.capture(pipe.transformer) as both:  # every row an image of its own
        pipe.transformer(image, text, 7)
    for name, found in store.maps.items():
        torch.testing.assert_close(found, both.maps[name][1:], atol=1e-6, rtol=0)
        assert (found - both.maps[name][:1]).abs().max() > 0.01


def test_a_pipeline_whose_record_leaves_that_out_is_refused_by_name(known):
    with pytest.raises(TypeError, match="ToyPipeline.*ToyTransformer"):
        find_denoiser(ToyPipeline())
    known(TOY)
    with pytest.raises(TypeError, match="ToyPipeline.*prompts"):
        sdattn.read_prompts(ToyPipeline(), "a cat")
    with pytest.raises(ValueError, match="ToyPipeline.*guidance"):
        with sdattn.capture(ToyPipeline()):
            pass


def test_without_its_record_it_is_refused_by_name(known):
    for _ in range(2):
        with pytest.raises(TypeError, match="Asked to capture a ToyTransformer") as refused:
            with sdattn.capture(ToyTransformer()):
                pass
        assert "FLUX.1 (FluxTransformer2DModel)" in str(refused.value)
        assert "Toy (" not in str(refused.value)
        with pytest.raises(TypeError, match="ToyTransformer.*family"):
            list(find_denoiser(ToyTransformer()).layers)
        register(TOY)
        assert len(find_denoiser(ToyTransformer()).layers) == 2
        with pytest.raises(TypeError, match=r"(?s)a Linear, .*Toy \(ToyTransformer\)"):
            find_denoiser(nn.Linear(1, 1))
        unregister(TOY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"joined": None}, "'Toy'.*joined=None"),
        ({"joined": "image"}, "joined='image': pass 'text first' or 'image first'"),
        ({"layers": {"blocks.*.attn": ("block", "cross")}}, "joined='imag"),
    ],
)
def test_a_record_without_an_order_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TOY, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"denoisers": ("FluxTransformer2DModel",)},
        {"denoisers": (FluxTransformer2DModel,)},
        {"readers": {"Flux": print}},
        {"guidance": {"FluxPipeline": None}},
        {"name": "FLUX.1"},
    ],
)
def test_a_name_that_another_family_has_is_refused(changes):
    before = registered()
    with pytest.raises(ValueError, match="family.*'FLUX.1'"):
        register(replace(TOY, **changes))
    assert registered() == before
    with pytest.raises(ValueError, match="'Toy' is not registered"):
        unregister(TOY)


def test_attention_in_an_unknown_place_is_named(known):
    known(replace(TOY, layers={"blocks.0.attn": ("double", "joint")}))
    with pytest.raises(TypeError, match=r"blocks\.1\.attn.*ToyAttention"):
        list(find_denoiser(ToyTransformer()).layers)


@pytest.mark.parametrize("frames", [1, 3])
def test_frames_in_one_sequence_are_refused_of_models_of_images(known, frames):
    known(replace(TOY, grid=lambda model, given: (frames, *cells(model, given))))
    if frames == 1:
        maps, truth = maps_and_truth()
        assert maps["blocks.0.attn"].shape == truth["blocks.0.attn"].shape
    else:
        with pytest.raises(ValueError, match="ToyTransformer.*3 frames"):
            maps_and_truth()


@pytest.mark.slow
def test_every_family_has_a_row_in_the_matrix():
    """But for models of one's own, which have no pipeline."""
    videos = [row for row in UNETS if row.frames]
    rows = (*UNETS[:1], *videos, *ROWS[len(UNETS) :])
    seen = {family_of(find_denoiser(row.make()).model).name for row in rows}
    known = [family for family in registered() if "one's own" not in family.name]
    assert seen == {one.name for one in known if any(hasattr(diffusers, n) for n in one.denoisers)}


def resisting(kind):
    if kind is UNet2DConditionModel:  # DeepFloyd IF's
        return kind(
            block_out_channels=(32, 64),
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            cross_attention_dim=32,
            layers_per_block=1,
        )
    return kind(depth=1) if kind is PRXTransformer2DModel else kind(num_layers=1)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            "PRXTransformer2DModel",
            r"attends(.|\n)*inspect_attention\(model, (.|\n)*capture\(model, text=",
        ),
        ("UNet2DConditionModel", "down_blocks.1.attentions.0.*text"),
    ],
)
def test_what_resists_is_refused_with_its_reason(kind, why):
    with torch.device("meta"):
        model = resisting(newer(kind))
    with pytest.raises(TypeError, match=why), sdattn.capture(model):
        pass


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("HunyuanVideoFramepackTransformer3DModel", "HunyuanVideo"),
        ("BriaFiboTransformer2DModel", "Bria"),
        ("SanaVideoTransformer3DModel", "Sana"),
        ("AllegroTransformer3DModel", None),
        ("Transformer2DModel", None),
        ("Linear", None),
    ],
)
def test_an_unknown_model_is_refused_with_the_family_of_the_closest_name(name, family):
    kind = type(name, (nn.Module,), {})
    found = closest(kind)
    assert found is None if family is None else found.name == family
    with pytest.raises(TypeError, match="scripts.new_family") as refused:
        find_denoiser(kind())
    said = str(refused.value)
    assert ("The closest family by name is" in said) == (family is not None)
    assert said.index("inspect_attention(") < said.index("capture(") < said.index("Known are:")
    assert all(one.name in said for one in registered())  # all that are supported are listed


@pytest.mark.parametrize("family", [one for one in registered() if one.denoisers])
def test_each_family_is_the_closest_to_its_own_models(family):
    for name in family.denoisers:
        assert closest(type(name, (), {})) is family


class Renamed(nn.Module):
    def forward(self, x, t=None, sigma=None, states=None, more=None, skip=None):
        return x


def test_the_inputs_of_a_call_are_read_by_the_names_that_forward_has():
    names = Names(
        latents="x", timestep=("sigma", "t"), text="states", text_2="more", skips=("skip",)
    )
    family = Family(name="Renamed", grid=lambda *_: (3, 4), names=names, timestep_unit=10.0)
    model, x = Renamed(), torch.zeros(2, 4, 3, 4)
    states, more = torch.zeros(2, 5, 8), torch.zeros(2, 7, 8)
    given = {"t": torch.tensor(3.0), "states": states, "more": more}
    call = family.read_call(model, (x,), given)
    assert (call.batch, call.latent_size, call.n_text) == (2, (3, 4), 12)
    assert call.sample is x and call.text is states and call.text_2 is more
    assert float(call.timestep) == 30 and not call.skips_layers
    call = family.read_call(model, (x,), {**given, "sigma": torch.tensor(2.0), "skip": [1]})
    assert float(call.timestep) == 20 and call.skips_layers
    assert not family.read_call(model, (x,), {**given, "skip": False}).skips_layers
    rows = replace(family, names=replace(names, text="", text_2=""))
    call = rows.read_call(model, ([x[0], x[1]],), given)  # a list with a tensor per row
    assert (call.batch, call.text, call.sample, call.n_text) == (2, None, None, 0)


class Same(FluxTransformer2DModel):
    pass


class Other(FluxTransformer2DModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_image_prompts_of_a_bare_unet_have_tokens_for_each_image():
    unet = make_unet()
    images = [torch.zeros(2, 3, 4, 8), torch.zeros(2, 1, 16, 8)]  # [B, images, tokens, width]
    given = {"encoder_hidden_states": (torch.zeros(2, 77, 8), images)}
    assert family_of(unet).image_columns(unet, given, 2) == 3 * 4 + 16


@torch.no_grad()
def test_a_subclass_is_known_as_long_as_it_leaves_forward_alone():
    model = flux().transformer
    given = inputs("FLUX.1", model)
    expected = first_map(model, given)
    model.__class__ = Same
    assert torch.equal(first_map(model, given), expected)
    model.__class__ = Other
    with pytest.raises(TypeError, match="test_family.*forward"):
        first_map(model, given)
    model.__class__ = type("FluxTransformer2DModel", (Other,), {"__module__": "elsewhere"})
    with pytest.raises(
        TypeError, match=r"FluxTransformer2DModel.*forward(.|\n)*text=\.\.\., grid="
    ):
        first_map(model, given)
    size = tuple(given["img_ids"].amax(0)[1:].int().add(1).tolist())
    with sdattn.capture(model, text=slice(0, expected.shape[-1]), grid=size) as store:
        model(**given)
    assert (next(iter(store.maps.values())) - expected).abs().max() < 1e-6
