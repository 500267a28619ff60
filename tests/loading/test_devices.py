"""Devices that this machine has not are refused before anything is loaded."""

import pytest
import torch

import sdattn
from sdattn.loading.devices import best_device, checked_device


def test_the_best_device_exists():
    assert torch.zeros(1, device=best_device()).item() == 0
    assert checked_device(None).type == best_device()


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_devices_that_are_here_are_taken(device):
    assert checked_device(device) == torch.device(device)


def test_a_device_of_no_kind_names_those_that_are_here():
    with pytest.raises(ValueError, match="device='gpu'.*cpu"):
        checked_device("gpu")


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
