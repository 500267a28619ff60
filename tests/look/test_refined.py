"""Joint attention's maps spread along the image's own self-attention, against float64."""

import pytest
import torch
from helpers.joint_models import COLS, MODELS, N_TEXT, ROWS, first_map, inputs
from helpers.largest import Largest
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import flux, sd3
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from sdattn import capture, generate, heatmaps, load_run
from sdattn.attention.calls import AttentionCall
from sdattn.follow.run_part import RunPart
from sdattn.look.attended import GivenProbs, softmax_of
from sdattn.look.refined import Refined, Spreading, spreading_layers
from sdattn.models.attention_layer import AttentionLayer

CELLS = ROWS * COLS


class Calls(TorchFunctionMode):
    """What torch's attention was called with."""

    def __init__(self):
        super().__init__()
        self.of = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is scaled_dot_product_attention:
            named = kwargs or {}
            query, key = args[:2] if args else (named["query"], named["key"])
            self.of.append((query, key, named.get("attn_mask")))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("part", "kept"),
    [
        ((0.0, 1.0), [0, 1, 2, 3, 4]),
        ((0.5, 1.0), [2, 3, 4]),  # the third begins before the middle
        ((0.0, 0.5), [0, 1, 2]),  # and ends after it
        ((0.3, 0.5), [1, 2]),
        ((0.0, 0.01), [0]),
    ],
)
def test_a_block_that_a_part_of_the_depth_reaches_into_is_in_it(part, kept):
    layers = [AttentionLayer(str(i), "double", "joint", 0, 2, None) for i in range(5)]
    other = AttentionLayer("cross", "double", "cross", 0, 2, None)
    found = spreading_layers([other, *layers], RunPart(*part))
    assert [one.name for one in found] == ["cross", *map(str, kept)]


def parts(kind, model, given):
    """Of each layer ``m``, float64 ``[N, T]``, and ``S_h``, ``[heads, N, N]``."""
    with Calls() as calls:
        model(**given)
    image = slice(CELLS) if kind == "SD3" else slice(N_TEXT, N_TEXT + CELLS)
    text = slice(CELLS, None) if kind == "SD3" else slice(N_TEXT)
    found = []
    for query, key, mask in calls.of:
        assert mask is None or bool((mask == 0).all() if mask.is_floating_point() else mask.all())
        query, key = query[0].double(), key[0].double()
        scores = query[:, image] @ key.mT / query.shape[-1] ** 0.5
        found.append((scores.softmax(-1)[..., text].mean(0), scores[..., image].softmax(-1)))
    return found


def expected(kind, model, given):
    """``S_h (S m)`` of the first layer, float64 ``[heads, N, T]``."""
    maps, pairs = parts(kind, model, given)[0]
    return pairs @ (pairs.mean(0) @ maps)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_maps_are_spread_twice(kind):
    model = MODELS[kind]().transformer
    given = inputs(kind, model)
    wanted = expected(kind, model, given).unflatten(1, (ROWS, COLS))
    found = first_map(model, given, refine="self")
    assert (found - first_map(model, given)).abs().max() > 1e-3
    torch.testing.assert_close(found.double(), wanted.mean(0), atol=1e-6, rtol=1e-5)
    some = first_map(model, given, refine="self", tokens=[5, 0], heads=[1])
    torch.testing.assert_close(some[0].double(), wanted[1][..., [5, 0]], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_a_later_pass_spreads_the_mean_over_layers_of_the_one_before(kind):
    model = MODELS[kind]().transformer
    calls = []
    for scale in (1.0, 0.5, -1.0):  # three passes that differ
        given = inputs(kind, model)
        time = given["timestep"] * (2 + scale)
        calls.append({**given, "hidden_states": scale * given["hidden_states"], "timestep": time})
    with capture(model, refine="self", steps="all", tokens=[5, 0]) as store:
        for given in calls:
            model(**given)
    layers = [parts(kind, model, given) for given in calls]
    own = [sum(maps for maps, _ in layer) / len(layer) for layer in layers]
    once = [sum(pairs.mean(0) @ maps for maps, pairs in layers[0]) / len(layers[0])]
    for before, layer in zip(own, layers[1:], strict=False):
        once.append(sum(pairs.mean(0) @ before for _, pairs in layer) / len(layer))
    for number, name in enumerate(store.maps):
        for step in (1, 2):
            wanted = (layers[step][number][1].mean(0) @ once[step - 1])[:, [5, 0]]
            found = store.maps[name][0, step].flatten(0, 1).double()
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
            alone = layers[step][number][1].mean(0) @ layers[step][number][0]
            assert (alone[:, [5, 0]] - wanted).abs().max() > 1e-3  # what it would be confused with


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_a_part_of_the_blocks_spreads_what_all_blocks_pay_to_the_text(kind):
    model = MODELS[kind]().transformer
    given = inputs(kind, model)
    calls = [given, {**given, "hidden_states": -given["hidden_states"]}]
    with capture(model, refine="self", steps="all", tokens=[5, 0], depth=(0.999, 1.0)) as store:
        for one in calls:
            model(**one)
    first, second = (parts(kind, model, one) for one in calls)
    mean = sum(maps for maps, _ in first) / len(first)  # all have run when the last one does
    along = [layers[-1][1].mean(0) for layers in (first, second)]
    once = along[0] @ mean
    [name] = store.maps
    assert name == store.layers[-1].name and len(first) > 1
    for step, wanted in enumerate((along[0] @ once, along[1] @ once)):
        found = store.maps[name][0, step].flatten(0, 1).double()
        torch.testing.assert_close(found, wanted[:, [5, 0]], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 3, 6), (2, 3, 6)], ids=str)
