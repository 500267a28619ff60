"""How alike the outputs of text and image are, against the formula in float64."""

from dataclasses import replace

import pytest
import torch
from helpers.joint_models import COLS, MODELS, ROWS, first_map, inputs
from helpers.joint_parity import spans_of
from helpers.matrix_oracle import recorded, softmax_in_float64
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import flux, sd3

from sdattn import PRESETS, capture, generate, heatmaps
from sdattn.keep.keep import Keep
from sdattn.look.output_space import OutputSpace

PROMPT = "a red cat on the sofa"
STEPS = {"num_inference_steps": 2, "max_sequence_length": 16, "height": 128, "width": 128}


def made(query, key, value, mask, scale):
    """What a call of torch's attention makes, by the formula, and its softmax."""
    softmax = softmax_in_float64(query, key, mask, scale)
    return softmax @ value.double(), softmax


def expected(kind, model, given):
    """``o_t . o_x / d`` of the first layer, float64 ``[heads, N, T]``, and its cells' softmax."""
    with recorded(model, ("joint",), made) as record:
        model(**given)
    output, softmax = (one[0] for one in next(iter(record.values()))[0])
    image, text = spans_of(kind)
    pairs = softmax[:, image, image]
    products = output[:, image] @ output[:, text].mT / output.shape[-1]
    return products, pairs / pairs.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_maps_are_products_of_outputs(kind):
    model = MODELS[kind]().transformer
    given = inputs(kind, model)
    wanted, pairs = expected(kind, model, given)
    wanted, grid = wanted.unflatten(1, (ROWS, COLS)), (ROWS, COLS)
    assert wanted.std() > 1e-2
    found = first_map(model, given, space="output")
    torch.testing.assert_close(found.double(), wanted.mean(0), atol=1e-6, rtol=1e-5)
    some = first_map(model, given, space="output", tokens=[5, 0], heads=[1])
    torch.testing.assert_close(some[0].double(), wanted[1][..., [5, 0]], atol=1e-6, rtol=1e-5)
    along = pairs.mean(0)
    spread = (along @ (along @ wanted.mean(0).flatten(0, 1))).unflatten(0, grid)
    found = first_map(model, given, space="output", refine="self")
    torch.testing.assert_close(found.double(), spread, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("columns", [None, [5, 0]])
def test_sums_over_steps_are_of_the_same_products(columns):
    """The first step makes the tensor that those after it are added to."""
    cells, tokens = torch.randn(2, 3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    steps = [OutputSpace(a, b) for a, b in zip(cells, tokens, strict=True)]
    total = None
    for step in steps:
        total = step.add_to(total, columns)
    wanted = (cells.double() @ tokens.double().mT / 8).sum((0, 2))
    wanted = wanted if columns is None else wanted[..., columns]
    torch.testing.assert_close(total.double(), wanted, atol=1e-5, rtol=0)


# -- the preset -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sd3, flux])
@pytest.mark.parametrize("refine", [None, "self"])
@pytest.mark.slow
def test_words_share_each_cell_by_their_likeness(make, refine):
    pipe = make()
    run = generate(pipe, PROMPT, seed=1, preset="output", refine=refine, **STEPS)
    [found] = run.heatmaps
    with capture(pipe, space="output", refine=refine) as store:
        generate(pipe, PROMPT, seed=1, **STEPS)
    mean = torch.stack([maps[0].double() for maps in store.maps.values()]).mean(0)
    columns = [i for i, token in enumerate(found.prompt.tokens) if not token.special]
    wanted = (10 * mean[..., columns]).softmax(-1)
    torch.testing.assert_close(found.maps.double(), wanted, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.maps.sum(-1), torch.ones(found.maps.shape[:2]))
    assert found.preset == replace(PRESETS["output"], refine=refine)
    assert (
        found.preset.unit == "softmax over words of 10 \N{MULTIPLICATION SIGN} likeness of outputs"
    )


def test_another_text_can_be_compared_too():
    run = generate(sd3(), PROMPT, ask=PROMPT, seed=1, preset="output", **STEPS)
    own, asked = run.heatmaps[0], run.asked_heatmaps[0]
    torch.testing.assert_close(asked["cat"].values, own["cat"].values, atol=1e-6, rtol=1e-4)


def test_what_has_no_outputs_of_words_is_refused_by_name():
    pipe = make_pipeline()
    with pytest.raises(TypeError, match="'output'.*UNet2DCondition"):
        generate(pipe, PROMPT, preset="output", num_inference_steps=1)
    with pytest.raises(ValueError, match="space='output'.*layer"):
        with capture(pipe, space="output"):
            pass


def test_what_fits_nothing_is_refused():
    with pytest.raises(ValueError, match="space='values'"):
        Keep.of(space="values")
    with pytest.raises(ValueError, match="without a softmax"):
        Keep.of(space="output", among=[[1]])
    with pytest.raises(ValueError, match="contrast=0"):
        replace(PRESETS["output"], contrast=0.0)
    pipe = sd3()
    with capture(pipe) as store:
        pipe(PROMPT, **STEPS)
    with pytest.raises(RuntimeError, match="Capture with space='output'"):
        heatmaps(store, pipe, PROMPT, preset="output")
    with capture(pipe, space="output") as store:
        pipe(PROMPT, **STEPS)
    with pytest.raises(RuntimeError, match="Capture with space='attention'"):
        heatmaps(store, pipe, PROMPT)
