"""`MapRecorder` against a double of ComfyUI's call, and a softmax written out in float64."""

import copy

import pytest
import torch
from helpers import comfy_double as comfy
from helpers.bilinear import stretch
from helpers.tiny_tokenizers import tiny_tokenizer

from sdattn import CaptureError, read_prompt
from sdattn.comfy import MapRecorder

OVERRIDE = "optimized_attention_override"
LATENT = (10, 14)  # 10x14, 5x7 and 3x4 cells; 5x7 tokens of FLUX
LARGER = (34, 36)  # two levels of 16 cells and more, which the default preset reads
WORDS = ["<sos>", "a", "red", "cat", "<eos>", "<pad>", "<pad>"]


def watched(model, recorder):
    patcher = comfy.Patcher(model).clone()
    patcher.model_options["transformer_options"][OVERRIDE] = recorder
    return patcher


def two_conds(length=7, dtype=torch.float32, negative=None):
    prompt = comfy.Cond(0, comfy.states(1, length, dtype))
    return [prompt, comfy.Cond(1, comfy.states(2, negative or length, dtype))]


def draw(recorder, model=None, conds=None, **options):
    """Run the double with a recorder; return what its attention calls were handed."""
    x = comfy.latents(*options.pop("size", LATENT), images=options.pop("images", 1))
    return comfy.sample(
        watched(model or comfy.UNet(), recorder), x, conds or two_conds(), **options
    )


