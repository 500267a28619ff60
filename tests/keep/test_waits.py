"""While the model runs, capture reads nothing back from its device after the first pass of a run.

On torch's meta device a read raises. On the CPU the operations are counted that would be reads.
"""

import pytest
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel
from helpers.joint_models import inputs
from helpers.matrix import ROWS, few_are_quick
from helpers.reads import Reads, copies_after_the_first, reads_by_call
from helpers.rows import Way
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_scheduler, make_small_unet
from helpers.tiny_tokenizers import tiny_tokenizer
from helpers.transformer_rows import flux, klein, sd3
from PIL import Image

import sdattn
from sdattn import AttentionStore, CaptureError, capture
from sdattn.attention.plain import add_share, add_softmax
from sdattn.control.removal import Removal, without_columns
from sdattn.edit import (
    AttentionRefine,
    AttentionReplace,
    AttentionReweight,
    LocalBlend,
    register_attention_control,
)
from sdattn.models.denoiser import find_denoiser
from sdattn.models.denoiser_call import Timestep
from sdattn.models.running_call import Caller
from sdattn.prompts.tokens import read_prompt

NAMED = {row.name: row for row in ROWS}
PROMPTS = ["a red cat", "a red dog"]


@pytest.fixture(autouse=True)
def no_kernel_of_the_cpu(monkeypatch):
    """Which hands out its logsumexp, so that capture may look at it: no other device has it."""
    monkeypatch.setattr("sdattn.look.sdpa.backend_with_logsumexp", lambda _call: 0)


# -- the meta device ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sd15():
    """SD 1.5's UNet at its full size, without weights."""
    with torch.device("meta"):
        return UNet2DConditionModel(sample_size=64, cross_attention_dim=768).eval()


def meta_inputs(rows):
    with torch.device("meta"):
        return torch.empty(rows, 4, 64, 64), torch.empty(rows, 77, 768)


KEPT = {
    "mean": {},
    "last": {"steps": "last"},
    "all": {"steps": "all", "heads": "all"},
    "chosen": {"steps": [0, 1], "heads": [1, 3], "tokens": [2, 5]},
    "half": {"dtype": torch.float16},
    "among": {"among": [[1, 2, 5]]},
    "cells": {"queries": [(3, 60), (63, 0)]},
    "self": {"kinds": ("cross", "self"), "layers": ["mid"]},
}


@torch.no_grad()
@pytest.mark.parametrize("kept", tiered(KEPT, quick=2))
@pytest.mark.slow
def test_nothing_is_read_of_sd15_on_the_meta_device(sd15, kept):
    """Nor in the first of the two calls."""
    sample, text = meta_inputs(2)
    with capture(sd15, **KEPT[kept]) as store:
        for timestep in (801, 401):
            sd15(sample, torch.tensor(timestep, device="meta"), text)
    assert len(store.maps) == (2 if kept == "self" else 16)
    assert all(maps.device.type == "meta" for maps in store.maps.values())
    with pytest.raises(RuntimeError):  # there is no value, so that none was looked at
        print(store.timesteps)


