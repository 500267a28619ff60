"""How the motion modules of the video demo are trained: what they begin as, what they learn from,
what is written."""

import argparse
import json
from functools import partial

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file

from scripts.training import motion, train_demo_video
from scripts.training.lent import leave_out_what_is_lent
from scripts.training.motion import (
    FRAMES,
    adapter_of,
    assemble,
    new_adapter,
    snapshot,
    video_loss,
)
from sdattn.loading.pipelines import LENT, load_pipeline
from sdattn.models import demos

pytestmark = pytest.mark.slow
VIDEOS = 6  # of a chunk
CHANNELS, TOKENS, WIDTH = 16, 77, 128  # of the demo's latents and texts


@pytest.fixture
def pipe():
    torch.manual_seed(0)
    return assemble(demos.DEMO, new_adapter())


@pytest.fixture
def few(monkeypatch):
    """Few videos, one drawn to look at, in two steps."""
    monkeypatch.setattr(motion, "VIDEOS_A_CHUNK", VIDEOS)
    monkeypatch.setattr(motion, "report_videos", partial(motion.report_videos, count=1))
    monkeypatch.setattr(motion, "SETTINGS", {**motion.SETTINGS, "num_inference_steps": 2})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # a run takes all cores


def trained(work):
    """A run of the script, one step of two videos; their latents are given."""
    work.mkdir()
    torch.manual_seed(5)
    torch.save(torch.randn(VIDEOS, CHANNELS, FRAMES, 16, 16), work / "latents.pt")
    args = {"work": work, "out": work / "model", "start": demos.DEMO, "seed": 1, "chunks": 1}
    args |= {"motion_steps": 1, "batch": 2, "device": "cpu", "processes": 1}
    train_demo_video.run(argparse.Namespace(**args, snapshot=False, lean=False))
    return torch.load(work / "motion.pt")


def test_it_learns_the_velocity_of_every_frame(pipe):
    """Against the formula written out: x_t = sqrt(a) x + sqrt(1 - a) e, v = sqrt(a) e -
    sqrt(1 - a) x, a video each its own time."""
    latents, noise = torch.randn(2, 2, CHANNELS, 3, 16, 16)
    t, states = torch.tensor([10, 900]), torch.randn(2, TOKENS, WIDTH)
    seen = []
    hook = pipe.unet.register_forward_pre_hook(lambda _, args: seen.append(args))
    loss = video_loss(pipe, latents, noise, t, states)
    hook.remove()
    [(noisy, times, frames)] = seen
    share = pipe.scheduler.alphas_cumprod[t].double()[:, None, None, None, None]
    image, chance = share.sqrt(), (1 - share).sqrt()
    torch.testing.assert_close(noisy.double(), image * latents + chance * noise)
    assert torch.equal(times, t)
    assert torch.equal(frames, states[[0, 0, 0, 1, 1, 1]])
    velocity = image * noise - chance * latents
    with torch.no_grad():
        found = pipe.unet(noisy, times, frames).sample.double()
    torch.testing.assert_close(loss.double(), (found - velocity).square().mean())


def test_only_motion_is_learnt_and_loaded_with_what_another_demo_lends(few, tmp_path, monkeypatch):
    kept = trained(tmp_path / "run")
    out = tmp_path / "run" / "model"
    whole = load_pipeline(out, device="cpu")
    leave_out_what_is_lent(out, LENT["demo-video"])
    held = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.safetensors"))
    assert held == ["motion_adapter/diffusion_pytorch_model.safetensors"]
    assert list(json.loads((out / "training.json").read_text())["sha256"]) == held
    monkeypatch.setitem(demos.DEMOS, "demo-video", out)
    lean = load_pipeline("demo-video", device="cpu")
    for part in ("unet", "vae", "text_encoder"):
        weights = getattr(whole, part).state_dict()
        for name, value in getattr(lean, part).state_dict().items():
            assert torch.equal(value, weights[name]), name
    images = StableDiffusionPipeline.from_pretrained(demos.DEMO, dtype=torch.float32)
    before = images.unet.state_dict()
    made = snapshot(tmp_path / "run", demos.DEMO).unet
    for name, value in made.state_dict().items():
        if "motion_modules" not in name:
            assert torch.equal(value, before[name]), name
    assert all(value.any() for name, value in kept["state"]["motion"].items() if "proj_out" in name)
    saved = load_file(out / held[0])
    for name, value in adapter_of(made).state_dict().items():
        assert torch.equal(saved[name], value.half()), name
    assert kept["step"] == 1


def test_what_is_not_the_other_demos_is_not_left_out(tmp_path):
    folder = tmp_path / "model" / "vae"
    folder.mkdir(parents=True)
    source = LENT["demo-video"]["vae"]
    [theirs] = (demos.HOME / source).glob("*.safetensors")
    weights = load_file(theirs)
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} is not that of"):
        leave_out_what_is_lent(tmp_path / "model", {"vae": source})
    assert np.all([path.exists() for path in folder.iterdir()])