LAYOUTS = {
    "unet": (comfy.UNet(), None),
    "flux": (comfy.Flux(), (5, 7)),
    "flux without names": (comfy.Flux(named=False), (5, 7)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("in_turn", [False, True], ids=["one batch", "in turn"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_output_is_equal_and_maps_are_the_explicit_softmax(layout, in_turn, dtype):
    model, grid = LAYOUTS[layout]
    x, conds = comfy.latents(*LATENT, images=2, dtype=dtype), two_conds(dtype=dtype)
    without, _ = comfy.sample(comfy.Patcher(model), x, conds, in_turn=in_turn)
    recorder = MapRecorder(grid=grid)
    with_it, told = comfy.sample(watched(model, recorder), x, conds, in_turn=in_turn)
    assert torch.equal(with_it, without)
    for kind, branch in enumerate(("conditional", "unconditional")):
        expected = comfy.explicit_means(told, kind, grid)
        found = list(recorder.store(branch).maps.values())
        assert len(found) == len(expected) == len(model.types if grid else model.blocks)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape
            assert (ours.double() - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heatmaps_are_those_of_the_default_preset(layout):
    model, grid = LAYOUTS[layout]
    recorder = MapRecorder(grid=grid)
    _, told = draw(recorder, model, images=2, steps=2, size=LATENT if grid else LARGER)
    every = comfy.explicit_means(told, 0, grid)
    read = every if grid else every[3:]  # the way up; its grids have 16 cells and more
    finest = grid or LARGER
    assert [maps.shape[1:3] for maps in read] == ([grid] * 4 if grid else [(17, 18), LARGER])
    for image, heatmaps in enumerate(recorder.heatmaps(WORDS)):
        assert heatmaps.words == ("a", "red", "cat")
        maps = [stretch(layer[image, ..., 3].numpy(), finest) for layer in read]
        expected = torch.from_numpy(sum(maps) / len(maps))
        assert (heatmaps["cat"].map.double() - expected).abs().max() < 1e-5


def test_layers_have_the_names_and_places_of_their_blocks():
    unet, flux, counted = (MapRecorder(grid=(5, 7)) for _ in range(3))
    draw(unet)
    draw(flux, comfy.Flux())
    draw(counted, comfy.Flux(named=False))
    layers = unet.store().layers
    assert [layer.name for layer in layers[:3]] == ["input.1.0", "input.2.0", "middle.0.0"]
    assert [layer.place for layer in layers] == ["down", "down", "mid", "up", "up"]
    assert [layer.level for layer in layers] == [0, 1, 2, 1, 0]
    assert [*flux.store().maps] == ["double.0", "double.1", "single.0", "single.1"]
    assert [*counted.store().maps] == ["call.0", "call.1", "call.2", "call.3"]


def test_a_mask_takes_part():
    mask = torch.zeros(2, LATENT[0] * LATENT[1], 7)
    mask[..., 2] = -torch.inf
    recorder, model = MapRecorder(), comfy.UNet()
    model.blocks, model.levels = comfy.UNet.blocks[:1], (0,)
    _, told = draw(recorder, model, mask=mask)
    found, expected = recorder.store().maps["input.1.0"], comfy.explicit_means(told, 0)[0]
    assert (found.double() - expected).abs().max() < 1e-5
    assert not found[..., 2].any()


def test_memory_does_not_grow_with_the_steps():
    few, many = MapRecorder(), MapRecorder()
    draw(few, steps=1)
    draw(many, steps=5)
    assert few.store().nbytes == many.store().nbytes > 0
    assert len(many.store().passes) == 5


def test_an_override_that_is_there_is_called_and_its_output_returned():
    made, calls = torch.ones(1), []

    def earlier(func, *args, **kwargs):
        calls.append((func, len(args), kwargs["transformer_options"]["cond_or_uncond"]))
        return made

    recorder = MapRecorder(earlier)
    q = torch.randn(1, 6, 16)
    options = {"cond_or_uncond": [0], "activations_shape": [1, 16, 2, 3], "sigmas": made}
    given = (q, torch.randn(1, 7, 16), torch.randn(1, 7, 16), 2)
    assert recorder(comfy.plain, *given, transformer_options=options) is made
    assert calls == [(comfy.plain, 4, [0])]
    assert recorder.store().maps["call.0"].shape == (1, 2, 3, 7)


def test_clones_of_the_watched_model_record_too():
    recorder = MapRecorder()
    assert copy.deepcopy(recorder) is recorder
    comfy.sample(watched(comfy.UNet(), recorder).clone(), comfy.latents(*LATENT), two_conds())
    assert recorder.heatmaps(WORDS)


@pytest.mark.parametrize("form", ["pieces", "ids", "text", "labels"])
def test_tokens_in_each_form_name_the_columns_that_the_tokenizer_reads(form):
    tokenizer, text = tiny_tokenizer(), "a red cat, Café zebra"
    ids = tokenizer(text, padding="max_length")["input_ids"]
    given = {
        "pieces": (tokenizer.convert_ids_to_tokens(ids),),
        "ids": (ids, tokenizer),
        "text": (text, tokenizer),
        "labels": ({"cat": [6], "café": [8, 9]},),
    }
    recorder = MapRecorder()
    draw(recorder, conds=two_conds(77))
    heatmaps = recorder.heatmaps(*given[form])[0]
    if form == "labels":
        assert heatmaps["cat"].columns == (6,)
        return
    right = read_prompt(tokenizer, text)
    assert [heatmaps[w].columns for w in ("cat", "café", "zebra")] == [
        *right.find("cat"),
        *right.find("café"),
        *right.find("zebra"),
    ]
    assert heatmaps["<sos>"].columns == (0,)
    assert heatmaps["<eos>"].columns == tuple(right.find("<eos>")[0])


def test_a_long_prompt_has_the_chunks_one_after_the_other():
    chunk = ["<|startoftext|>", *["on</w>"] * 74, "cat</w>", "<|endoftext|>"]
    recorder = MapRecorder()
    draw(recorder, conds=two_conds(154))
    assert recorder.heatmaps([*chunk, *chunk])[0]["cat"].columns == (75, 152)
    with pytest.raises(ValueError, match="77 tokens"):
        recorder.heatmaps(chunk)  # the second chunk is another text


def test_a_text_that_is_repeated_for_a_longer_one_counts_every_time():
    batched, alone = MapRecorder(), MapRecorder()
    draw(batched, conds=two_conds(7, negative=14), steps=1)
    draw(alone, conds=two_conds(7, negative=14), steps=1, in_turn=True)
    assert batched.store().n_text == 14
    assert alone.store().n_text == 7
    found, expected = batched.heatmaps(WORDS)[0]["cat"], alone.heatmaps(WORDS)[0]["cat"]
    assert found.columns == (3, 10)
    assert (found.map - expected.map).abs().max() < 1e-5


def test_another_number_of_tokens_is_refused():
    recorder = MapRecorder()
    draw(recorder)
    for tokens in (WORDS[:5], [*WORDS, "<pad>"], [*WORDS, *WORDS]):
        with pytest.raises(ValueError, match="7 columns"):
            recorder.heatmaps(tokens)


def test_a_new_run_replaces_the_last():
    once, twice = MapRecorder(), MapRecorder()
    draw(twice, conds=two_conds(9))
    draw(twice)
    draw(once)
    assert len(twice.store().passes) == 3
    assert torch.equal(twice.heatmaps(WORDS)[0].maps, once.heatmaps(WORDS)[0].maps)


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_run_of_one_step_replaces_the_last(in_turn):
    recorder = MapRecorder()
    for _ in range(2):
        draw(recorder, steps=1, in_turn=in_turn)
    assert len(recorder.store().passes) == 1


def test_an_error_of_the_last_run_is_gone_with_the_next():
    recorder = MapRecorder()
    draw(recorder, conds=[comfy.Cond(2, comfy.states(3, 7))])
    with pytest.raises(CaptureError, match="cond_or_uncond"):
        recorder.heatmaps(WORDS)
    draw(recorder, conds=[*two_conds(), comfy.Cond(0, comfy.states(3, 7))])
    with pytest.raises(CaptureError, match="conditionings"):
        recorder.heatmaps(WORDS)
    draw(recorder)
    assert recorder.heatmaps(WORDS)


@pytest.mark.parametrize("in_turn", [False, True])
def test_several_conditionings_are_refused_where_maps_are_read(in_turn):
    recorder = MapRecorder()
    combined = [*two_conds(), comfy.Cond(0, comfy.states(3, 7))]
    x, _ = draw(recorder, conds=combined, in_turn=in_turn)
    without, _ = comfy.sample(
        comfy.Patcher(comfy.UNet()), comfy.latents(*LATENT), combined, in_turn=in_turn
    )
    assert torch.equal(x, without)
    with pytest.raises(CaptureError, match="conditionings"):
        recorder.heatmaps(WORDS)


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_second_call_for_a_branch_in_a_step_is_refused(in_turn):
    """Perturbed-attention guidance calls the model again for the prompt."""
    recorder = MapRecorder()
    draw(recorder, in_turn=in_turn, again=True)
    with pytest.raises(CaptureError, match="twice"):
        recorder.heatmaps(WORDS)


def test_a_text_that_changes_inside_the_run_is_refused():
    recorder = MapRecorder()
    patcher, x = watched(comfy.UNet(), recorder), comfy.latents(*LATENT)
    comfy.sample(patcher, x, two_conds(), steps=1)
    comfy.sample(patcher, x, two_conds(), steps=1, start=2.0)
    with pytest.raises(CaptureError, match="conditionings"):
        recorder.heatmaps(WORDS)


def test_what_was_not_seen_is_said():
    recorder = MapRecorder()
    with pytest.raises(CaptureError, match="cross-attention call was seen"):
        recorder.heatmaps(WORDS)
    draw(recorder, comfy.Flux())  # its grid is not known
    with pytest.raises(CaptureError, match="grid="):
        recorder.heatmaps(WORDS)
    draw(recorder, conds=two_conds()[:1])
    assert recorder.heatmaps(WORDS)
    with pytest.raises(CaptureError, match="unconditional"):
        recorder.heatmaps(WORDS, branch="unconditional")
    with pytest.raises(ValueError, match="branch"):
        recorder.store("negative")


def test_another_grid_than_was_named_is_refused_and_the_run_goes_on():
    recorder = MapRecorder(grid=(5, 7))
    draw(recorder)
    q, k = torch.randn(1, 99, 16), torch.randn(1, 7, 16)
    options = {"cond_or_uncond": [0], "sigmas": torch.ones(1), "block_type": "block"}
    other = MapRecorder(grid=(5, 7))
    assert other(comfy.plain, q, k, k, 2, transformer_options=options).shape == q.shape
    with pytest.raises(CaptureError, match="99 queries"):
        other.store()
    assert recorder.store()


def test_a_broken_call_costs_the_maps_and_not_the_image():
    recorder = MapRecorder()
    out = recorder(lambda *_, **__: "image", torch.ones(1, 6, 15), None, None, 2)
    assert out == "image"
    with pytest.raises(CaptureError, match="NoneType"):
        recorder.store()