@torch.no_grad()
@pytest.mark.parametrize(
    ("steps", "kept"), tiered([((0.5, 1.0), [1]), ("last", [1]), ((0.0, 1.0), [0, 1])])
)
@pytest.mark.parametrize("branch", tiered(["conditional", "both"]))
@pytest.mark.slow
def test_a_part_of_the_schedule_is_kept_without_a_look_at_the_timestep(sd15, steps, kept, branch):
    """The pipeline reckons with its timestep; the scheduler knows how far it is."""
    parts = ("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    scheduler = EulerDiscreteScheduler.from_config(make_scheduler().config)
    pipe = StableDiffusionPipeline(
        unet=sd15, scheduler=scheduler, **dict.fromkeys(parts), requires_safety_checker=False
    )
    scheduler.set_timesteps(2)
    sample, text = meta_inputs(2)
    with capture(pipe, steps=steps, branch=branch, guidance="batch") as store:
        for timestep in scheduler.timesteps:
            scheduler.scale_model_input(sample, timestep)
            output = sd15(sample, timestep.to("meta"), text).sample
            scheduler.step(output, timestep, sample)
    if steps != "last":
        assert [i for i in range(2) if store.keeps(i)] == kept
    assert [one.position for one in store.passes] == [0.25, 0.75]
    assert len(store.maps) == 16
    assert store.images == (2 if branch == "both" else 1)


CONTROLS = {
    "store": lambda prompts: AttentionStore(),
    "replace": lambda prompts: AttentionReplace(prompts, 2, 1.0, 1.0),
    "refine": lambda prompts: AttentionRefine(prompts, 2, {"dog": (0.0, 0.5)}, 1.0),
    "reweight": lambda prompts: AttentionReweight(
        prompts, 2, 1.0, 1.0, {"dog": 2.0}, controller=AttentionReplace(prompts, 2, 1.0, 1.0)
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", tiered(CONTROLS, quick=0))
def test_our_controllers_read_nothing_and_copy_once(kind):
    with torch.device("meta"):
        unet = make_pipeline().unet.to("meta")
        given = torch.empty(4, 4, 16, 16), torch.tensor(5), torch.empty(4, 77, 32)
    control = CONTROLS[kind]([read_prompt(tiny_tokenizer(), text) for text in PROMPTS])
    with register_attention_control(unet, control):
        assert copies_after_the_first(lambda: unet(*given)) == 0
    assert control.cur_step == 2


# -- what the host knows, copied to the device once ------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    """A call of a small UNet on the meta device."""
    pipe = make_pipeline(unet=make_small_unet().to("meta"))
    with torch.device("meta"):
        given = torch.empty(3, 4, 16, 16), torch.tensor(5), torch.empty(3, 77, 32)
    return pipe, lambda: pipe.unet(*given)


CHOSEN = {
    "columns": {"tokens": [5, 2]},
    "columns of heads": {"tokens": [5, 2], "heads": "all", "steps": "last"},
    "heads": {"heads": [1, 0], "kinds": ("cross", "self")},
    "a softmax over some columns": {"among": [[1, 5], [2], [3, 4]]},
    "another text": {"text_states": torch.zeros(1, 7, 32), "tokens": [2]},
}


@torch.no_grad()
@pytest.mark.parametrize("chosen", tiered(CHOSEN))
@pytest.mark.slow
def test_what_is_chosen_is_copied_to_the_device_once(tiny, chosen):
    pipe, call = tiny
    with capture(pipe.unet, **CHOSEN[chosen]):
        assert copies_after_the_first(call) == 0


@torch.no_grad()
@pytest.mark.parametrize("options", tiered([{"heads": [1, 0]}, {}, {"heads": "all"}]), ids=str)
@pytest.mark.slow
def test_columns_of_joint_attention_are_copied_once(options):
    model = sd3().transformer
    given = {name: part.to("meta") for name, part in inputs("SD3", model).items()}
    model.to("meta")
    with capture(model, tokens=[3, 1], **options):
        found = copies_after_the_first(lambda: model(**given))
    assert found == copies_after_the_first(lambda: model(**given))


@torch.no_grad()
@pytest.mark.parametrize(
    "options", tiered([{}, {"heads": "all"}, {"among": [[1, 5]]}], quick=2), ids=str
)
@pytest.mark.slow
def test_rows_that_are_not_in_a_row_are_copied_once(tiny, options, monkeypatch):
    """InstructPix2Pix has the prompt first and the negative prompt last."""
    pipe, call = tiny
    order = "conditional", None, "unconditional"
    monkeypatch.setattr(
        "sdattn.follow.pass_reader.caller_of", lambda pipe: Caller("the pipeline", pipe, 1, {})
    )
    monkeypatch.setattr("sdattn.follow.pass_reader.GuidanceWatch.order", lambda *_: order)
    with capture(pipe, branch="both", **options) as store:
        assert copies_after_the_first(call) == 0
    assert store.passes[0].kept == (2, 0)


def test_columns_are_copied_once_where_there_is_no_kernel():
    query, key, mask = (torch.empty(2, 3, n, 8, device="meta") for n in (4, 5, 5))
    mask, of_rows = mask[:, :1, None, :, 0], query[..., 0]
    total = torch.empty(2, 4, 2, device="meta")

    def call():
        add_softmax(total, query, key, mask, 1.0, [3, 1])
        add_share(total, query, key, mask, 1.0, of_rows, [3, 1])

    assert copies_after_the_first(call) == 0


@torch.no_grad()
def test_the_words_of_a_local_blend_are_copied_once():
    prompts = [read_prompt(tiny_tokenizer(), text) for text in PROMPTS]
    blend = LocalBlend(prompts, ["cat", "dog"], 1, subtract=["red", "red"], start=0.0)
    store = {"up_cross": [torch.empty(4, 64, 77, device="meta")]}
    latents = torch.empty(2, 4, 16, 16, device="meta")
    assert copies_after_the_first(lambda: blend(latents, store)) == 0


def test_columns_that_are_taken_away_are_copied_once():
    probs = torch.empty(2, 4, 77, device="meta")
    assert copies_after_the_first(lambda: without_columns(probs, (2, 3))) == 0


def test_the_count_sees_what_would_be_copied():
    there, index = torch.empty(3, 4, device="meta"), torch.tensor([2, 0])
    for look in (
        lambda: there[:, [2, 0]],
        lambda: there[index],
        lambda: there * torch.tensor([1.0, 2.0], device="meta").sum(),
        lambda: index.to("meta"),
        lambda: torch.empty(2, device="meta").copy_(index),
        lambda: torch.tensor(1.0).to("meta"),
    ):
        assert copies_after_the_first(look) == 1
    known = torch.tensor([2, 0], device="meta")

    def numbers():
        return there[1:].index_select(0, known[:1]).add(torch.tensor(1.0))

    assert copies_after_the_first(numbers) == 0


# -- whole runs, counted --------------------------------------------------------------------------

# Not HunyuanDiT, whose pipeline reads each timestep itself and hands on a copy.
FAMILIES = (
    "Stable Diffusion 1.x", "SDXL", "InstructPix2Pix", "PAG", "IP-Adapter", "LoRA", "AnimateDiff",
    "Heun scheduler (second order)", "image to image", "Stable Diffusion 3",
    "Stable Diffusion 3, second-order scheduler", "FLUX.1", "FLUX.1, image to image",
    "FLUX.1 Kontext", "FLUX.2", "FLUX.2 klein", "Qwen-Image", "PixArt Sigma", "Sana", "Z-Image",
    "Lumina 2", "CogView3-Plus", "CogView4", "Krea 2", "Chroma", "AuraFlow", "Bria", "HiDream-I1",
    "Ovis-Image",
    "ERNIE-Image", "LongCat-Image", "HunyuanImage 2.1", "Kandinsky 5", "Wan 2.1",
    "Wan 2.1, from an image", "Wan 2.2, from an image", "Wan 2.2 5B", "Wan 2.2 5B, from an image",
    "SkyReels V2", "LTX-Video", "LTX-2", "LTX-2, from an image", "CogVideoX", "HunyuanVideo",
    "HunyuanVideo 1.5",
    "Mochi",
)  # fmt: skip
SMALL = Way(size=(64, 96))


def run(row, pipe, **options):
    way = row.fitted(SMALL)
    steps = 2 * row.options(pipe, way).get("num_inference_steps", 2)
    return row.run(pipe, way, num_inference_steps=steps, **options)


@pytest.mark.parametrize("name", few_are_quick(FAMILIES))
@pytest.mark.slow
def test_no_more_is_read_after_the_first_pass_than_without_capture(name):
    row = NAMED[name]
    pipe = row.make()
    model = find_denoiser(pipe).model
    with reads_by_call(model) as plain:
        expected = run(row, pipe)
    with capture(pipe, steps=(0.0, 1.0)) as store, reads_by_call(model) as watched:
        assert (run(row, pipe) == expected).all()
    assert len(plain) == len(watched) >= 3
    assert watched[1:] == plain[1:]
    # and yet all is known: each pass and its place are those that its timestep tells
    schedule = pipe.scheduler.timesteps.double()
    for one in store.passes:
        nearest = (schedule - one.timestep).abs().argmin()
        assert one.position == (int(nearest) + 0.5) / len(schedule)
    assert store.kept_passes == len(store.passes) > 1


def test_the_count_sees_what_would_be_read():
    """Without it the test above would mean nothing."""
    for look in (
        lambda one: float(one[0]),
        lambda one: bool((one == 0).any()),
        lambda one: one[one > 0],
        lambda one: one.nonzero(),
        lambda one: one.unique(),
        lambda one: torch.equal(one, one + 1),
        lambda one: one.masked_fill_(one > 0, 1).masked_select(one > 0),
    ):
        with Reads() as reads:
            look(torch.ones(3))
        assert reads.number
    with Reads() as reads:
        torch.ones(3)[1:].add_(torch.ones(3)[torch.tensor([1])])
    assert not reads.number


@pytest.mark.slow
def test_generate_and_knockouts_read_nothing_more():
    pipe = make_pipeline()
    options = {"num_inference_steps": 4, "height": 64, "width": 64}
    with reads_by_call(pipe.unet) as plain:
        pipe("a red cat", output_type="latent", **options)
    with reads_by_call(pipe.unet) as generated:
        sdattn.generate(pipe, "a red cat", **options)
    with reads_by_call(pipe.unet) as removed, Removal(pipe, [(), (2,), (2, 3)], 77):
        latents = torch.randn(1, 4, 8, 8).repeat(3, 1, 1, 1)
        pipe(["a red cat"] * 3, output_type="latent", latents=latents, **options)
    with reads_by_call(pipe.unet) as stored:
        store = AttentionStore(pipeline=pipe)
        pipe.unet.set_attn_processor(sdattn.TorchAttnProcessor(store))
        pipe("a red cat", output_type="latent", **options)
    assert generated[1:] == removed[1:] == stored[1:] == plain[1:]
    assert len(plain) == len(stored) == 4


# -- what is kept is what the model got ---------------------------------------------------------


@torch.no_grad()
def test_a_timestep_that_is_written_to_later_is_the_one_that_the_model_got(tiny_unet):
    timestep = torch.tensor([7])
    with capture(tiny_unet) as store:
        for value in (7, 3):
            timestep.fill_(value)
            tiny_unet(torch.ones(1, 4, 16, 16), timestep, torch.ones(1, 77, 32))
    timestep.fill_(0)
    assert store.timesteps == [7.0, 3.0]


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (3, 3.0),
        (0.5, 0.5),
        (torch.tensor(4), 4.0),
        (torch.tensor([2.5, 9.0]), 2.5),
        (torch.tensor([[6], [1]]), 6.0),
        (torch.tensor([8.0], dtype=torch.bfloat16), 8.0),
    ],
)
def test_the_batchs_first_timestep_counts(given, value):
    assert float(Timestep(given)) == value
    assert float(Timestep(given, unit=1000.0)) == 1000 * value


def test_a_view_of_the_schedule_knows_its_place():
    schedule = torch.arange(10.0)
    for index, one in enumerate(schedule):
        assert Timestep(one).index_in(schedule) == index
        assert Timestep(one.expand(4)).index_in(schedule) == index
        assert Timestep(one[None]).index_in(schedule[2:]) == (index - 2 if index > 1 else None)
    later = schedule[3::3]
    assert [Timestep(one).index_in(later) for one in later] == [0, 1, 2]
    assert Timestep(schedule[4]).index_in(later) is None  # between two of them
    assert Timestep(schedule[4] / 2).index_in(schedule) is None
    assert Timestep(4).index_in(schedule) is None
    assert Timestep(schedule[4]).index_in(schedule.clone()) is None
    assert Timestep(schedule[4]).index_in(schedule.tolist()) is None
    with torch.device("meta"):  # where all is at one place
        assert Timestep(torch.empty(10)[4]).index_in(torch.empty(10)) is None


# -- grids that ids tell --------------------------------------------------------------------------


def read_grids(calls):
    """Of calls of one FLUX under capture: (rows, cols), and how often it was read."""
    model, found = flux().transformer, []
    with capture(model, steps="all") as store:
        for given in calls(model):
            with Reads() as reads:
                model(**given)
            found.append((store.passes[-1].latent_size, reads.number))
    return found


@torch.no_grad()
def test_a_grid_is_read_again_where_its_ids_are_others():
    def calls(model):
        given = inputs("FLUX.1", model, rows=2, cols=6)
        yield from (given, given)
        yield {**given, "img_ids": given["img_ids"].clone()}

    (size, first), (again, second), (cloned, third) = read_grids(calls)
    assert size == again == cloned == (2, 6)
    assert second < third <= first


@torch.no_grad()
@pytest.mark.parametrize("change", ["other ids", "the same, written to"])
def test_another_shape_of_as_many_patches_is_refused(change):
    def calls(model):
        given = inputs("FLUX.1", model, rows=2, cols=6)
        other = inputs("FLUX.1", model, rows=3, cols=4)["img_ids"]
        yield given
        if change == "other ids":
            yield {**given, "img_ids": other}
        given["img_ids"].copy_(other)
        yield given

    with pytest.raises(CaptureError, match=r"1 image.*\(3, 4\)"):
        read_grids(calls)


@torch.no_grad()
def test_ids_of_inference_mode_have_no_versions():
    with torch.inference_mode():
        sizes = [size for size, _ in read_grids(lambda model: [inputs("FLUX.1", model)] * 2)]
    assert sizes == [(3, 5), (3, 5)]


@pytest.mark.slow
def test_reference_images_join_the_ids_anew_in_every_step():
    """FLUX.2 does; in the run of a pipeline they are read once all the same."""
    pipe = klein()
    options = {"num_inference_steps": 4, "height": 64, "width": 96, "guidance_scale": 1.0}
    options |= {"image": Image.new("RGB", (64, 64), "red"), "max_sequence_length": 24}
    options |= {"output_type": "latent"}
    with reads_by_call(pipe.transformer) as plain:
        pipe(prompt="a red cat", **options)
    with capture(pipe) as store, reads_by_call(pipe.transformer) as watched:
        pipe(prompt="a red cat", **options)
    assert store.latent_size == (4, 6)
    assert watched[1:] == plain[1:]


def test_the_size_of_a_call_is_read_when_it_is_asked_for():
    model = flux().transformer
    with Reads() as reads:
        call = find_denoiser(model).family.read_call(model, (), inputs("FLUX.1", model))
        assert not reads.number
        assert call.latent_size == (3, 5)
        assert reads.number


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Stable Diffusion 1.x", "FLUX.1", "Stable Diffusion 3"])
def test_a_gpu_does_not_wait(name):
    row = NAMED[name]
    pipe = row.make().to("cuda")
    model, calls = find_denoiser(pipe).model, []

    def begin(*_):
        calls.append(1)
        torch.cuda.set_sync_debug_mode("error" if len(calls) > 2 else "default")

    hooks = (
        model.register_forward_pre_hook(begin, prepend=True),
        model.register_forward_hook(lambda *_: torch.cuda.set_sync_debug_mode("default")),
    )
    try:
        with capture(pipe, steps=(0.0, 1.0)):
            run(row, pipe)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        for hook in hooks:
            hook.remove()
    assert len(calls) >= 4
