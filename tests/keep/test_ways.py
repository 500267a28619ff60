"""Ways of running a pipeline that people really use, beyond those of the matrix."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_flux import (
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
)
from helpers.matrix import ROWS, WAYS, few_are_quick
from helpers.matrix_oracle import expected_maps, recorded
from helpers.rounding import rounding
from helpers.tiers import tiered
from helpers.tiny_pipelines import small_pipeline
from helpers.transformer_rows import flux, klein, qwen_image
from helpers.unet_rows import ip_adapter, learned_token, with_image_prompts

import sdattn
from sdattn import CaptureError, CaptureWarning, capture
from sdattn.models.denoiser import find_denoiser

NAMED = {row.name: row for row in ROWS}
PROMPT = "a red cat"
MID = "mid_block.attentions.0.transformer_blocks.0.attn2"


def run(pipe, prompt=PROMPT, **options):
    settings = {"num_inference_steps": 2, "output_type": "np", "height": 128, "width": 128}
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt=prompt, generator=generator, **{**settings, **options}).images


# -- several images, several prompts --------------------------------------------------------------

# Of several prompts with several images each, diffusers 0.42 gives images each other's text masks
# in these.
MIXED_MASKS = ("Qwen-Image", "Sana", "Lumina 2", "HunyuanDiT", "HunyuanImage 2.1", "LTX-Video")
MIXED_MASKS += ("Mochi",)
ONE_NEGATIVE = ("LongCat-Image",)  # encodes one negative prompt for all prompts
# Texts are filled up to the batch's longest, and the filling is attended to; pooled states are
# mixed up as masks are above.
FILLED_TO_LONGEST = ("Kandinsky 5",)
# The image's positions follow the batch's longest text, so the model draws another image.
FILLED_TO_LONGEST += ("Qwen-Image 2.1",)
# Each prompt has a call of a text encoder of its own, so that which was drawn is not known.
UNKNOWN_PROMPT = ("HunyuanVideo 1.5, quoted text",)
UNSEEDED = ("CogView4, control",)  # draws the control's latents without the call's generator
UNSEEDED += ("LDM3D",)  # its images need a Pillow before 13
GIVEN = {"image", "image_latents", "video", "control_video"}


def layout(row):
    """How the row's calls hold their images: the facts by which they are told apart."""
    held = row.n_text is None, row.lengths is None, row.row_by_row, row.filled, row.text_last
    return row.joint, row.frames is None, row.in_turn, row.twice, *held


# Rows that take an image draw nothing from text alone; others make one at a time.
BLANK = SimpleNamespace(guider=SimpleNamespace())  # a pipeline, as far as options change one


def is_from_text(row):
    try:
        return not GIVEN & row.options(BLANK, row.fitted(WAYS[0])).keys()
    except pytest.skip.Exception:  # of a class that this diffusers lacks
        return False


FROM_TEXT = [
    row
    for row in ROWS
    if is_from_text(row) and row.name not in UNSEEDED and (row.batched or row.images_option)
]
# Two of each layout; test_matrix.py runs every row with several prompts.
ALIKE = [[row for row in FROM_TEXT if layout(row) == one] for one in {*map(layout, FROM_TEXT)}]
OF_EACH_LAYOUT = sorted((row for rows in ALIKE for row in rows[:2]), key=FROM_TEXT.index)


def of_separate_images(row):
    """A way of several prompts and images in which the row's pipeline keeps images apart."""
    way = row.fitted(WAYS[1])
    if row.name.startswith(FILLED_TO_LONGEST):
        return replace(way, prompts=1)
    return replace(way, images=1) if row.name.startswith(MIXED_MASKS + ONE_NEGATIVE) else way


def heatmaps_of(row, pipe, prompts, seed, images, **options):
    """Of each image, whose noise is drawn with the next seed."""
    if row.frames is None:
        return sdattn.generate(pipe, prompts, seed=seed, **options).heatmaps
    options.pop("preset")  # the default is the default here too
    noise = [torch.Generator().manual_seed(seed + i) for i in range(images)]
    with capture(pipe) as store:
        pipe(prompt=prompts, generator=noise, output_type="latent", **options)
    if row.name in UNKNOWN_PROMPT:
        return sdattn.heatmaps(store, pipe, prompts, **options)
    return store.heatmaps()


