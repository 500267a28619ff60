"""A team of one process."""

import pytest
import torch
from accelerate import PartialState

from sdattn.batch.team import Team


def test_a_process_alone_is_a_team():
    team = Team("cpu")
    assert (team.rank, team.size, team.first, team.first_here) == (0, 1, True, True)
    assert team.device == torch.device("cpu")
    value = object()
    assert team.share(lambda: value) is value
    assert team.together(lambda: value) is value
    assert team.gather(value) == [value]
    assert team.meet(value) == {0: value}
    assert list(team.deal([value, 2], "name")) == [value, 2]
    for ask in (team.share, team.together):
        with pytest.raises(KeyError, match="boom"):
            ask(lambda: {}["boom"])
    team.close()


def test_a_team_of_one_raises_the_very_error():
    class OwnError(Exception):
        def __init__(self, code, more):
            super().__init__(f"{code} {more}")

    def fail():
        raise OwnError(7, "boom")

    with pytest.raises(OwnError, match="7 boom"):
        Team("cpu").share(fail)


def test_a_team_leaves_accelerate_as_it_found_it():
    PartialState._reset_state()
    Team("cpu").close()
    assert not PartialState._shared_state
    theirs = PartialState(cpu=True)
    Team("cpu").close()
    assert theirs.initialized
    theirs._reset_state()


def test_a_launcher_that_starts_one_process_only_is_told_about(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.warns(UserWarning, match="--cpu starts one process.*--multi_gpu"):
        Team().close()
