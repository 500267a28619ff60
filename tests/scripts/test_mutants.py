"""The list of faults fits the code, and the script that tries them tells found from survived."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from scripts.mutants import Fault, all_faults, problems, try_fault
from scripts.mutants.__main__ import main

ROOT = Path(__file__).parents[2]
FAULTS = all_faults()
WATCHING = ("follow", "look", "keep", "control", "maps", "inversion")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.path}-{fault.why}")
def test_each_text_stands_in_its_file_once_and_the_fault_is_python(fault):
    assert problems(ROOT, fault) == []
    assert fault.text != fault.instead and fault.why
    source = (ROOT / fault.file).read_text("utf-8")
    before, after = (ast.dump(ast.parse(one)) for one in (source, faulty(source, fault)))
    assert before != after


def faulty(source, fault):
    return source.replace(fault.text, fault.instead)


def test_every_room_has_some_and_those_that_watch_have_forty():
    rooms = Counter(fault.room for fault in FAULTS)
    assert sum(rooms[room] for room in WATCHING) >= 40
    assert len(FAULTS) >= 60 and len({(one.path, one.text) for one in FAULTS}) == len(FAULTS)
    others = {"models", "prompts", "attention", "files", "loading", "runs", "edit", "batch", "cli"}
    assert set(rooms) >= {*WATCHING, *others}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"text": "no such text"}, "'no such text' 0 times, not once"),
        ({"text": "def "}, "times, not once"),
        ({"path": "keep/no_such.py"}, "0 times"),
        ({"tests": ("keep/test_no_such.py",)}, "there is no tests/keep/test_no_such.py"),
    ],
)
def test_an_entry_that_does_not_fit_is_an_error(monkeypatch, capsys, change, told):
    values = {"path": "keep/keep.py", "text": "MUCH = 1e9", "instead": "", "why": "none", **change}
    assert any(told in one for one in problems(ROOT, Fault(**values)))
    monkeypatch.setattr("scripts.mutants.__main__.all_faults", lambda: [Fault(**values)])
    assert main([]) == 2
    assert told in capsys.readouterr().err
    monkeypatch.setattr("scripts.mutants.__main__.all_faults", list)
    assert main([]) == 2


TESTS = {
    "whole": "from sdattn.keep.sums import total\n\ndef test(): assert total([1, 2]) == 3\n",
    "blind": "def test(): pass\n",
    "slow": "import pytest\n\n@pytest.mark.slow\ndef test(): assert False\n",
}


@pytest.fixture
def checkout(tmp_path):
    for name in ("sdattn/keep", "tests/keep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "sdattn/__init__.py").touch()
    (tmp_path / "sdattn/keep/sums.py").write_text("def total(given):\n    return sum(given)\n")
    for name, text in TESTS.items():
        (tmp_path / f"tests/keep/test_{name}.py").write_text(text)
    options = "[pytest]\nmarkers =\n  slow\n  chosen\npythonpath = .\n"
    (tmp_path / "pytest.ini").write_text(options)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "found_by"),
    [
        (("keep/test_blind.py", "keep/test_whole.py"), "tests/keep/test_whole.py::test"),
        ((), "tests/keep/test_whole.py::test"),
        (("keep/test_blind.py",), None),
    ],
)
def test_a_fault_is_found_or_survives_and_the_file_is_put_back(checkout, tests, found_by):
    fault = Fault("keep/sums.py", "sum(given)", "max(given)", "the largest", tests)
    assert try_fault(checkout, fault).found_by == found_by
    assert (checkout / fault.file).read_text() == "def total(given):\n    return sum(given)\n"


@pytest.mark.slow
def test_tests_that_do_not_run_find_nothing(checkout):
    fault = Fault("keep/sums.py", "sum(given)", "max(given)", "none", ("keep/test_slow.py",))
    with pytest.raises(ValueError, match="could not run tests/keep/test_slow.py: .*deselected"):
        try_fault(checkout, fault)


@pytest.mark.slow
def test_a_test_that_fails_without_a_fault_finds_none(checkout, monkeypatch, capsys):
    (checkout / "tests/keep/test_broken.py").write_text("def test():\n    assert False\n")
    fault = Fault("keep/sums.py", "sum(given)", "max(given)", "big", ("keep/test_broken.py",))
    (checkout / "outputs").mkdir()
    monkeypatch.setattr("scripts.mutants.__main__.ROOT", checkout)
    monkeypatch.setattr("scripts.mutants.__main__.all_faults", lambda: [fault])
    assert main([]) == 2
    assert "test_broken.py::test fails without a fault, too" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("tests", "status"), [("whole", 0), ("blind", 1)])
def test_more_than_one_in_twenty_that_survives_is_told(
    checkout, monkeypatch, capsys, tests, status
):
    fault = Fault("keep/sums.py", "sum(given)", "max(given)", "big", (f"keep/test_{tests}.py",))
    (checkout / "outputs").mkdir()
    monkeypatch.setattr("scripts.mutants.__main__.ROOT", checkout)
    monkeypatch.setattr("scripts.mutants.__main__.all_faults", lambda: [fault, fault])
    assert main(["--only", "2"]) == status
    said = capsys.readouterr().out
    assert f"{1 - status} of 1 faults were found." in said
    assert "  2 " in said and ("SURVIVED" in said) == bool(status)
