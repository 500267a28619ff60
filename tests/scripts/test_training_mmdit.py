"""How the small MM-DiT is trained: what it learns from, and what a checkpoint is."""

import argparse
import json
from functools import partial

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from safetensors.torch import load_file

from scripts.evaluation.seeing import own_settings
from scripts.training import data, mmdit, train_demo_mmdit
from scripts.training.losses import Caption
from scripts.training.mmdit import (
    ZEROS,
    assemble,
    flow_loss,
    joint_states,
    new_transformer,
    parts_of,
    snapshot,
)
from sdattn.models.demos import DEMOS

pytestmark = pytest.mark.slow
START = DEMOS["demo-mmdit"]
PROMPTS = ["a red circle left of a blue square", "an orange star", ""]
SCENES = 60  # of a chunk
SMALL = partial(new_transformer, blocks=2, heads=2, head_width=16)


def test_it_learns_the_way_that_the_scheduler_walks():
    """What it sees is what the scheduler makes of an image at that time, and from there one step
    along what it learns leads back to the image."""
    torch.manual_seed(1)
    transformer = SMALL()
    latents, noise = torch.randn(2, 3, 4, 16, 16)
    states = torch.randn(3, 9, 256)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    part, seen = scheduler.sigmas[:3].clone(), []
    hook = transformer.register_forward_pre_hook(lambda _, args: seen.append(args))
    answer = torch.tensor([0.5, -1.0, 2.0, 0.25])  # a channel each, whatever it sees
    transformer.proj_out.bias.data.copy_(answer)
    found = flow_loss(transformer, latents, noise, part, states)
    hook.remove()
    mixed, _, pooled, times = seen[0]
    torch.testing.assert_close(times, scheduler.timesteps[:3])
    torch.testing.assert_close(mixed, scheduler.scale_noise(latents, times, noise))
    assert not pooled.any()
    way = noise - latents
    torch.testing.assert_close(found, (answer[:, None, None] - way).square().mean())
    for row in range(3):
        scheduler.set_timesteps(sigmas=[float(part[row])])
        [time] = scheduler.timesteps
        back = scheduler.step(way[row], time, mixed[row]).prev_sample
        torch.testing.assert_close(back, latents[row], atol=1e-5, rtol=1e-5)


@pytest.fixture
def small(monkeypatch):
    """A transformer of a few weights, few scenes, three a batch, two images of two steps."""
    real = data.make_scenes
    monkeypatch.setattr(data, "make_scenes", lambda seed, **how: real(seed, count=SCENES, **how))
    for module in (mmdit, train_demo_mmdit):
        monkeypatch.setattr(module, "new_transformer", SMALL)
    monkeypatch.setattr(mmdit, "BATCH", 3)
    monkeypatch.setattr(mmdit, "IMAGES", 2)
    monkeypatch.setattr(mmdit, "SETTINGS", {**mmdit.SETTINGS, "num_inference_steps": 2})
    monkeypatch.setattr(mmdit, "unseen_loss", partial(mmdit.unseen_loss, count=4))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # a run takes all cores


def trained(work, steps, **options):
    """A run of the script, its latents of one chunk given."""
    if not work.exists():
        work.mkdir()
        torch.manual_seed(5)
        torch.save(torch.randn(SCENES, 4, 16, 16), work / "latents-1000000.pt")
    args = {"work": work, "out": work / "model", "start": START, "seed": 1, "chunks": 1}
    args |= {"mmdit_steps": steps, "device": "cpu", "processes": 1, "snapshot": False, **options}
    train_demo_mmdit.run(argparse.Namespace(**args))
    return torch.load(work / "mmdit.pt")


def test_what_a_checkpoint_holds_is_a_pipeline_that_can_be_watched(small, tmp_path, invoke):
    kept = trained(tmp_path / "run", 2)
    out = tmp_path / "snapshot"
    train_demo_mmdit.write(snapshot(tmp_path / "run", START), tmp_path / "run", out)
    without = {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(out, **without, dtype=torch.float32)
    for name, value in kept["mean"]["transformer"].items():
        assert torch.equal(pipe.transformer.state_dict()[name], value.half().float()), name
    made = joint_states(pipe, [Caption(prompt, 0, ()) for prompt in PROMPTS])
    plain = joint_states(assemble(*parts_of(START), SMALL()), [Caption(p, 0, ()) for p in PROMPTS])
    torch.testing.assert_close(made, plain)
    for name in ("text_encoder", "text_encoder_2"):  # transformers 4 knows no other names
        saved = load_file(out / name / "model.safetensors")
        assert saved.keys() == getattr(pipe, name).state_dict().keys()
    options = own_settings(out)
    assert pipe(PROMPTS[0], **{**options, "num_inference_steps": 2}).images[0].size == (128, 128)
    seen = tmp_path / "seen"
    options = ["--set", f"max_sequence_length={ZEROS}", "--steps", "2", "--device", "cpu"]
    status, _, told = invoke("generate", PROMPTS[0], "--model", out, *options, "--out", seen)
    assert status == 0, told
    assert len(list((seen / "heatmaps").iterdir())) == 8  # the words of the prompt
    run = json.loads((out / "training.json").read_text())
    assert run["stages"]["mmdit"]["steps"] == 2 and run["settings"]["seed"] == 1
    assert {"own_prompt", "others_prompt", "colours"} <= run["curve"]["mmdit"]["2"].keys()
    assert len(run["sha256"]) == 4
    with pytest.raises(SystemExit, match="no mmdit.pt yet"):
        snapshot(tmp_path, START)
