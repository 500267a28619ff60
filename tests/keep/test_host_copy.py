"""Maps that are held on the host: copied once a layer a pass, and whole when they are read."""

import pytest
import torch
from helpers.sums import probabilities, running_sum
from helpers.tiny_pipelines import make_unet

from sdattn import capture
from sdattn.attention.device_copies import HostCopy, travels
from sdattn.keep import sums as held_module
from sdattn.look.attended import GivenProbs

STEPS = ["mean", "last", "all"]


def expected(steps, calls):
    each = torch.stack([one.mean(1) for one in calls], dim=1).unflatten(-2, (2, 2))
    return {"mean": each.mean(1), "last": each[:, -1], "all": each}[steps]


class Slow(HostCopy):
    """A copy to the host that is whole only when it is taken, as one on a GPU may be."""

    sent = 0

    def send(self, tensor):
        assert self._sent is None  # what was sent before was taken
        Slow.sent += 1
        self.source = tensor.clone()
        super().send(torch.full_like(tensor, torch.nan))

    def take(self):
        given = super().take()
        return None if given is None else given.copy_(self.source)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("calls", [1, 2, 5])
def test_what_is_on_its_way_counts_once(steps, calls, monkeypatch):
    monkeypatch.setattr(held_module, "travels", lambda *_: True)
    monkeypatch.setattr(Slow, "sent", 0)
    held = running_sum(steps=steps, device="cpu")
    held.copy = Slow()
    given = [probabilities(seed) for seed in range(calls)]
    for number, one in enumerate(given, 1):
        held.take(GivenProbs(one))
        assert Slow.sent == number
        if number == 3:  # read in the middle of a run
            found = held.map().double()
            torch.testing.assert_close(found, expected(steps, given[:3]), atol=1e-6, rtol=0)
    for _ in range(2):
        found = held.map().double()
        torch.testing.assert_close(found, expected(steps, given), atol=1e-6, rtol=0)
    assert sum(one.numel() for one in held.tensors()) == found.numel()


def test_the_buffer_is_let_go_of(monkeypatch):
    """What is held is none of the pinned memory, which would stay taken for ever."""
    monkeypatch.setattr(held_module, "travels", lambda *_: True)
    for steps in STEPS:
        held, sent = running_sum(steps=steps, device="cpu"), []
        held.copy.take = lambda copy=held.copy, sent=sent: take(copy, sent)
        for seed in range(3):
            held.take(GivenProbs(probabilities(seed)))
        held.map()
        kept = {one.data_ptr() for one in held.tensors()}
        assert sent and not kept & {one.data_ptr() for one in sent}


def take(copy, sent):
    given = HostCopy.take(copy)
    sent += [] if given is None else [given]
    return given


def test_only_what_comes_from_a_gpu_to_the_host_travels():
    tensor = torch.ones(1)
    assert not any(travels(tensor, device) for device in (None, "cpu", torch.device("cpu"), "meta"))


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_maps_of_a_gpu_on_the_host_are_those_on_the_gpu(steps, dtype):
    unet = make_unet().to("cuda", dtype)
    given = torch.randn(2, 4, 32, 32), torch.randn(2, 77, 32)
    sample, text = (one.to("cuda", dtype) for one in given)
    options = {"steps": steps, "kinds": ("cross", "self"), "dtype": dtype}
    with capture(unet, **options) as there, capture(unet, **options, device="cpu") as here:
        for timestep in (900, 500, 100):
            unet(sample, timestep, text)
            torch.cuda._sleep(10**7)  # the copies come late
            sample = sample.mul(0.9)  # memory that is used again
    for name, maps in there.maps.items():
        found = here.maps[name]
        assert found.device.type == "cpu" and not found.is_pinned()
        torch.testing.assert_close(found, maps.cpu(), atol=1e-6, rtol=1e-3)


@pytest.mark.gpu
@torch.no_grad()
def test_no_copy_to_the_host_waits_for_the_model():
    unet = make_unet().to("cuda")
    sample, text = torch.randn(1, 4, 32, 32, device="cuda"), torch.randn(1, 77, 32, device="cuda")
    times = [torch.tensor(time, device="cuda") for time in (900, 500, 100)]
    with capture(unet, device="cpu") as store:
        unet(sample, times[0], text)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for time in times[1:]:
                unet(sample, time, text)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert store.timesteps == [900, 500, 100]
