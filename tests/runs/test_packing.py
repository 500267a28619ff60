"""A run packed and unpacked: the same heatmaps, up to the float16 of its maps."""

import io
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.overlays import overlaid
from helpers.presets import OF_UNETS
from helpers.small_runs import small_run
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline
from PIL import Image
from safetensors.torch import load, save

from sdattn import generate
from sdattn.files.records import sealed
from sdattn.files.writing import sha256
from sdattn.maps.heatmap import Heatmap
from sdattn.maps.presets import PRESETS, Preset
from sdattn.maps.render import enlarge
from sdattn.runs.imagerun import Further
from sdattn.runs.info import read_info
from sdattn.runs.packing import AFFINITY, pack_run
from sdattn.runs.parts import MAPS
from sdattn.runs.unpacking import map_shapes, unpack_run

PROMPTS = ["a red cat and a turquoise dog", "dog dog"]
OPTIONS = {"height": 128, "width": 192, "num_inference_steps": 2}  # 16x24 cells and coarser ones
# two grids, the coarser one with a self-attention of its own
OWN = Preset("own", ("up", "mid"), least_cells=8, steps=(0.0, 0.5), heads="sum", layers="sum")


@pytest.fixture(scope="module")
def run_of():
    pipe, found = make_pipeline(), {}

    def run(preset, refine):
        if (preset, refine) not in found:
            found[preset, refine] = generate(
                pipe, PROMPTS, seed=2, preset=preset, refine=refine, **OPTIONS
            )
        return found[preset, refine]

    return run


def packed(run, image):
    return pack_run(run.image_run(image), ("image", "maps")).files


READ = [PRESETS[name] for name in OF_UNETS]
CASES = [*itertools.product([*READ, OWN], [None, "self"])]


@pytest.mark.parametrize(
    ("preset", "refine"),
    tiered(CASES, quick=2),
    ids=[f"{preset.name}-{refine}" for preset, refine in CASES],
)
@pytest.mark.slow
def test_a_run_comes_back_with_its_heatmaps(run_of, preset, refine):
    run = run_of(preset, refine)
    for i in range(2):
        files = packed(run, i)
        read = unpack_run(files, "run")
        image, back, info = read.image, read.heatmaps, read.settings
        expected = run.heatmaps[i]
        assert image.tobytes() == run.images[i].tobytes()
        assert back.preset == expected.preset == replace(preset, refine=refine)
        assert (back.prompt, back.columns) == (expected.prompt, expected.columns)
        scale = expected.maps.max().item()
        # an eleven-bit number, of which attend-and-excite's softmax takes a hundredfold
        torch.testing.assert_close(back.maps, expected.maps, atol=2e-3 * scale, rtol=0)
        assert (back.maps - expected.maps).abs().max() < 0.2 * expected.maps.std()
        for word in expected:
            assert back[word].columns == expected[word].columns
            torch.testing.assert_close(
                back[word].values, expected[word].values, atol=6e-3 * scale, rtol=0
            )
        assert info.statistics == tuple(word.rounded() for word in back.statistics())
        tensors = load(files[MAPS])
        assert {name: tuple(one.shape) for name, one in tensors.items()} == map_shapes(info)
        assert (AFFINITY in tensors) == (refine == "self")
        assert {one.dtype for one in tensors.values()} == {torch.float16}
        assert files == packed(run, i)  # the same bytes each time


def test_run_json_tells_what_the_maps_are_of(run_of):
    run = run_of(PRESETS["daam"], "self")
    info = read_info(packed(run, 1), "run").to_json()
    assert info["format"] == "sdattn-run-4"
    assert Preset.from_json(info["preset"]) == run.heatmaps[1].preset
    assert (info["passes"], info["self_attention"]) == (2, [16, 24])
    assert info["columns"] == list(range(77))
    assert list(info["layers"]) == [name for name in run.store.maps if name.endswith("attn2")]
    up = info["layers"]["up_blocks.2.attentions.0.transformer_blocks.0.attn2"]
    assert up == {"place": "up", "level": 1, "heads": 4, "grid": [8, 12]}


