"""What our processors compute and copy to feed a store, and that its maps are its own."""

from collections import Counter

import pytest
import torch
from helpers.joint_parity import sharp_inputs, sharp_model
from helpers.tiny_pipelines import make_unet
from torch.utils._python_dispatch import TorchDispatchMode

from sdattn import AttentionStore, TorchAttnProcessor, TorchJointProcessor
from sdattn.models.denoiser import find_denoiser

COPIES = ("clone", "copy_", "_to_copy", "contiguous")
UNET = {
    "sample": torch.randn(2, 4, 16, 12),
    "timestep": 500,
    "encoder_hidden_states": torch.randn(2, 7, 32),
}
MODELS = {
    "UNet": (make_unet, lambda _: UNET, TorchAttnProcessor),
    "SD3": (
        lambda: sharp_model("SD3"),
        lambda model: sharp_inputs("SD3", model, batch=2),
        TorchJointProcessor,
    ),
}


class Count(TorchDispatchMode):
    """Operations by name, views included."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def fed(kind, **options):
    """A store that a model's layers call, half of whose batch it keeps; the model, its inputs."""
    make, inputs, processor = MODELS[kind]
    model = make()
    store = AttentionStore(guidance="batch", **options)
    store.attach(model)
    return store, model, inputs(model), processor(store)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "more", "copies"), [("UNet", 13, 4), ("SD3", 24, 2)])
def test_a_layer_that_feeds_a_store_runs_few_operations_more_than_its_own(kind, more, copies):
    store, model, given, processor = fed(kind)
    layers = len(find_denoiser(model).layers)

    def operations():
        model(**given)
        with Count() as count:
            model(**given)
        return count.names

    before = operations()
    model.set_attn_processor(processor)
    after = operations()
    assert store.cur_step == 2 and any(store.last_step.values())
    added = {name: after[name] - before[name] for name in after | before}
    assert added["_foreach_add"] == 1  # every map of the step
    assert 0 < sum(added.values()) <= more * layers + 1
    assert sum(added.get(name, 0) for name in COPIES) <= copies * layers


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_what_a_store_keeps_is_not_what_the_model_writes_to(kind):
    store, model, given, processor = fed(kind, keep_steps=True)
    model.set_attn_processor(processor)
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    for _ in range(2):
        model(**given)
    held = [store.attention_store, store.full_attention_store, store.last_step, *store.steps]
    kept = [one for maps in held for several in maps.values() for one in several]
    expected = [one.clone() for one in kept]
    tensors = [*model.parameters(), *model.buffers()]
    for output in (*seen, *given.values()):
        parts = output if isinstance(output, tuple) else (output,)
        tensors += [one for one in parts if isinstance(one, torch.Tensor)]
    for one in tensors:
        one.zero_()
    assert len(tensors) > 100
    for found, wanted in zip(kept, expected, strict=True):
        assert wanted.any() and torch.equal(found, wanted)


@torch.no_grad()
def test_a_part_of_joint_attention_keeps_no_more_alive():
    store, model, given, processor = fed("SD3", kinds=("cross",))
    model.set_attn_processor(processor)
    model(**given)
    maps = [one for several in store.last_step.values() for one in several]
    assert maps and all(one.untyped_storage().nbytes() == one.nbytes for one in maps)


class Reading(AttentionStore):
    """A store that may edit, as far as anybody knows."""

    def forward(self, attn, is_cross, place_in_unet):
        return super().forward(attn, is_cross, place_in_unet)


@torch.no_grad()
def test_a_store_that_only_reads_has_the_maps_and_the_output_of_one_that_may_edit():
    outputs, maps = [], []
    for kind in (AttentionStore, Reading):
        model = sharp_model("SD3")
        store = kind(guidance="batch")
        store.attach(model)
        model.set_attn_processor(TorchJointProcessor(store))
        torch.manual_seed(0)
        outputs.append(model(**sharp_inputs("SD3", model, batch=2)).sample)
        maps.append([one for several in store.step_store.values() for one in several])
    # the other one divides each row by its sum again, which is 1 as well
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    for ours, other in zip(*maps, strict=True):
        assert torch.equal(ours, other)


class ByForward(AttentionStore):
    def forward(self, attn, is_cross, place_in_unet):
        return super().forward(attn * 2, is_cross, place_in_unet)


class ByCall(AttentionStore):
    def __call__(self, attn, is_cross, place_in_unet):
        return super().__call__(attn, is_cross, place_in_unet) * 2


class ByShow(AttentionStore):
    def show(self, *given):
        return super().show(*given).mul_(2)


@torch.no_grad()
@pytest.mark.parametrize("kind", [ByForward, ByCall, ByShow, AttentionStore])
def test_a_store_may_edit_joint_attention_by_any_method_of_its_own(kind):
    model = sharp_model("SD3")
    given = sharp_inputs("SD3", model, batch=2)
    plain = model(**given).sample
    store = kind(guidance=None, kinds=("cross",))  # the text alone: rows are divided by their sum
    if kind is AttentionStore:  # of this object alone
        store.forward = lambda attn, *_: attn * 2
    store.attach(model)
    processor = TorchJointProcessor(store)
    model.set_attn_processor(processor)
    rows = []
    processor.watchers.append(lambda call: rows.append(call.probs.double().sum(-1)))
    assert (model(**given).sample - plain).abs().max() > 1e-3
    for sums in rows:  # as after each edit
        torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-5, rtol=0)


def test_steps_are_added_once_and_the_sums_before_stay_as_they_were():
    store = AttentionStore(guidance=None, max_queries=4)
    store.num_att_layers = 2
    torch.manual_seed(0)
    given = torch.rand(3, 2, 2, 4, 5)  # [steps, layers, heads, N, T]
    sums = []
    for step in given:
        for one in step:
            store(one.clone(), True, "up")
        sums.append((store.attention_store["up_cross"], store.full_attention_store["up_cross"]))
    for number, (small, full) in enumerate(sums, start=1):
        for layer in range(2):
            expected = given[:number, layer].double().sum(0)
            torch.testing.assert_close(small[layer].double(), expected, atol=1e-6, rtol=0)
            assert full[layer] is small[layer]  # one map, one sum
