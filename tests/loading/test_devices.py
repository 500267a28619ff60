"""Devices that this machine has not are refused before anything is loaded."""

import pytest
import torch

import sdattn
from sdattn.loading.devices import best_device, checked_device, checked_dtype


def test_the_best_device_exists():
    assert torch.zeros(1, device=best_device()).item() == 0
    assert checked_device(None).type == best_device()
    for device in ("cpu", torch.device("cpu"), "meta"):
        assert checked_device(device) == torch.device(device)


def machine(monkeypatch, *, built=True, gpus=0):
    monkeypatch.setattr(torch.version, "cuda", "13.0" if built else None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)


@pytest.mark.parametrize(
    ("here", "device", "message"),
    [
        ({}, "gpu", "device='gpu'.* has: cpu"),
        ({"built": False}, "cuda", r"built without CUDA.* has: cpu"),
        ({}, "cuda", r"torch finds no such GPU and its driver"),
        ({"gpus": 2}, "cuda:7", r"there is none of that number.* cuda:0, cuda:1, cpu\."),
        ({"gpus": 2}, "cuda:2", "there is none of that number"),
        ({"gpus": 1}, "mps", r"this torch \(.*\) is built without MPS.* cuda:0, cpu\."),
    ],
)
def test_a_gpu_that_is_not_here_is_refused(monkeypatch, here, device, message):
    machine(monkeypatch, **here)
    with pytest.raises(ValueError, match=message):
        checked_device(device)


def test_gpus_that_are_here_are_taken(monkeypatch):
    machine(monkeypatch, gpus=2)
    assert best_device() == "cuda"
    assert [str(checked_device(name)) for name in ("cuda", "cuda:1")] == ["cuda", "cuda:1"]


def test_the_device_is_checked_before_the_model_is_looked_for(monkeypatch):
    machine(monkeypatch)
    with pytest.raises(ValueError, match="device='cuda'"):
        sdattn.load_pipeline("nobody/nothing", device="cuda")


def test_dtypes_have_short_names():
    assert checked_dtype("fp16") == checked_dtype("float16") == torch.float16
    assert checked_dtype(torch.bfloat16) == checked_dtype("bf16")
    for wrong in ("float15", torch.int8):
        with pytest.raises(ValueError, match="fp32"):
            checked_dtype(wrong)
