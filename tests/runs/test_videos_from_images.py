"""Videos that begin with a given image: what generate() refuses before the model runs."""

import pytest
from diffusers import WanTransformer3DModel
from helpers.small_images import new_image
from helpers.wan_rows import wan22_small_from_image, wan_from_image

from sdattn import generate


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            wan_from_image,
            {"max_sequence_length": 226},
            "max_sequence_length=226.*WanTransformer3DModel.*512",
        ),
        (
            wan_from_image,
            {"num_videos_per_prompt": 2},
            "num_videos_per_prompt=2.*WanImageToVideoPipeline",
        ),
        (
            wan22_small_from_image,
            {"num_frames": 1},
            "num_frames=1.*WanImageToVideoPipeline.*5",
        ),
    ],
)
def test_what_diffusers_cannot_make_is_refused(make, options, message, monkeypatch):
    pipe = make()
    monkeypatch.setattr(WanTransformer3DModel, "forward", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        generate(pipe, "a red cat", height=64, width=96, image=new_image((96, 64)), **options)
