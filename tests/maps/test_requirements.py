"""What a run has to capture for its preset."""

import pytest
from helpers.tiny_pipelines import make_pipeline

from sdattn import generate

PROMPT = "a red cat"


SMALL = {"num_inference_steps": 4, "height": 64, "width": 96}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "daam", "capture_options": {"heads": [0]}}, "'daam'.*heads"),
        ({"preset": "attend-and-excite", "capture_options": {"steps": [0]}}, "sets steps"),
        ({"preset": "attend-and-excite", "words": ["cat"]}, "sets words"),
        ({"capture_options": {"among": [[0, 1]]}}, "words of the prompt"),
    ],
)
def test_captures_that_a_preset_cannot_do_with_are_refused_before_the_run(options, message):
    pipe, ran = make_pipeline(), []
    pipe.unet.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=message):
        generate(pipe, PROMPT, **SMALL, **options)
    assert not ran