@pytest.mark.parametrize("row", few_are_quick(OF_EACH_LAYOUT), ids=str)
@pytest.mark.slow
def test_a_batch_is_its_images_one_by_one(row):
    pipe = row.make()
    way = of_separate_images(row)
    options = {**row.options(pipe, way), "num_inference_steps": 2}
    prompts = options.pop("prompt", ["a red cat", "dog, dog and cat"][: way.prompts])
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if options.get("negative_prompt", "") is None or row.in_turn:
        options.pop("negative_prompt", None)
    more = {row.images_option: way.images} if way.images > 1 else {}
    # sharpened, maps of random weights, which are nearly flat, would show how batches round
    options["preset"] = "columns" if row.joint else "default"
    together = heatmaps_of(row, pipe, prompts, 3, way.total, **options, **more)
    assert len(together) == way.total
    for i in range(way.total):
        prompt = prompts[i // way.images]
        alone = heatmaps_of(row, pipe, prompt, 3 + i, 1, **options)
        assert alone[0].words == together[i].words
        for word in alone[0]:
            found, one = together[i][word].values, alone[0][word].values
            torch.testing.assert_close(found, one, atol=2e-5, rtol=1e-3)


# -- negative prompts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    tiered(
        ["Stable Diffusion 1.x", "Stable Diffusion 3", "FLUX.1", "Sana", "SDXL", "Qwen-Image"],
        quick=2,
    ),
)
@pytest.mark.slow
def test_negative_prompts_have_heatmaps_with_their_own_words(name, tmp_path):
    row = NAMED[name]
    pipe, way = row.make(), row.fitted(WAYS[0])
    options = {**row.options(pipe, way), "negative_prompt": "dog, dog", "num_inference_steps": 2}
    plain = {"preset": "columns" if row.joint else "default"}  # which capture() keeps below
    both = sdattn.generate(pipe, PROMPT, capture_options={"branch": "both"}, **plain, **options)
    assert both.negative_heatmaps[0].words == ("dog", ",", "dog")
    assert both.heatmaps[0].words == ("a", "red", "cat")
    folder = both.save(tmp_path / "run")[0]
    drawn = sorted(path.name for path in (folder / "negative" / "heatmaps").iterdir())
    assert drawn == ["01-dog.png", "02-sign.png", "03-dog.png"]
    assert sdattn.load_run(folder).heatmaps.words == ("a", "red", "cat")
    # the same as each branch by itself, whose products are calls of fewer rows
    near = {"rtol": rounding(600), "atol": 0}  # more products than a head's width and all tokens
    one = sdattn.generate(pipe, PROMPT, **plain, **options)
    for word in one.heatmaps[0]:
        found = both.heatmaps[0][word].values
        torch.testing.assert_close(found, one.heatmaps[0][word].values, **near)
    given = {**options, "prompt": PROMPT, "generator": [torch.Generator().manual_seed(0)]}
    with capture(pipe, branch="unconditional", steps=(0.5, 1.0)) as store:
        pipe(**given)
    [negative] = sdattn.heatmaps(store, pipe, "dog, dog", **row.options(pipe, way))
    for word in negative:
        found = both.negative_heatmaps[0][word].values
        torch.testing.assert_close(found, negative[word].values, **near)


@pytest.mark.parametrize("make", tiered([flux, klein, qwen_image], quick=2))
@pytest.mark.slow
def test_negative_prompts_of_pipelines_that_run_in_turn(make):
    pipe = make()
    options = {"negative_prompt": "dog, dog, dog", "true_cfg_scale": 4.0}
    options = {"guidance_scale": 4.0} if make is klein else options
    row = next(row for row in ROWS if row.make is make)
    model = find_denoiser(pipe).model
    with recorded(model) as record:
        run(pipe, **options)
    with capture(pipe) as positive, capture(pipe, branch="unconditional") as negative:
        run(pipe, **options)
    assert len(positive.passes) == len(negative.passes) == 2
    for name, calls in record.items():
        for store, own in ((positive, calls[::2]), (negative, calls[1::2])):
            unguided = replace(WAYS[0], guided=False)
            found_text = replace(row, n_text=store.n_text)
            expected = expected_maps(own, len(own), found_text, unguided)
            found = store.maps[name].flatten(1, 2).double()
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    if make is not klein:
        [found] = sdattn.heatmaps(negative, pipe, "dog, dog, dog")
        assert found.words == ("dog", ",", "dog", ",", "dog")
    with pytest.raises(ValueError, match="two captures"), capture(pipe, branch="both"):
        pass


