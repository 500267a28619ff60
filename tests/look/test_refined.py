"""Joint attention's maps spread along the image's own self-attention, against float64."""

import pytest
import torch
from helpers.joint_models import COLS, MODELS, ROWS, first_map, inputs
from helpers.joint_parity import spans_of
from helpers.matrix_oracle import recorded
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import sd3

from sdattn import capture, generate, heatmaps
from sdattn.attention.calls import ALL, AttentionCall
from sdattn.follow.run_part import RunPart
from sdattn.look.attended import GivenProbs, softmax_of
from sdattn.look.refined import Refined, Spreading, spreading_layers
from sdattn.models.layers import AttentionLayer

PROMPT = "a red cat"
SHORT = {"num_inference_steps": 2, "height": 32, "width": 32}


def parts(kind, model, given):
    """Of each layer ``m``, float64 ``[N, T]``, and ``S_h``, ``[heads, N, N]``."""
    with recorded(model, ("joint",)) as record:
        model(**given)
    image, text = spans_of(kind)
    found = []
    for [probs] in record.values():
        own = probs[0, :, image, image]
        found.append((probs[0, :, image, text].mean(0), own / own.sum(-1, keepdim=True)))
    return found


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


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_maps_are_spread_twice(kind):
    model = MODELS[kind]().transformer
    given = inputs(kind, model)
    maps, pairs = parts(kind, model, given)[0]
    wanted = (pairs @ (pairs.mean(0) @ maps)).unflatten(1, (ROWS, COLS))
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

    def one(rows=ALL):
        image = AttentionCall(query.float(), key.float(), mask=mask.float(), scale=0.3)
        return Refined(GivenProbs(text[rows]), Spreading(), image.of_rows(rows))

    torch.testing.assert_close(one().every_head(None).double(), wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        one(slice(1, 2)).add_to(None, (8, 2)).double(),
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
    ("make", "options", "message"),
    [
        (sd3, {"refine": "cross"}, "refine='cross'"),
        (sd3, {"refine": "self", "among": [[0, 1]]}, "among=.*one of them"),
        (sd3, {"depth": (0.5, 1.0)}, "depth"),
        (sd3, {"refine": "self", "depth": (1.0, 0.5)}, "depth"),
        (make_pipeline, {"refine": "self"}, "layer.*UNet2D"),
    ],
)
def test_what_cannot_be_refined_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message), capture(make(), **options):
        pass


@torch.no_grad()
def test_a_pass_that_did_not_end_is_not_spread():
    model = MODELS["SD3"]().transformer
    given = inputs("SD3", model)
    found = []
    for is_broken in (False, True):
        with capture(model, refine="self", steps="all") as store:
            model(**given)
            if is_broken:
                last = model.norm_out.register_forward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(**{**given, "hidden_states": -given["hidden_states"]})
                last.remove()
            model(**{**given, "timestep": given["timestep"] * 2})
        found.append(store.maps)
    for name, maps in found[0].items():
        assert torch.equal(found[1][name], maps)
