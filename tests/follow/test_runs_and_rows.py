"""Which call begins a run, and which rows come first."""

import pytest
from helpers.tiny_pipelines import small_pipeline

from sdattn.follow.pass_reader import PassReader
from sdattn.follow.passes import Pass
from sdattn.models.denoiser import find_denoiser

UNCONDITIONAL, CONDITIONAL = ("unconditional",), ("conditional",)


@pytest.fixture(scope="module")
def pipe():
    pipe = small_pipeline()
    pipe.scheduler.set_timesteps(2)
    return pipe


def reader_of(pipe, branch="both"):
    return PassReader(find_denoiser(pipe), branch, guidance="batch")


def begun(order):
    return Pass(0.0, None, 4, order)


@pytest.mark.parametrize(
    ("order", "rows"),
    [(UNCONDITIONAL + CONDITIONAL, [0, 1, 2, 3]), (CONDITIONAL + UNCONDITIONAL, [2, 3, 0, 1])],
)
def test_unconditional_rows_come_first(pipe, order, rows):
    kept = reader_of(pipe)._kept(begun(order))
    assert [row for row, _ in kept] == rows
    assert [name for _, name in kept] == ["unconditional"] * 2 + ["conditional"] * 2


def test_each_call_of_the_pipeline_begins_a_run(pipe):
    """Also with the timesteps of the one before; a call of a loop in between begins none."""
    reader = reader_of(pipe)
    found = [reader._begins(pipe, call) for call in (1, 1, None, 1, 2, None)]
    assert found == [True, False, False, False, True, False]
    assert reader.runs == 2
