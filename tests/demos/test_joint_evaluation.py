"""The evaluation of joint attention: its variants are what generate() and capture() give."""

import pytest
import torch
from helpers.transformer_rows import sd3

from demos.evaluation.images import unseen_scenes
from demos.evaluation.joint import drawn
from demos.evaluation.seeing import Subject, see_shapes
from demos.scenes.shapes import random_scene
from sdattn import generate

pytestmark = pytest.mark.slow

SHORT = {"num_inference_steps": 4, "height": 32, "width": 32, "max_sequence_length": 64}


@pytest.fixture(scope="module")
def images():
    subject = Subject(sd3(), SHORT, random_scene, see_shapes)
    asked = unseen_scenes(random_scene, 2, seed=5)
    return subject.pipe, asked, list(drawn(subject, asked, 0))


def test_the_default_and_the_columns_are_those_of_generate(images):
    pipe, asked, found = images
    prompts = [prompt for _, _, prompt in asked]
    for name in ("default", "columns"):
        run = generate(pipe, prompts, seed=0, preset=name, **SHORT)
        for image, one in zip(found, run, strict=True):
            assert image.image.tobytes() == one.image.tobytes()
            own, kept = one.heatmaps, image.heatmaps[name]
            columns = [column for column in kept.columns if column in own.columns]
            torch.testing.assert_close(kept.keep(columns).maps, own.keep(columns).maps)
