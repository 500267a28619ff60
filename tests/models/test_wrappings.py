"""Models in wrappings (training's, PEFT's, accelerate's, the compiler's): each wrapping by each way
of watching gives what the bare model gives."""

import inspect
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate import utils as accelerate_utils
from accelerate.state import AcceleratorState
from diffusers import FirstBlockCacheConfig, UNet2DConditionModel
from helpers.followers import attached, captured, registered
from helpers.foreign import WIDTH, by_heads, tokens_of
from helpers.joint_models import inputs
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_small_unet, small_pipeline
from helpers.transformer_rows import flux
from helpers.video_rows import wan_of_two
from peft import LoraConfig, LoraModel, get_peft_model
from torch import nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import sdattn
from sdattn.edit import guide, inside
from sdattn.models.caches import is_cached
from sdattn.models.denoiser import find_denoiser
from sdattn.models.denoiser_call import called, unwrapped

SAMPLE = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
TEXT = torch.randn(2, 77, 32, generator=torch.Generator().manual_seed(1))
PROMPT = "a red cat"
RUN = {"num_inference_steps": 2, "height": 64, "width": 96}

pytestmark = [
    pytest.mark.usefixtures("eagerly"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore:The .* is compiled:sdattn.CaptureWarning",
    ),
]


@pytest.fixture(autouse=True, scope="module")
def _one_process():
    """A group of this process alone, as DistributedDataParallel wants one."""
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


class Wrapping(nn.Module):
    """A training script's own: what it is called with goes on to the model."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *args, **kwargs):
        return self.net(*args, **kwargs)


def prepared(model, **options):
    """As accelerate hands it back; ``mixed_precision`` puts another forward into the model."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **options).prepare_model(model, device_placement=False)


def lora(model):
    config = LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False)
    return get_peft_model(model, config)


def lora_model(model):
    if ".forward(" in inspect.getsource(LoraModel.forward):
        pytest.skip("this peft calls the model's forward, and so none of its hooks")
    return lora(model).base_model


compiled = partial(torch.compile, backend="eager")
# Wrappings that a pipeline takes for its model, since they answer for the model's attributes.
IN_PIPELINES = {
    "PeftModel": lora,
    "accelerate, bf16": partial(prepared, mixed_precision="bf16"),
    "torch.compile": compiled,
    "torch.compile of a PeftModel": lambda model: compiled(lora(model)),
}
WRAPPINGS = {
    **IN_PIPELINES,
    "LoraModel": lora_model,
    "PeftModel of torch.compile": lambda model: lora(compiled(model)),
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": DataParallel,
    "AveragedModel": AveragedModel,
    "a script's own": Wrapping,
    "accelerate": prepared,
    "DistributedDataParallel of a PeftModel": lambda m: DistributedDataParallel(lora(m)),
    "DistributedDataParallel of torch.compile": lambda m: DistributedDataParallel(compiled(m)),
    "torch.compile of DistributedDataParallel": lambda m: compiled(DistributedDataParallel(m)),
}


def maps_of(follower, target, call):
    """The call's output, and what a follower kept of it."""
    with follower(target, guidance=None) as kept:
        output = call()
    return [output, *kept]


def inspected(target, call):
    """The calls of attention in a model that is told nothing of, and what it proposes."""
    seen = []
    hook = target.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    call()
    hook.remove()
    ((args, kwargs),) = seen
    return [repr(sdattn.inspect_attention(target, *args, **kwargs))]


FOLLOWED = {
    "capture": partial(maps_of, captured),
    "store": partial(maps_of, attached),
    "controller": partial(maps_of, registered),
    "inspect_attention": inspected,
}


def assert_alike(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
        else:
            assert np.array_equal(one, other)


@torch.no_grad()
@pytest.mark.parametrize(
    ("entry", "kind"), [*((entry, "UNet") for entry in FOLLOWED), ("capture", "transformer")]
)
@pytest.mark.parametrize("how", WRAPPINGS)
def test_a_wrapped_model_is_seen_as_the_bare_one(how, entry, kind):
    if kind == "UNet":
        wrapped = WRAPPINGS[how](make_small_unet())
        given = {"sample": SAMPLE, "timestep": 5, "encoder_hidden_states": TEXT}
    else:
        wrapped = WRAPPINGS[how](flux().transformer)
        given = inputs("FLUX.1", unwrapped(wrapped))
    bare = unwrapped(wrapped)
    watch = FOLLOWED[entry]
    expected = watch(bare, lambda: bare(**given).sample)
    plain = wrapped(**given).sample
    found = watch(wrapped, lambda: wrapped(**given).sample)
    assert_alike(found, expected)
    if entry == "capture":
        assert torch.equal(found[0], plain)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in wrapped.modules())


class Unknown(nn.Module):
    """Cross-attention of a model of no known family."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, latents, context):
        q = by_heads(self.to_q(tokens_of(latents)))
        output = sdpa(q, by_heads(self.to_k(context)), by_heads(self.to_v(context)))
        return self.out(output.transpose(1, 2).flatten(2))


@torch.no_grad()
@pytest.mark.parametrize("how", WRAPPINGS)
def test_a_wrapped_model_of_no_family(how):
    torch.manual_seed(0)
    wrapped = WRAPPINGS[how](Unknown())
    bare = unwrapped(wrapped)
    assert type(bare) is Unknown
    given = torch.randn(2, WIDTH, 3, 5), torch.randn(2, 7, WIDTH)
    q, k = bare.to_q(tokens_of(given[0])), bare.to_k(given[1])
    table = sdattn.inspect_attention(wrapped, *given)
    assert table.proposal.options == {"text": "context", "grid": (3, 5)}
    with sdattn.capture(wrapped, **table.proposal.options) as store:
        wrapped(*given)
    q, k = by_heads(q).double(), by_heads(k).double()
    expected = (q @ k.mT / (WIDTH / 2) ** 0.5).softmax(-1).mean(1)
    (maps,) = store.maps.values()
    close = {"atol": 2e-2 if "bf16" in how else 1e-5, "rtol": 0}
    torch.testing.assert_close(maps.flatten(1, 2).double(), expected, **close)


class Timed(UNet2DConditionModel):
    """A model with many parts, whose forward takes anything."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_model_of_many_parts_is_no_wrapping():
    model = Timed(**make_small_unet().config)
    assert unwrapped(Wrapping(model)) is called(model) is model


