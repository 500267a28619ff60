"""A team of one process, and of three of which one is slow and one is lost."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from helpers.forks import fork, two_ranks

from sdattn.batch.engines.process_group import ProcessGroup


def test_a_process_alone_is_a_team():
    team = ProcessGroup("cpu")
    assert (team.rank, team.size, team.first, team.first_here) == (0, 1, True, True)
    assert team.device == torch.device("cpu")
    value = object()
    assert team.broadcast(lambda: value) is value
    assert team.run_on_all(lambda: value) is value
    assert team.all_gather(value) == [value]
    assert team.gather_living(value) == {0: value}
    assert list(team.shared_queue([value, 2], "name")) == [value, 2]
    for ask in (team.broadcast, team.run_on_all):
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
        ProcessGroup("cpu").broadcast(fail)


def test_a_team_leaves_accelerate_as_it_found_it():
    PartialState._reset_state()
    ProcessGroup("cpu").close()
    assert not PartialState._shared_state
    theirs = PartialState(cpu=True)
    ProcessGroup("cpu").close()
    assert theirs.initialized
    theirs._reset_state()


def test_a_launcher_that_starts_one_process_only_is_told_about(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.warns(UserWarning, match="--cpu starts one process.*--multi_gpu"):
        ProcessGroup().close()


# (rank, items it has taken): what it waits for. The second is held up, and nobody is left out.
WAITS = {(1, 1): ["0-took-20"], (0, 20): ["1-took-1", "2-took-3"]}


def take_part(variables, folder):
    """One process of three: takes what it is dealt, and writes what it hears of the others."""
    os.environ.update(variables)
    team, mine = ProcessGroup("cpu"), []
    team.all_gather(None)
    for item in team.shared_queue(range(40), "first"):
        mine.append(item)
        Path(folder, f"{team.rank}-took-{len(mine)}").touch()
        if team.rank == 2 and len(mine) == 3:
            os._exit(9)
        for taken in WAITS.get((team.rank, len(mine)), ()):
            while not Path(folder, taken).exists():
                time.sleep(0.01)
    met = team.gather_living(mine)
    left = sorted(set(range(40)) - {item for taken in met.values() for item in taken})
    again = team.gather_living(list(team.shared_queue(left, "second")))
    try:
        told = team.all_gather(None)
    except RuntimeError as error:
        told = str(error)
    Path(folder, str(team.rank)).write_text(json.dumps([met, left, again, told]))


@pytest.mark.slow  # three processes
def test_a_slow_process_takes_less_and_what_a_lost_one_took_is_known(tmp_path):
    common = {**two_ranks()[0], "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    ranks = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "012"]
    processes = [fork(take_part, one, tmp_path, daemon=True) for one in ranks]
    for one in processes:
        one.join(120)
    assert [one.exitcode for one in processes] == [0, 0, 9]
    found = [json.loads((tmp_path / rank).read_text()) for rank in "01"]
    assert found[0] == found[1]
    met, left, again, told = found[0]
    assert met.keys() == again.keys() == {"0", "1"}
    assert len(left) == 3  # what the lost one took
    assert sorted(met["0"] + met["1"] + left) == list(range(40))  # each once
    assert 0 < len(met["1"]) < len(met["0"])
    assert sorted(again["0"] + again["1"]) == left
    assert "Another process of this run has ended" in told
