"""Presets of joint attention against their formulas, written out from single columns."""

from dataclasses import replace

import pytest
import torch
from helpers.presets import JOINT, OF_OUTPUTS
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import flux, sd3

from sdattn import PRESETS, capture, generate, heatmaps
from sdattn.maps.aggregation import read_by, rescaled, sharpened
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.prompts.tokens import Prompt, read_pieces

PROMPT = "a red cat on the turquoise sofa"
STEPS = {"num_inference_steps": 9, "max_sequence_length": 32, "height": 128, "width": 128}


def every_step(pipe):
    """All steps of a run, float64 ``[blocks][steps, rows, cols, T]``."""
    with capture(pipe, steps="all") as store:
        generate(pipe, PROMPT, seed=1, **STEPS)
    return [maps[0].double() for maps in store.maps.values()]


@pytest.mark.slow
def test_seg4diff_is_the_mean_of_a_words_columns_in_one_block_and_step():
    pipe = sd3()
    blocks = every_step(pipe)
    [found] = generate(pipe, PROMPT, seed=1, preset="seg4diff", **STEPS).heatmaps
    # of three blocks the one that 9 of 24 lies in, of 9 steps the one whose middle is 6.5 / 9
    assert len(blocks) == 3 and 0.7 < 6.5 / 9 < 0.76
    own = blocks[1][6]
    for word in ("cat", "turquoise"):
        columns = list(found[word].columns)
        torch.testing.assert_close(
            found[word].values.double(), own[..., columns].mean(-1), atol=1e-6, rtol=1e-4
        )


@pytest.mark.parametrize(("depth", "name"), [(9 / 24, "9"), (0.4, "9"), (0.0, "0"), (0.999, "23")])
def test_a_depth_is_a_part_of_the_way_through_the_blocks(depth, name):
    ones = torch.ones(1, 2, 2, 3)
    layers = {str(i): LayerMap("double", 0, 1, ones) for i in range(24)}
    held = LayerMaps(layers, (0, 1, 2), passes=1)
    assert list(read_by(held, replace(PRESETS["seg4diff"], depth=depth))) == [name]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "sink"), [(sd3, "<sos>"), (flux, "<eos>")])
def test_rescaled_is_a_multiple_of_what_the_start_or_end_token_gets(make, sink):
    pipe = make()
    mean = torch.stack(every_step(pipe)).mean((0, 1))
    run = generate(pipe, PROMPT, seed=1, preset="rescaled", **STEPS)
    [found] = run.heatmaps
    column = next(i for i, one in enumerate(found.prompt.tokens) if one.special == sink)
    assert all(one.special != "<sos>" for one in found.prompt.tokens[:column])
    wanted = mean / mean[..., [column]]
    for word in ("cat", "turquoise"):
        columns = list(found[word].columns)
        torch.testing.assert_close(
            found[word].values.double(), wanted[..., columns].sum(-1), atol=1e-6, rtol=1e-4
        )
    assert found.preset.unit == "attention as a multiple of the start token's"


@pytest.mark.parametrize(
    ("pieces", "sink"),
    [(["<sos>", "cat", "<eos>"], 0), (["<eos>", "<sos>", "cat"], 1), (["cat", "<eos>"], 1)],
)
def test_maps_are_divided_by_the_start_tokens_or_else_by_the_end_tokens(pieces, sink):
    maps = torch.tensor([2.0, 3.0, 5.0][: len(pieces)]).expand(2, 2, -1)
    torch.testing.assert_close(rescaled(maps, read_pieces(pieces)), maps / [2, 3, 5][sink])


def test_a_text_without_start_and_end_cannot_be_rescaled():
    with pytest.raises(RuntimeError, match="prompt.*'cat'"):
        rescaled(torch.ones(2, 2, 1), Prompt("cat", (), ()))


@pytest.mark.parametrize("name", JOINT)
def test_a_unet_has_no_such_blocks(name):
    message = "compares the outputs" if name in OF_OUTPUTS else "reads layers of the places double"
    with pytest.raises((ValueError, TypeError), match=f"{name!r} {message}"):
        generate(make_pipeline(), PROMPT, preset=name, num_inference_steps=1)


@pytest.mark.parametrize("name", ["output", "rescaled"])
def test_words_alone_are_too_few_columns(name):
    pipe = sd3()
    with pytest.raises(ValueError, match=r"sets words \(tokens\)"):
        generate(pipe, PROMPT, preset=name, words=["cat"], **STEPS)
    with capture(pipe, tokens=[1, 2], space=PRESETS[name].space) as store:
        pipe(PROMPT, **STEPS)
    with pytest.raises(RuntimeError, match="Capture with tokens=None"):
        heatmaps(store, pipe, PROMPT, preset=name)


