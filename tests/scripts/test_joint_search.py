"""The search for the default of joint attention: its candidates are what generate() gives."""

from dataclasses import replace

import pytest
import torch
from helpers.transformer_rows import sd3

from scripts.evaluation import joint_search
from scripts.evaluation.images import unseen_scenes
from scripts.evaluation.joint_search import Way
from scripts.evaluation.seeing import Subject, see_shapes
from scripts.scenes.shapes import random_scene
from sdattn import PRESETS, generate

pytestmark = pytest.mark.slow

SHORT = {"num_inference_steps": 4, "height": 32, "width": 32, "max_sequence_length": 16}
JOINT = PRESETS["joint"]


def test_candidates_are_those_of_generate(monkeypatch):
    pipe, asked = sd3(), unseen_scenes(random_scene, 2, seed=5)
    subject = Subject(pipe, SHORT, random_scene, see_shapes)
    prompts = [prompt for _, _, prompt in asked]
    half = (0.5, 1.0)
    # not sharpened: maps of random weights are nearly flat, and would show rounding
    ways = {
        Way("last half", "all", "all", 2, 1.0): replace(JOINT, steps=half, depth=None),
        Way("last quarter", "last half", "all", 2, 1.0): JOINT,
        Way("last half", "last", "all", 2, 1.0): replace(JOINT, steps=half, depth=(5 / 6, 1.0)),
    }
    monkeypatch.setattr(joint_search, "WAYS", list(ways))
    images = list(joint_search.drawn(subject, asked, 0))
    for way, preset in ways.items():
        name, preset = way.name, replace(preset, sharpen=1.0)
        for image, one in zip(images, generate(pipe, prompts, preset=preset, **SHORT), strict=True):
            columns = one.heatmaps.columns
            found, own = image.heatmaps[name].keep(columns).maps, one.heatmaps.maps
            torch.testing.assert_close(found, own, atol=1e-6, rtol=1e-4)
