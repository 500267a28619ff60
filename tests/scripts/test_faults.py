"""Two faults of each kind, of one seed: see scripts/fuzzing; scripts/fuzz goes on with others."""

import pytest
from helpers.tiers import tiered

from scripts.fuzzing import KINDS, World, choose, try_case

pytestmark = pytest.mark.slow

SEED, CASES = 0, 100
DRAWN = [choose(SEED, number)[0].name for number in range(CASES)]
EACH = [number for number, name in enumerate(DRAWN) if DRAWN[:number].count(name) < 2]


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("number", tiered(EACH, quick=0))
def test_a_fault_is_found(world, number):
    assert try_case(world, SEED, number) is None


def test_every_kind_has_its_cases():
    assert set(DRAWN) == {one.name for one in KINDS}


@pytest.mark.parametrize(
    ("problems", "told"),
    [([], "nothing found"), (["x: image.png is missing"], "does not name it")],
    ids=["nothing", "another"],
)
def test_a_fault_that_is_not_found_is_told(world, monkeypatch, problems, told):
    """The cases see what they are for: here nothing is checked, or something else is named."""
    monkeypatch.setattr("scripts.fuzzing.batches.verify", lambda root: (3, problems))
    number = DRAWN.index("a bit turned, folder")
    missed = try_case(world, SEED, number)
    assert told in missed and f"scripts/fuzz --seed {SEED} --case {number}" in missed