def test_a_mask_of_the_cells_counts(shape):
    generator = torch.Generator().manual_seed(0)

    def noise(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    text = noise(2, 3, 6, 9).softmax(-1)
    query, key = noise(2, 3, 6, 4), noise(2, 3, 6, 4)
    mask = noise(*shape, 6)
    pairs = (0.3 * query @ key.mT + mask).softmax(-1)
    wanted = pairs @ (pairs.mean(1) @ text.mean(1))[:, None]

    def one():
        image = AttentionCall(query.float(), key.float(), mask=mask.float(), scale=0.3)
        return Refined(GivenProbs(text), Spreading(), image)

    torch.testing.assert_close(one().every_head(None).double(), wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        one().of_rows((1,)).add_to(None, (8, 2)).double(),
        wanted[[1]].sum(1)[..., [8, 2]],
        atol=1e-5,
        rtol=1e-5,
    )
    with torch.no_grad():
        torch.testing.assert_close(
            one().probs(slice(1, 2), None).double(), wanted[:, 1:2], atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize("rows", [1, 11])
def test_a_mask_of_the_whole_call_is_cut_to_the_image(rows):
    generator = torch.Generator().manual_seed(3)

    def noise(*size):
        return torch.randn(*size, generator=generator)

    image, text = slice(5, 11), slice(0, 5)
    call = AttentionCall(noise(2, 3, 11, 4), noise(2, 3, 11, 4), mask=noise(2, 1, rows, 11))
    scores = call.query.double() @ call.key.double().mT / 2 + call.mask
    maps = scores.softmax(-1)[:, :, image, text].mean(1)
    pairs = scores[:, :, image, image].softmax(-1)
    wanted = (pairs @ (pairs.mean(1) @ maps)[:, None]).sum(1)
    found = Refined(softmax_of(call, image, text), Spreading(), call.between(image, image))
    found = found.add_to(None, None)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_output_stays_what_it_was():
    model = sd3().transformer
    given = inputs("SD3", model)
    plain = model(**given).sample
    with capture(model, refine="self"):
        assert torch.equal(model(**given).sample, plain)


def test_the_gradient_goes_through_both_products():
    model = sd3().transformer.double()
    given = inputs("SD3", model, torch.float64)
    given = {k: v.double() if torch.is_tensor(v) else v for k, v in given.items()}
    text = given["encoder_hidden_states"].requires_grad_()

    def loss(states):
        kept = {"grad": True, "dtype": torch.float64, "refine": "self"}
        found = first_map(model, {**given, "encoder_hidden_states": states}, **kept)
        return found[..., 2].square().sum()

    (slope,) = torch.autograd.grad(loss(text), text)
    direction = torch.randn(text.shape, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        step = 1e-3  # the maps are float32
        numeric = (loss(text + step * direction) - loss(text - step * direction)) / (2 * step)
    torch.testing.assert_close((slope * direction).sum(), numeric, rtol=2e-2, atol=1e-7)


@torch.no_grad()
def test_no_matrix_of_cells_by_cells_is_made():
    model = flux().transformer
    rows = cols = 32
    with Largest() as watched, capture(model, refine="self"):
        model(**inputs("FLUX.1", model, rows=rows, cols=cols))
    heads = model.config.num_attention_heads
    assert heads * (rows * cols) ** 2 > 10 * watched.numel


PROMPT = "a red cat"
SHORT = {"num_inference_steps": 2, "height": 32, "width": 32}


@pytest.mark.parametrize("make", [sd3, flux])
@pytest.mark.slow
def test_a_run_refines_and_comes_back_from_its_folder(make, tmp_path):
    pipe = make()
    (plain,) = generate(pipe, PROMPT, seed=1, preset="columns", **SHORT)
    # sharpened maps of random weights, which are nearly flat, would show what float16 rounds
    ways = {"seed": 1, "preset": "columns", "refine": "self", **SHORT}
    run = generate(pipe, PROMPT, **ways)
    (sharper,) = run
    assert sharper.image.tobytes() == plain.image.tobytes()
    read = plain.heatmaps.prompt
    unpadded = [i for i, token in enumerate(read.tokens) if token.special != "<pad>"]
    assert [*sharper.heatmaps.columns] == unpadded != [*plain.heatmaps.columns]
    assert sharper.heatmaps.preset.refine == "self"
    assert not torch.equal(sharper.heatmaps.maps, plain.heatmaps.maps)
    three = generate(pipe, PROMPT, words=["cat"], **ways)[0].heatmaps["cat"]
    torch.testing.assert_close(three.values, sharper.heatmaps["cat"].values)
    run.save(tmp_path / "run")
    again = load_run(tmp_path / "run")
    assert again.heatmaps.preset == sharper.heatmaps.preset
    torch.testing.assert_close(again.heatmaps.maps, sharper.heatmaps.maps, atol=1e-3, rtol=1e-2)
    with capture(pipe, steps=(0.5, 1.0), refine="self") as store:
        pipe(PROMPT, generator=torch.Generator().manual_seed(1), output_type="latent", **SHORT)
    for given in ({}, {"refine": "self"}):
        (found,) = heatmaps(store, preset="columns", **given)
        found = found.keep(unpadded)
        torch.testing.assert_close(found.maps, sharper.heatmaps.maps)
        assert found.preset.refine == "self"


def test_the_negative_prompt_is_refined_too():
    pipe, ways = sd3(), {"capture_options": {"branch": "both"}, "negative_prompt": "a blue dog"}
    [run] = generate(pipe, PROMPT, seed=1, refine="self", guidance_scale=3.0, **ways, **SHORT)
    negative = run.texts["negative"]
    kept = {"steps": (0.75, 1.0), "refine": "self", "depth": (0.5, 1.0)}
    with capture(pipe, branch="unconditional", **kept) as store:
        pipe(
            PROMPT,
            negative_prompt="a blue dog",
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(1),
            output_type="latent",
            **SHORT,
        )
    (own,) = heatmaps(store, pipe, "a blue dog")
    torch.testing.assert_close(negative["dog"].values, own["dog"].values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refine": "cross"}, "refine='cross'"),
        ({"refine": "self", "among": [[0, 1]]}, "among=.*one of them"),
        ({"depth": (0.5, 1.0)}, "depth"),
        ({"refine": "self", "depth": (1.0, 0.5)}, "depth"),
    ],
)
def test_what_cannot_be_refined_is_refused(options, message):
    with pytest.raises(ValueError, match=message), capture(sd3(), **options):
        pass


def test_refinement_is_an_option_of_the_run_not_of_its_capture():
    with pytest.raises(ValueError, match="capture_options="):
        generate(sd3(), PROMPT, capture_options={"refine": "self"}, **SHORT)


def test_a_unet_is_not_refined_while_it_runs():
    with (
        pytest.raises(ValueError, match="layer.*UNet2D"),
        capture(make_pipeline(), refine="self"),
    ):
        pass