def test_further_maps_have_folders_of_their_own(run_of):
    run = run_of(PRESETS["default"], None)
    maps = run.heatmaps[0].occurrences()[2:4]
    parts = ("image", "maps", "overlays", "grid", "masks")
    more = {"asked": Further("cat and", maps), "negative": Further("cat", maps[:1])}
    files = pack_run(replace(run.image_run(0), more=more), parts).files
    assert [name for name in files if name.startswith(("asked", "negative"))] == [
        "asked/heatmaps/01-cat.png",
        "asked/heatmaps/02-and.png",
        "asked/grid.png",
        "asked/masks/01-cat.png",
        "asked/masks/02-and.png",
        "asked/maps.safetensors",
        "negative/heatmaps/01-cat.png",
        "negative/grid.png",
        "negative/masks/01-cat.png",
        "negative/maps.safetensors",
    ]
    saved = load(files["asked/maps.safetensors"])
    assert saved.keys() == {"01-cat", "02-and"}
    torch.testing.assert_close(saved["02-and"], maps[1].values.half(), rtol=0, atol=0)
    assert files["asked/heatmaps/01-cat.png"] == files["heatmaps/03-cat.png"]
    assert set(read_info(files, "run").files) == set(files) - {"run.json"}
    back = unpack_run(files, "run").more
    assert {name: (text, [one.label for one in maps]) for name, (text, maps) in back.items()} == {
        "asked": ("cat and", ["cat", "and"]),
        "negative": ("cat", ["cat"]),
    }
    again = back["asked"][1][1]
    assert again.columns == maps[1].columns
    assert torch.equal(again.values, maps[1].values.half().float())


def test_a_knockout_that_changed_nothing_leaves_the_image_bare(run_of):
    """All causal maps share the scale from zero to the largest change."""
    run = run_of(PRESETS["default"], None)
    grid = run.heatmaps[0].maps.shape[:2]
    rising = torch.linspace(0, 1, grid.numel()).reshape(grid)
    maps = [Heatmap("red", 1e-4 * rising, (2,)), Heatmap("cat", 0.5 * rising, (3,))]
    one = replace(run.image_run(0), more={"causal": Further("red cat", maps)})
    files = pack_run(one, ("overlays",)).files
    base = enlarge(one.image).convert("L").convert("RGB")
    height = base.height
    for name, share in (("01-red", 0.0002), ("02-cat", 1.0)):
        tile = Image.open(io.BytesIO(files[f"causal/heatmaps/{name}.png"]))
        corner = np.asarray(tile)[height - 1, base.width - 1].astype(float)
        grey = np.asarray(base)[height - 1, base.width - 1]
        np.testing.assert_allclose(corner, overlaid(grey, share), atol=3)


@pytest.mark.parametrize("where", ["layer", "affinity"])
def test_maps_that_are_not_finite_are_refused(run_of, where):
    run = run_of(PRESETS["default"], "self")
    layers = run.layers.image(0)
    if where == "layer":
        name = list(layers.layers)[3]
        broken = replace(layers.layers[name], maps=layers.layers[name].maps * torch.inf)
        layers = replace(layers, layers={**layers.layers, name: broken})
    else:
        layers, name = replace(layers, affinity=layers.affinity * torch.nan), AFFINITY
    with pytest.raises(ValueError, match=f"{name}.*finite"):
        pack_run(replace(run.image_run(0), layers=layers))


FILES = ("maps.safetensors", "steps.safetensors", "heads.safetensors", "spots.safetensors")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [*FILES, f"asked/{MAPS}"])
def test_a_folder_whose_maps_are_not_finite_is_refused(name, value):
    files = pack_run(small_run()).files
    unpack_run(files, "run")
    tensors = load(files[name])
    last = sorted(tensors)[-1]
    tensors[last].view(-1)[-1] = value
    files[name] = save(tensors)
    info = read_info(files, "run")
    sums = {**info.files, name: sha256(files[name])}
    files["run.json"] = sealed(replace(info, files=sums).to_json())
    with pytest.raises(ValueError, match=f"^run.*{last} hold values that are not finite.*again"):
        unpack_run(files, "run")


@pytest.mark.parametrize("value", [torch.nan, 70_000.0])  # float16 ends at 65,504
@pytest.mark.parametrize("part", ["steps", "heads", "spots", "asked"])
def test_no_folder_is_written_of_maps_that_float16_cannot_hold(part, value):
    run = small_run()
    details = run.details
    if part == "asked":
        first, *others = run.more["asked"].maps
        broken = replace(first, values=first.values + value)
        run = replace(run, more={"asked": Further("red cat", [broken, *others])})
    elif part == "spots":
        run = replace(run, details=replace(details, spots=details.spots + value))
    else:
        held = getattr(details, part)
        layer = replace(held.layers["up.b"], maps=held.layers["up.b"].maps + value)
        held = replace(held, layers={**held.layers, "up.b": layer})
        run = replace(run, details=replace(details, **{part: held}))
    with pytest.raises(ValueError, match="hold values that are not finite"):
        pack_run(run, ("image", "maps"))
