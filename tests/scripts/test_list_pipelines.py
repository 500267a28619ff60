"""The list of diffusers' pipelines, against the rows of the matrix and what capture() says."""

import pytest
from helpers.matrix import ROWS

from scripts.list_pipelines import found, main
from sdattn.models.denoiser import find_denoiser


@pytest.fixture(scope="module")
def layouts():
    return {one.name: one for one in found()}


def test_every_pipeline_of_the_matrix_is_known_with_its_denoiser(layouts):
    for make in {row.make for row in ROWS if row.name in ("SDXL", "SAG", "Wan 2.1", "FLUX.1")}:
        pipe = make()
        one = layouts[type(pipe).__name__]
        assert one.layout.startswith("known")
        assert one.denoiser == type(find_denoiser(pipe).model).__name__


def test_modular_pipelines_with_a_guider_need_no_layout(layouts):
    assert layouts["StableDiffusionXLModularPipeline"].layout == "guider"
    assert layouts["FluxModularPipeline"].layout == "known (calls)"


def test_what_has_been_read_and_makes_no_map_is_refused_with_its_reason(layouts):
    assert "windows" in layouts["StableDiffusionPanoramaPipeline"].layout
    assert layouts["StableDiffusionAttendAndExcitePipeline"].layout == "refused"
    assert "AudioLDM2Pipeline" not in layouts  # its UNet only ends like one that is known


def test_the_list_is_printed(layouts, capsys):
    main(["refused"])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) == sum(one.layout.startswith("refused") for one in layouts.values())
    assert printed.err.startswith(f"{len(lines)} pipelines, {len(lines)} refused; diffusers ")
