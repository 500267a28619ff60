"""register_attention_control: any controller of the contract, and nothing left behind."""

import gc
import weakref

import pytest
import torch
from conftest import make_pipeline, make_sdxl_pipeline, make_unet

from sdattn import AttentionStore, CaptureError, CaptureWarning, TorchAttnProcessor, capture
from sdattn.edit import EmptyControl, register_attention_control

NOISE = torch.Generator().manual_seed(5)
INPUTS = (
    torch.randn(2, 4, 16, 12, generator=NOISE),
    500,
    3 * torch.randn(2, 7, 32, generator=NOISE),
)


class Foreign:
    """A controller as it is written elsewhere: counts layers, edits the conditional half.

    ``way``: "returns" a new tensor, "in place" gives back what it changed, "none" returns nothing.
    """

    def __init__(self, way):
        self.way = way
        self.num_att_layers = -1
        self.cur_step = 0
        self.calls = []

    def __call__(self, attn, is_cross, place_in_unet):
        self.calls.append((place_in_unet, is_cross, tuple(attn.shape)))
        if len(self.calls) % self.num_att_layers == 0:
            self.cur_step += 1
        half = attn.shape[0] // 2
        if not is_cross:
            return None if self.way == "none" else attn
        if self.way == "returns":
            return torch.cat([attn[:half], attn[half:].flip(-1)])
        attn[half:] = attn[half:].flip(-1)
        return None if self.way == "none" else attn


@torch.no_grad()
def test_every_way_of_editing_is_understood():
    unet = make_unet()
    outputs = []
    for way in ("returns", "in place", "none"):
        controller = Foreign(way)
        with register_attention_control(unet, controller):
            outputs.append(unet(*INPUTS).sample)
        assert controller.num_att_layers == 32
        assert controller.cur_step == 1
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    plain = unet(*INPUTS).sample
    assert not torch.allclose(outputs[0][1], plain[1], atol=1e-4)
    torch.testing.assert_close(outputs[0][0], plain[0], atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_order_of_calls_is_that_of_execution():
    controller = Foreign("none")
    unet = make_unet()
    with register_attention_control(unet, controller):
        unet(*INPUTS)
    places = [place for place, _, _ in controller.calls]
    assert places == ["down"] * 12 + ["mid"] * 2 + ["up"] * 18
    assert [is_cross for _, is_cross, _ in controller.calls] == [False, True] * 16
    cells = [16 * 12, 8 * 6, 4 * 3]
    heads = [2, 4, 4]
    down = [(2 * heads[i], cells[i], 7) for i in (0, 0, 1, 1, 2, 2)]
    assert [shape for place, cross, shape in controller.calls if cross and place == "down"] == down


@pytest.mark.parametrize("make", [make_pipeline, make_sdxl_pipeline])
@pytest.mark.parametrize("controller", [None, EmptyControl(), lambda attn, *_: attn])
def test_plain_attention_is_that_of_diffusers(make, controller):
    pipe = make()
    options = {"num_inference_steps": 2, "output_type": "latent", "height": 64, "width": 96}

    def run():
        return pipe("a red cat", generator=torch.Generator().manual_seed(0), **options).images

    plain = run()
    with register_attention_control(pipe, controller):
        controlled = run()
    torch.testing.assert_close(controlled, plain, atol=1e-4, rtol=0)


def test_everything_is_put_back_even_when_the_run_fails():
    unet = make_unet()
    before = dict(unet.attn_processors)
    handle = register_attention_control(unet, None)
    assert all(type(one) is TorchAttnProcessor for one in unet.attn_processors.values())
    unet(*INPUTS)
    handle.remove()
    with pytest.raises(RuntimeError, match="boom"):
        with register_attention_control(unet, None):
            raise RuntimeError("boom")
    assert all(unet.attn_processors[name] is before[name] for name in before)
    assert not unet._forward_pre_hooks
    gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_registrations_nest():
    unet = make_unet()
    before = dict(unet.attn_processors)
    outer, inner = AttentionStore(), AttentionStore()
    first = register_attention_control(unet, outer)
    unet(*INPUTS)
    second = register_attention_control(unet, inner)
    with pytest.raises(CaptureError, match="was replaced by a TorchAttnProcessor"):
        unet(*INPUTS)  # the outer one would lose count
    with pytest.warns(CaptureWarning, match="saw nothing"):
        second.remove()
    first.remove()
    assert outer.cur_step == 1
    assert all(unet.attn_processors[name] is before[name] for name in before)


@torch.no_grad()
def test_capture_sees_the_edited_maps():
    """All attention on column 3, edited in: what is shown is what was used."""

    def all_on_three(attn, is_cross, _place):
        return torch.zeros_like(attn).index_fill(-1, torch.tensor([3]), 1.0) if is_cross else attn

    unet = make_unet()
    with register_attention_control(unet, all_on_three):
        without = unet(*INPUTS).sample
        with capture(unet) as outer, capture(unet, heads="all") as store:
            during = unet(*INPUTS).sample
    assert torch.equal(during, without)
    for held in (*store.maps.values(), *outer.maps.values()):
        assert held[..., 3].eq(1).all()
        assert held.sum() == held[..., 3].sum()


def test_gradients_flow_from_a_foreign_store_to_the_latents():
    """Attend-and-Excite's loop: a live graph, from what is stored back to the latents."""
    unet = make_unet()
    store = AttentionStore(False, guidance=None)
    latents = INPUTS[0].clone().requires_grad_()
    with register_attention_control(unet, store), torch.enable_grad():
        unet(latents, *INPUTS[1:])
        loss = sum(m[..., 2].sum() for m in store.get_average_attention()["up_cross"])
    [grad] = torch.autograd.grad(loss, latents)

    def value(x):
        with register_attention_control(unet, again := AttentionStore(False, guidance=None)):
            with torch.no_grad():
                unet(x, *INPUTS[1:])
        return sum(m[..., 2].sum(dtype=torch.float64) for m in again.attention_store["up_cross"])

    step = 1e-1 * grad / grad.norm()
    slope = (value(latents.detach() + step) - value(latents.detach() - step)) / 2e-1
    torch.testing.assert_close(slope, grad.norm().double(), rtol=0.05, atol=0)


def test_a_batch_without_guidance_is_refused_before_any_layer():
    pipe = make_pipeline()
    store = AttentionStore()
    with register_attention_control(pipe, store):
        with pytest.raises(ValueError, match=r"batch of 1.*guidance=None"):
            pipe("a cat", guidance_scale=1.0, num_inference_steps=1)
    assert store.cur_att_layer == 0


def test_a_controller_that_saw_nothing_is_a_warning():
    pipe, other = make_pipeline(), make_pipeline()
    with pytest.warns(CaptureWarning, match="AttentionStore saw nothing"):
        with register_attention_control(pipe, AttentionStore()):
            other("a cat", num_inference_steps=1, output_type="latent")


def test_processors_with_weights_of_their_own_are_refused():
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    unet = make_unet()
    name = "mid_block.attentions.0.transformer_blocks.0.attn2"
    layer = unet.get_submodule(name)
    layer.set_processor(IPAdapterAttnProcessor2_0(16, cross_attention_dim=32))
    with pytest.raises(ValueError, match=r"IPAdapterAttnProcessor2_0, whose weights.*unload"):
        register_attention_control(unet, None)
    with pytest.raises(TypeError, match="holds no UNet"):
        register_attention_control(torch.nn.Linear(1, 1), None)
