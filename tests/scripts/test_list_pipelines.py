"""The list of diffusers' pipelines, against the rows of the matrix and what capture() says."""

from helpers.matrix import ROWS

from scripts.list_pipelines import found, main
from sdattn.models.denoiser import find_denoiser

LAYOUTS = {one.name: one for one in found()}


def test_every_pipeline_of_the_matrix_is_known_with_its_denoiser():
    for make in {row.make for row in ROWS if row.name in ("SDXL", "SAG", "Wan 2.1", "FLUX.1")}:
        pipe = make()
        one = LAYOUTS[type(pipe).__name__]
        assert one.layout.startswith("known")
        assert one.denoiser == type(find_denoiser(pipe).model).__name__


def test_modular_pipelines_with_a_guider_need_no_layout():
    assert LAYOUTS["StableDiffusionXLModularPipeline"].layout == "guider"
    assert LAYOUTS["FluxModularPipeline"].layout == "known (calls)"


def test_what_has_been_read_and_makes_no_map_is_refused_with_its_reason():
    assert "windows" in LAYOUTS["StableDiffusionPanoramaPipeline"].layout
    assert LAYOUTS["StableDiffusionAttendAndExcitePipeline"].layout == "refused"
    assert "AudioLDM2Pipeline" not in LAYOUTS  # its UNet only ends like one that is known


def test_the_list_is_printed(capsys):
    main(["refused"])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) == sum(one.layout.startswith("refused") for one in LAYOUTS.values())
    assert printed.err.startswith(f"{len(lines)} pipelines, {len(lines)} refused; diffusers ")