@pytest.mark.slow
@pytest.mark.parametrize("make", [sd3, flux])
def test_the_default_of_joint_attention_is_refined_and_sharpened(make):
    pipe = make()
    [found] = generate(pipe, PROMPT, seed=1, **STEPS).heatmaps
    assert found.preset == PRESETS["joint"] and found.preset.unit == "share of attention, sharpened"
    kept = {"steps": (0.75, 1.0), "refine": "self", "depth": (0.5, 1.0), "tokens": found.columns}
    with capture(pipe, **kept) as store:
        generate(pipe, PROMPT, seed=1, preset="columns", **STEPS)
    spread = torch.stack([maps[0].double() for maps in store.maps.values()]).mean(0)
    for column in range(spread.shape[-1]):
        one = spread[..., column]
        wanted = one.max() * ((one - one.min()) / (one.max() - one.min())) ** 5
        peak = float(one.max())
        torch.testing.assert_close(
            found.maps[..., column].double(), wanted, atol=5e-2 * peak, rtol=0
        )
        assert (one - wanted).abs().max() > 0.2 * peak
    [own] = heatmaps(store, pipe, PROMPT)
    assert torch.equal(own.maps, found.maps) and own.preset == found.preset


def test_a_flat_map_is_sharpened_to_nothing_and_a_power_of_one_changes_nothing():
    maps = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(0))
    flat = torch.full((3, 4, 1), 0.2)
    assert torch.equal(sharpened(flat, 5.0), torch.zeros(3, 4, 1))
    power = sharpened(maps, 2.0)
    assert torch.equal(power.amax((0, 1)), maps.amax((0, 1))) and bool((power >= 0).all())


@pytest.mark.slow
def test_the_default_is_of_the_family_and_columns_are_one_option_away():
    [unet] = generate(make_pipeline(), PROMPT, num_inference_steps=1).heatmaps
    assert unet.preset == PRESETS["default"]
    [plain] = generate(sd3(), PROMPT, seed=1, preset="columns", **STEPS).heatmaps
    assert plain.preset == PRESETS["columns"] and plain.preset.refine is None
    mean = torch.stack(every_step(sd3())).mean(0)[4:].mean(0)  # the middle step is in both halves
    torch.testing.assert_close(plain.maps.double(), mean, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_prompts_drawn_together_have_the_columns_that_each_has_alone():
    pipe, texts = sd3(), [PROMPT, "a cat"]
    [long, short] = generate(pipe, texts, seed=1, **STEPS)
    [alone] = generate(pipe, texts[1], seed=2, **STEPS)
    assert short.heatmaps.columns == alone.heatmaps.columns
    assert len(short.heatmaps.columns) < len(long.heatmaps.columns)
    assert {one.maps.shape[-1] for one in short.layers.layers.values()} == {
        len(short.heatmaps.columns)
    }
    cat, own = short.heatmaps["cat"].values, alone.heatmaps["cat"].values
    torch.testing.assert_close(cat, own, atol=0.02 * float(own.max()), rtol=0)


def test_the_default_watches_no_early_step_and_spreads_along_no_early_block():
    run = generate(sd3(), PROMPT, seed=1, **STEPS)
    assert list(run[0].layers.layers) == ["transformer_blocks.1.attn", "transformer_blocks.2.attn"]
    assert run[0].layers.passes == 2 and run.store.keep.depth is not None  # of 9 steps


@pytest.mark.parametrize("options", [{"num_inference_steps": 1}, {"sigmas": [1.0]}], ids=str)
def test_a_run_that_is_too_short_for_the_default_has_the_maps_of_its_last_step(options):
    options = {**{k: v for k, v in STEPS.items() if k != "num_inference_steps"}, **options}
    [found] = generate(sd3(), PROMPT, seed=1, **options).heatmaps
    assert found.preset == PRESETS["joint"] and bool(found["cat"].values.max() > 0)


def test_asking_reads_the_same_part_of_the_blocks_with_a_stream_for_text():
    run = generate(flux(), PROMPT, seed=1, ask="dog", **STEPS)
    assert bool(run[0].texts["asked"]["dog"].values.max() > 0)


def test_too_few_steps_for_a_preset_are_refused_before_the_model_runs():
    pipe, ran = sd3(), []
    pipe.transformer.register_forward_pre_hook(lambda *_: ran.append(1))
    message = r"num_inference_steps=4`: the preset 'seg4diff' reads the part of the run from 0.7 to"
    with pytest.raises(ValueError, match=message):
        generate(pipe, PROMPT, preset="seg4diff", **{**STEPS, "num_inference_steps": 4})
    assert not ran
