"""Which call begins a run, which rows come first, and which call of a step it is."""

import pytest
from helpers.tiny_pipelines import small_pipeline

from sdattn.follow.pass_reader import PassReader
from sdattn.follow.passes import Pass
from sdattn.models.denoiser import find_denoiser
from sdattn.models.running_call import RunningCall

UNCONDITIONAL, CONDITIONAL = ("unconditional",), ("conditional",)


@pytest.fixture(scope="module")
def pipe():
    pipe = small_pipeline()
    pipe.scheduler.set_timesteps(2)
    return pipe


def reader_of(pipe, branch="both"):
    return PassReader(find_denoiser(pipe), branch, guidance="batch")


def begun(order, index=None):
    found = Pass(0.0, None, 4, order)
    found.index, found.again = index, 0
    return found


@pytest.mark.parametrize(
    ("order", "rows"),
    [(UNCONDITIONAL + CONDITIONAL, [0, 1, 2, 3]), (CONDITIONAL + UNCONDITIONAL, [2, 3, 0, 1])],
)
def test_unconditional_rows_come_first(pipe, order, rows):
    kept = reader_of(pipe)._kept(begun(order))
    assert [row for row, _ in kept] == rows
    assert [name for _, name in kept] == ["unconditional"] * 2 + ["conditional"] * 2


def test_calls_of_a_step_are_counted_for_each_branch(pipe):
    reader = reader_of(pipe)
    turns = [(0, CONDITIONAL), (0, UNCONDITIONAL), (0, CONDITIONAL), (1, CONDITIONAL)]
    assert [reader._count(begun(order, index)) for index, order in turns] == [0, 0, 1, 0]


def test_each_call_of_the_pipeline_begins_a_run(pipe):
    """Also with the timesteps of the one before; a call of a loop in between begins none."""
    reader, first, second = (
        reader_of(pipe),
        object.__new__(RunningCall),
        object.__new__(RunningCall),
    )
    calls = [first, first, None, first, second, None]
    found = [reader._begins(pipe, call) for call in calls]
    assert found == [True, False, False, False, True, False]
    assert reader.runs == 2