def test_a_bare_model_that_runs_both_in_turn_is_noticed():
    pipe = flux()
    with pytest.warns(CaptureWarning, match="timestep"):
        with capture(pipe.transformer):
            run(pipe, negative_prompt="dog", true_cfg_scale=4.0)
    with capture(pipe.transformer) as store:  # a run of one branch is as it should be
        run(pipe)
    assert len(store.passes) == 2


# -- text states in place of text, long prompts ---------------------------------------------------


def encode(pipe, ids):
    with torch.no_grad():
        return pipe.text_encoder(torch.tensor(ids))[0]


def test_text_states_come_with_labels():
    pipe = small_pipeline()
    states, negative = torch.randn(2, 1, 30, 32, generator=torch.Generator().manual_seed(1))
    with capture(pipe) as store:
        run(pipe, None, prompt_embeds=states, negative_prompt_embeds=negative)
    [found] = sdattn.heatmaps(store, pipe, {"cat": [2], "red dog": [4, 5]})
    assert found.words == ("cat", "red dog")
    assert torch.equal(found["red dog"].values, found[4].values + found[5].values)
    assert found.maps.shape[-1] == 30
    with pytest.raises(ValueError, match="columns"):
        sdattn.heatmaps(store, pipe, PROMPT)


def test_prompts_of_more_than_77_tokens():
    """As compel lays them out: chunks of 75 tokens, each with its own start and end."""
    pipe = small_pipeline()
    words = ["cat", "dog", "red"] * 30  # 90 words of one token each
    ids = pipe.tokenizer(" ".join(words), add_special_tokens=False, verbose=False)["input_ids"]
    assert len(ids) == 90
    start, end = pipe.tokenizer.bos_token_id, pipe.tokenizer.eos_token_id
    chunks = [ids[:75], ids[75:]]
    rows = [[start, *chunk, *[end] * (76 - len(chunk))] for chunk in chunks]
    states = torch.cat([encode(pipe, [row]) for row in rows], dim=1)
    assert states.shape == (1, 154, 32)
    with capture(pipe) as store:
        run(pipe, None, prompt_embeds=states, negative_prompt_embeds=torch.zeros(1, 154, 32))
    for given in (pipe, pipe.tokenizer):
        [found] = sdattn.heatmaps(store, given, " ".join(words))
        assert found.words == tuple(words)
        columns = [one.columns for one in found.occurrences()]
        assert columns == [(i + 1,) for i in range(75)] + [(i + 78,) for i in range(15)]


def test_learned_tokens_of_several_vectors_are_one_word():
    pipe = learned_token()
    found = sdattn.generate(
        pipe, "a red <cat-toy>, cat", num_inference_steps=1, height=128, width=128
    ).heatmaps[0]
    assert found.words == ("a", "red", "<cat-toy>", ",", "cat")
    spelled = [found.prompt.tokens[i].text for i in found["<cat-toy>"].columns]
    assert spelled == ["<cat-toy>", "<cat-toy>_1", "<cat-toy>_2"]


def test_image_prompts_have_columns_of_their_own_also_of_an_adapter_that_is_off():
    pipe = ip_adapter(2)()
    options = with_image_prompts(2)(pipe, WAYS[0])
    pipe.set_ip_adapter_scale([0.0, 0.7])
    with capture(pipe) as store:
        run(pipe, **{name: options[name] for name in options if "ip" in name})
    [found] = sdattn.heatmaps(store, pipe, PROMPT)
    # two adapters, with two images of four tokens each
    assert found.maps.shape[-1] == 77 + 16
    assert [found[f"<image {i}>"].columns for i in (1, 16)] == [(77,), (92,)]
    text, off, on = found.maps[..., :77], found.maps[..., 77:85], found.maps[..., 85:]
    for one in (text, on):
        torch.testing.assert_close(one.sum(-1), torch.ones(one.shape[:-1]))
    assert not off.any()


