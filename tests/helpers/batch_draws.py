"""Batches that are drawn with a tiny model, and the model watched while it draws."""

import gc
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sdattn import load_pipeline
from sdattn.batch import Request, run_batch

SMALL = {"num_inference_steps": 1, "height": 64, "width": 64, "guidance_scale": 1.0}
ALL = ("a cat", "a red dog", "dog and cat", "red", "a dog", "cat, cat", "a", "red cat and dog")


@pytest.fixture(autouse=True, scope="module")
def quick_garbage():
    """Each failure for want of memory collects garbage; what the libraries hold is none."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()  # what the module left behind
    gc.collect()
    gc.freeze()  # as conftest.py does


@pytest.fixture(name="watched")
def watch_models(monkeypatch):
    """The UNets that run_batch loads: notes the rows of each call and fails as CUDA does."""
    seen = SimpleNamespace(most=10**9, rows=[], pixels=[], forbidden=None)

    def check(_, args, options):
        latent = args[0] if args else options["sample"]
        seen.rows.append(len(latent))
        seen.pixels.append(latent.shape[-2] * latent.shape[-1] * 64)
        if len(latent) > seen.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def check_text(_, args, options):
        ids = args[0] if args else options["input_ids"]
        if seen.forbidden is not None and (ids == seen.forbidden).any():
            raise RuntimeError("boom: the encoder\ncannot read this")

    def load(*args, **options):
        pipe = load_pipeline(*args, **options)
        pipe.unet.register_forward_pre_hook(check, with_kwargs=True)
        pipe.text_encoder.register_forward_pre_hook(check_text, with_kwargs=True)
        return pipe

    monkeypatch.setattr("sdattn.batch.shard.load_pipeline", load)
    return seen


def draw(model, out, rows, **request):
    """Write an input beside ``out`` and draw it."""
    source = Path(f"{out}.jsonl")
    rows = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {"batch_size": 2, "options": SMALL, "device": "cpu", "save": ("image", "maps")}
    return run_batch(Request(source, out, str(model), **{**usual, **request}))
