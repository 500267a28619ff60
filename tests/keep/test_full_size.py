"""Published models at their full size, on torch's meta device: shapes and bytes of what is kept.

There are no values, so nothing here says what a map looks like; that of every family is compared in
``test_matrix.py`` at tiny sizes.
"""

import math

import pytest
import torch
from diffusers import WanTransformer3DModel
from helpers.full_size import FULL_SIZES
from helpers.tiers import tiered

from sdattn import capture
from sdattn.keep.keep import Keep
from sdattn.models.denoiser import find_denoiser
from sdattn.models.layers import TEXT_KINDS

BYTES = {  # of the running means, float32: cells of all layers, times columns, times 4
    "SD 1.5": 5 * (64**2 + 32**2 + 16**2) * 77 * 4 + 8**2 * 77 * 4,  # 8.3 MB
    "SDXL": (10 * 64**2 + 60 * 32**2) * 77 * 4,  # 31.5 MB
    "SD 3.5 large": 38 * 64**2 * 333 * 4,  # 207 MB
    "FLUX.1-dev": 57 * 64**2 * 512 * 4,  # 478 MB
    "Qwen-Image": 60 * 83**2 * 40 * 4,  # 66 MB
    "Z-Image": 30 * 64**2 * 64 * 4,  # 31.5 MB
}


def call(model, published):
    with torch.device("meta"):
        given = published.given()
    return model(**given)[0], given


@torch.no_grad()
@pytest.mark.parametrize("name", tiered(FULL_SIZES))
@pytest.mark.slow
def test_maps_have_the_shapes_and_bytes_that_were_said(name):
    """One call, of which one capture keeps the mean, another each step and head of some columns."""
    published = FULL_SIZES[name]
    model, n_text = published.model(), published.n_text
    millions = sum(part.numel() for part in model.parameters()) / 1e6
    assert millions == pytest.approx(published.parameters, abs=1e-3)
    columns, size = [*range(0, n_text, 3)], {"latent_size": published.latent_size}
    full = {"steps": "all", "heads": "all", "tokens": columns}
    with capture(model, **size) as store, capture(model, **full, **size) as every:
        output, given = call(model, published)
    latents = given.get("sample", given.get("hidden_states", given.get("x")))
    assert [part.shape for part in output] == [part.shape for part in latents]

    shapes = sorted(tuple(maps.shape) for maps in store.maps.values())
    assert shapes == sorted(
        (1, rows, cols, n_text) for layers, rows, cols in published.grids for _ in range(layers)
    )
    assert {(maps.dtype, maps.is_meta) for maps in store.maps.values()} == {(torch.float32, True)}
    assert store.nbytes == store.expected_nbytes == BYTES[name]

    layers = [layer for layer in find_denoiser(model).layers if layer.kind in TEXT_KINDS]
    cells = [layer.heads * math.prod(layer.grid(store.latent_size)) for layer in layers]
    assert every.nbytes == every.expected_nbytes == sum(cells) * len(columns) * 4
    said = Keep.of(steps="all", heads="all").nbytes(layers, store.latent_size, n_text, passes=50)
    assert said == 50 * sum(cells) * n_text * 4  # what `sdattn info` says


@torch.no_grad()
@pytest.mark.slow
def test_ids_without_values_are_refused_by_name():
    published = FULL_SIZES["FLUX.1-dev"]
    model = published.model()
    with pytest.raises(ValueError, match="img_ids.*latent_size.*4096"):
        with capture(model):
            call(model, published)
    assert all(not module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match=r"latent_size=\(64, 64\).*SD3Trans"):
        with capture(FULL_SIZES["SD 3.5 large"].model(), latent_size=(64, 64)):
            pass


def test_a_video_of_wan_14b_holds_what_the_guide_says():
    """81 frames of 480x832: a latent of 21x60x104, patches of 1x2x2, UMT5's 512 columns."""
    with torch.device("meta"):
        model = WanTransformer3DModel()  # the published configuration
        given = {"hidden_states": torch.empty(1, 16, 21, 60, 104)}
    size = find_denoiser(model).family.size(model, given)
    layers = [layer for layer in find_denoiser(model).layers if layer.kind in TEXT_KINDS]
    assert (size, len(layers)) == ((21, 30, 52), 40)
    assert Keep.of().nbytes(layers, size, 512) == 40 * 21 * 30 * 52 * 512 * 4  # 2.7 GB
    assert Keep.of(frames=[0, 10, 20]).nbytes(layers, size, 512) == 40 * 3 * 30 * 52 * 512 * 4