class Joins(Wrapping):
    """A model that calls its part with something else than it was given."""

    def forward(self, *parts):
        return self.net(torch.cat(parts))


def test_a_model_that_takes_positions_alone_is_no_wrapping():
    model = Joins(Unknown())
    assert unwrapped(model) is called(model) is model


def test_a_scripted_model_is_no_wrapping():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    assert unwrapped(scripted) is scripted


def test_copies_in_threads_are_refused_by_name():
    """DataParallel of several devices runs a copy of the model on each."""
    model = DataParallel(make_small_unet())
    model.device_ids = [0, 1]
    for entry in (captured, attached, registered):
        with (
            pytest.raises(TypeError, match=r"DataParallel.*UNet2D.*2 devices.*`\.module`"),
            entry(Wrapping(model)),
        ):
            pass


class Trainer(nn.Module):
    """A model among other parts, which calls it with something else."""

    def __init__(self):
        super().__init__()
        self.student = DataParallel(make_small_unet())
        self.head = nn.Linear(16, 16)

    def forward(self, batch):
        return self.head(self.student(*batch).sample)


def test_a_model_that_holds_a_known_one_is_told_where():
    trainer = Trainer()
    with pytest.raises(TypeError, match=r"Trainer.*`student\.module`.*UNet2DConditionModel"):
        sdattn.capture(trainer).__enter__()
    with sdattn.capture(trainer.student.module) as store, torch.no_grad():
        trainer((SAMPLE, 5, TEXT))
    assert len(store.maps) == 4


def test_the_second_model_of_a_pipeline_may_be_wrapped():
    pipe = wan_of_two()
    second = pipe.transformer_2
    pipe.transformer_2 = lora(second)
    assert find_denoiser(pipe).stands_in.model is second
    first = pipe.transformer
    pipe.transformer = pipe.transformer_2
    assert find_denoiser(pipe).stands_in is None
    pipe.transformer = compiled(first)
    assert find_denoiser(pipe).model is pipe.transformer


def test_a_cache_of_the_second_model_is_seen():
    pipe = wan_of_two()
    assert not is_cached(find_denoiser(pipe))
    pipe.transformer_2.enable_cache(FirstBlockCacheConfig())
    assert is_cached(find_denoiser(pipe))


@torch.no_grad()
def test_regions_that_accelerate_compiled():
    """The compiled model is another object than its original, with the same attention layers."""
    model = flux().transformer
    given = inputs("FLUX.1", model)
    expected = maps_of(captured, model, lambda: model(**given).sample)
    if not hasattr(accelerate_utils, "compile_regions"):
        pytest.skip("this accelerate compiles no regions")
    regions = accelerate_utils.compile_regions(model, backend="eager")
    assert called(regions) is regions is not unwrapped(regions) is model
    with pytest.warns(sdattn.CaptureWarning, match="runs eagerly"):
        assert_alike(maps_of(captured, regions, lambda: regions(**given).sample), expected)


def generated(pipe):
    run = sdattn.generate(pipe, PROMPT, seed=0, **RUN)
    return [np.asarray(run[0].image), run.heatmaps[0]["cat"].values]


def knocked_out(pipe):
    found = sdattn.knockout(pipe, PROMPT, "cat", 0, **RUN)
    return [np.asarray(found.without), found.heatmap.values]


def edited(pipe):
    run = sdattn.edit.edit(pipe, PROMPT, "a red dog", seed=0, **RUN)
    return [np.asarray(one.image) for one in run]


def guided(pipe):
    options = {"steps": 1.0, "iterations": 1, "scale": 0.3, "enough": 0}
    run = guide(pipe, PROMPT, [inside("cat", (0, 0, 0.5, 0.5))], seed=0, **options, **RUN)
    return [np.asarray(run[0].image)]


RUNS = {"generate": generated, "knockout": knocked_out, "edit": edited, "guide": guided}
RUNS |= {
    name: lambda pipe, follower=follower: maps_of(
        follower, pipe, lambda: pipe(PROMPT, output_type="latent", **RUN).images
    )
    for name, follower in {"capture": captured, "store": attached, "controller": registered}.items()
}


QUICK = [*(("PeftModel", entry) for entry in RUNS), ("accelerate, bf16", "generate")]
RARE = [pair for pair in product(IN_PIPELINES, RUNS) if pair not in QUICK]


@pytest.mark.parametrize(("how", "entry"), tiered([*QUICK, *RARE], len(QUICK)))
def test_a_pipeline_with_a_wrapped_model(how, entry):
    pipe = small_pipeline()
    wrapped = IN_PIPELINES[how](pipe.unet)
    if entry == "guide" and "compile" in how:
        pipe.unet = wrapped
        with pytest.raises(TypeError, match="compiled"):
            RUNS[entry](pipe)
        return
    pipe.unet = unwrapped(wrapped)
    torch.manual_seed(0)
    expected = RUNS[entry](pipe)
    pipe.unet = wrapped
    torch.manual_seed(0)
    found = RUNS[entry](pipe)
    assert_alike(found, expected)