def test_image_prompts_with_masks_stand_in_their_order():
    """Each image has a softmax of its own; scaled_dot_product_attention sees text, then images."""
    pipe = ip_adapter(1)()
    options = with_image_prompts(1)(pipe, WAYS[0])
    masks = torch.zeros(1, 2, 128, 128)
    masks[:, 0, :, :64], masks[:, 1, :, 64:] = 1, 1
    given = {name: options[name] for name in options if "ip" in name}
    given |= {"cross_attention_kwargs": {"ip_adapter_masks": [masks]}, "num_inference_steps": 1}
    pipe.set_ip_adapter_scale([[0.5, 0.9]])
    with recorded(pipe.unet) as record:
        run(pipe, **given)
    with capture(pipe) as store:
        run(pipe, **given)
    for name, found in store.maps.items():
        text, *images = [probs[1:].mean(1) for probs in record[name]]
        assert [one.shape[-1] for one in (text, *images)] == [77, 4, 4]
        assert (images[0] - images[1]).abs().max() > 1e-3
        expected = torch.cat([text, *images], dim=-1)
        torch.testing.assert_close(found.flatten(1, 2).double(), expected, atol=1e-5, rtol=0)


def test_a_softmax_over_words_leaves_image_prompts_as_they_are():
    pipe = ip_adapter(2)()
    options = with_image_prompts(2)(pipe, WAYS[0])
    embeds = {name: options[name] for name in options if "ip" in name}
    with capture(pipe, among=[[0, 1, 2]]) as some, capture(pipe) as whole:
        run(pipe, **embeds)
    for name in whole.maps:
        text, images = some.maps[name][..., :77], some.maps[name][..., 77:]
        torch.testing.assert_close(images, whole.maps[name][..., 77:])
        torch.testing.assert_close(text.sum(-1), torch.ones(text.shape[:-1]))
        assert not text[..., 3:].any()


# -- memory and speed savers ----------------------------------------------------------------------


ON_A_GPU = {
    "xformers": lambda pipe: pipe.to("cuda").enable_xformers_memory_efficient_attention(),
    "sequential offload": lambda pipe: pipe.enable_sequential_cpu_offload(),
}


@pytest.mark.parametrize("saver", ON_A_GPU)
def test_savers_that_need_a_gpu_change_nothing(saver):
    if saver == "xformers":
        pytest.importorskip("xformers", reason="xformers is not installed")
    if not torch.cuda.is_available():
        pytest.skip(f"{saver} needs a GPU, and there is none")
    pipe = small_pipeline()
    ON_A_GPU[saver](pipe)
    plain = run(pipe)
    with capture(pipe) as store:
        watched = run(pipe)
    assert (plain == watched).all()
    assert len(store.maps) == 16


# -- ends that come early -------------------------------------------------------------------------


# -- more than one at a time ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "makers",
    [(small_pipeline, lambda: small_pipeline(max_length=20)), (flux, qwen_image)],
    ids=["cross", "joint"],
)
def test_two_pipelines_in_two_threads(makers):
    pipes = [make() for make in makers]
    alone, found = [], [None, None]
    for pipe in pipes:
        with capture(pipe) as store:
            run(pipe)
        alone.append(dict(store.maps))

    def work(i):
        with capture(pipes[i]) as store:
            run(pipes[i])
        found[i] = dict(store.maps)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert all(torch.equal(found[i][name], maps) for name, maps in alone[i].items())


# -- models that run their layers in ways of their own -------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["mean", "all"])
def test_gradient_checkpointing_adds_nothing_twice(steps):
    unet = small_pipeline().unet.train()
    inputs = [torch.randn(1, 4, 16, 16), torch.randn(1, 77, 32)]

    def maps():
        with capture(unet, steps=steps) as store:
            for timestep in (5, 3):
                unet(inputs[0], timestep, inputs[1]).sample.square().mean().backward()
        assert store.nbytes == store.expected_nbytes * (2 if steps == "all" else 1)
        return dict(store.maps)

    plain = maps()
    unet.enable_gradient_checkpointing()
    for name, one in maps().items():
        torch.testing.assert_close(one, plain[name])


def test_a_second_run_of_another_branch_is_a_second_run():
    pipe = flux()
    with pytest.raises(CaptureError, match="second run"):
        with capture(pipe, branch="unconditional"):
            run(pipe, num_inference_steps=1)
            run(pipe, num_inference_steps=1, negative_prompt="dog", true_cfg_scale=4.0)


