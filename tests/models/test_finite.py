"""Images and maps that are not finite: said with what to try, in every way to a run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline
from helpers.unet_rows import animatediff
from torch.utils._python_dispatch import TorchDispatchMode

from sdattn import explain, generate, knockout
from sdattn.edit import edit
from sdattn.models.finite import NotFiniteError, check_maps, watch_finite

PROMPT = "a red cat"
QUICK = {"num_inference_steps": 2, "height": 64, "width": 64}
# what diffusers says on the way to a black image
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def overflowing(pipe):
    """A VAE whose last convolution ends beyond float32, as SDXL's does beyond float16."""
    with torch.no_grad():
        pipe.vae.decoder.conv_out.weight.fill_(3e38)
    return pipe


def broken_text(pipe):
    """All of a text encoder's numbers, in every version of transformers."""
    with torch.no_grad():
        for name in ("text_encoder", "text_encoder_2"):
            if hasattr(pipe, name):
                next(getattr(pipe, name).parameters()).fill_(math.nan)
    return pipe


def broken_unet(pipe):
    with torch.no_grad():
        pipe.unet.conv_out.bias[0] = math.inf
    return pipe


BREAKS = {
    overflowing: r"latents are finite \(up to [\d.]+\), but the image that the VAE makes",
    broken_text: "The text states that the text encoder made are not finite",
    broken_unet: "The latents of the image are not finite",
}


@pytest.mark.parametrize("make", [make_pipeline, make_sdxl_pipeline])
@pytest.mark.parametrize("break_it", tiered(BREAKS, quick=2))
def test_it_is_said_where_it_began(make, break_it):
    pipe = make()
    break_it(pipe)
    with pytest.raises(NotFiniteError, match=BREAKS[break_it]) as error:
        generate(pipe, PROMPT, **QUICK)
    assert isinstance(error.value, ValueError)
    assert "Try " in str(error.value)
    assert "float32" not in str(error.value)  # in which it runs
    for module in (pipe.text_encoder, pipe.vae.decoder, pipe.unet):
        assert not module._forward_hooks


def test_the_guidance_scale_is_named():
    with pytest.raises(NotFiniteError, match=r"guidance scale below 20 in place of 1e\+30"):
        generate(make_pipeline(), PROMPT, guidance_scale=1e30, **QUICK)


def test_the_dtype_is_named(monkeypatch):
    pipe = make_pipeline()
    pipe.vae.to(torch.float16)  # which the CPU would make finite images in
    monkeypatch.setattr(pipe.vae.decoder, "forward", lambda latents: latents * torch.inf)
    expected = "bfloat16 or float32 in place of float16, which ends at 65,504; or a VAE that"
    with pytest.raises(NotFiniteError, match=expected), watch_finite(pipe, {}):
        pipe.vae.decoder(torch.ones(1, 4, 8, 8).half())


@pytest.mark.slow
def test_every_way_to_a_run_says_it():
    pipe = overflowing(make_pipeline())
    image = make_pipeline()(PROMPT, **QUICK).images[0]
    ways = [
        lambda: explain(pipe, image, PROMPT),
        lambda: knockout(pipe, PROMPT, "cat", **QUICK),
        lambda: edit(pipe, PROMPT, "a red dog", **QUICK),
    ]
    for way in ways:
        with pytest.raises(NotFiniteError, match="the VAE makes"):
            way()


def test_frames_of_videos_are_looked_at():
    pipe = animatediff()
    with torch.no_grad():
        pipe.vae.decoder.conv_out.bias[1] = math.nan
    with pytest.raises(NotFiniteError, match="the VAE makes"):
        generate(pipe, PROMPT, num_inference_steps=1, num_frames=2, height=64, width=64)


class Reads(TorchDispatchMode):
    """How often a number was read back from the device."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func._overloadpacket in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.is_nonzero,
            torch.ops.aten.equal,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_the_image_stays_and_the_device_is_not_asked_meanwhile():
    pipe = make_pipeline()

    def draw():
        with Reads() as reads:
            image = pipe(PROMPT, generator=torch.Generator().manual_seed(0), **QUICK).images[0]
        return image, reads.number

    plain, of_its_own = draw()
    with watch_finite(pipe, {}):
        seen, reads = draw()
    assert np.array_equal(plain, seen)
    assert reads == of_its_own > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_maps_are_looked_at(value):
    maps = {"a": torch.zeros(1, 2, 3, 4), "b": torch.zeros(1, 2, 3, 4)}
    check_maps(maps, make_pipeline(), {})
    maps["b"][0, 1, 2, 3] = value
    with pytest.raises(NotFiniteError, match="The maps of b are not finite. Try"):
        check_maps(maps, make_pipeline(), {})


@pytest.mark.slow
def test_a_batch_goes_on_with_the_other_items(invoke, tmp_path):
    """Of three items one comes out as NaN: the other two are drawn, and it is in errors.jsonl."""
    make_pipeline().save_pretrained("model")
    lines = [{"id": one, "prompt": "a cat", **QUICK} for one in "abc"]
    lines[1]["guidance_scale"] = 1e30
    Path("in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--model", "model", "--device", "cpu", "--save", "image,maps")
    code, out, _ = invoke("batch", "in.jsonl", "--out", "run", *options)
    assert code == 1 and "2 of 3 items" in out and "1 failed" in out
    [row] = map(json.loads, Path("run/errors.jsonl").read_text().splitlines())
    assert row["id"] == "b" and "guidance scale below 20" in row["failed"]
    assert "NotFiniteError" in row["failed"]


@pytest.mark.slow
def test_a_vae_that_is_compiled_is_left_alone_and_its_maps_are_looked_at():
    pipe = broken_unet(make_pipeline())
    pipe.vae.decode = torch.compile(pipe.vae.decode, backend="eager")
    with pytest.raises(NotFiniteError, match=r"The maps of .*attn2 are not finite. Try"):
        generate(pipe, PROMPT, **QUICK)