# -- options that would pass in silence -----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"true_cfg_scale": 3.0}, "has no option 'true_cfg_scale'"),
        ({"negative_prompt": "dog", "guidance_scale": 1.0}, "guidance_scale.*1"),
        ({"num_inference_steps": "3"}, "num_inference_steps='3'.*pass 1 to 1000"),
        ({"num_inference_steps": np.float64(2)}, r"num_inference_steps=(np.float64\()?2.0"),
        ({"height": "a"}, "height='a'"),
        ({"words": "cat"}, "pass a list of words"),
        ({"words": []}, "pass a list of words"),
        ({"capture_options": {"steps": [0, 0]}}, "each once"),
        ({"capture_options": {"tokens": [1.5]}}, "pass token columns"),
    ],
)
def test_options_that_would_pass_in_silence(options, message):
    pipe = small_pipeline()
    pipe.unet.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        sdattn.generate(pipe, PROMPT, **options)


def test_chosen_words_leave_the_negative_prompt_whole():
    options = {"negative_prompt": "dog, dog and cat", "num_inference_steps": 1}
    both = sdattn.generate(
        small_pipeline(), PROMPT, words=["red"], capture_options={"branch": "both"}, **options
    )
    assert both.heatmaps[0].words == ("red",)
    assert both.negative_heatmaps[0].words == ("dog", ",", "dog", "and", "cat")


def test_no_prompt_is_no_prompt():
    pipe = small_pipeline()
    with capture(pipe) as store:
        run(pipe)
    with pytest.raises(ValueError, match="0 prompt.*1 image"):
        sdattn.heatmaps(store, pipe, [])


# -- what cannot be, by name ----------------------------------------------------------------------


def test_a_processor_that_hides_joint_attention_is_named():
    pipe = flux()

    class Hiding:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, *_):
            return hidden_states, encoder_hidden_states

    pipe.transformer.transformer_blocks[0].attn.processor = Hiding()
    with pytest.raises(RuntimeError, match="processor Hiding"):
        with capture(pipe):
            run(pipe)


class Twice(FluxAttnProcessor):
    """Attends to nothing first."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
        states = [hidden_states, encoder_hidden_states]
        super().__call__(attn, *(one if one is None else one * 0 for one in states), *args)
        return super().__call__(attn, *states, *args, **kwargs)


class ImageOnly(FluxAttnProcessor):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
        query = torch.zeros(1, 2, hidden_states.shape[1] - 1, 16)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        return super().__call__(attn, hidden_states, encoder_hidden_states, *args, **kwargs)


def test_only_the_attention_to_all_tokens_counts():
    pipe = flux()
    with capture(pipe) as store:
        run(pipe)
    expected = dict(store.maps)
    layer = pipe.transformer.transformer_blocks[0].attn
    layer.processor = ImageOnly()
    with capture(pipe) as store:
        run(pipe)
    assert all(torch.equal(store.maps[name], one) for name, one in expected.items())
    layer.processor = Twice()
    with pytest.raises(RuntimeError, match="processor Twice"), capture(pipe):
        run(pipe)


def test_image_prompts_of_joint_attention_are_told():
    pipe = flux()
    processor = FluxIPAdapterAttnProcessor(32, 32, num_tokens=(4,))
    pipe.transformer.transformer_blocks[0].attn.set_processor(processor)
    with pytest.warns(CaptureWarning, match="joint attention"):
        with pytest.raises(ZeroDivisionError), capture(pipe):
            1 / 0  # noqa: B018


def test_free_init_is_named():
    pipe = NAMED["AnimateDiff"].make()
    pipe.enable_free_init(num_iters=2, use_fast_sampling=False)
    with pytest.raises(CaptureError, match="FreeInit.*schedule"):
        with capture(pipe):
            pipe("a cat", num_frames=4, num_inference_steps=2, height=64, width=64)


def test_layers_that_cannot_be_captured_are_listed_but_not_chosen():
    sana, video = NAMED["Sana"].make(), NAMED["AnimateDiff"].make()
    for pipe, kind in ((sana, "linear"), (video, "temporal")):
        layers = find_denoiser(pipe).layers
        assert kind in {layer.kind for layer in layers}
        with pytest.raises(ValueError, match="pass a tuple of"), capture(pipe, kinds=(kind,)):
            pass
