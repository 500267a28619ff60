"""Faults are drawn by the date and by lines, tried with the tests that enter them, and counted."""

import ast
from itertools import islice

import pytest

from scripts import mutants

pytest.importorskip("cosmic_ray")

SUMS = '''"""Sums."""

MOST = 3


def total(given: int | None, more: int) -> int:
    if more > MOST:
        raise ValueError(f"{more + 1}")
    return given + more
'''
IMPORT = "from sdattn.keep.sums import total\n\n"
TESTS = {
    "keep/test_sums": f"{IMPORT}def test(): assert total(1, 2) == 3\n",
    "keep/test_blind": "def test(): pass\n",
    "keep/test_broken": f"{IMPORT}def test(): assert total(1, 2) > 3\n",
}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in ("sdattn/keep", "tests/keep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "sdattn/__init__.py").touch()
    (tmp_path / "sdattn/keep/sums.py").write_text(SUMS)
    for name, text in TESTS.items():
        (tmp_path / f"tests/{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  chosen\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "EQUIVALENT", tmp_path / "equivalent.txt")
    mutants.EQUIVALENT.write_text("# none\n")
    return tmp_path


def draw(date, n=1):
    return list(islice(mutants.draw(str(date)), n))


def test_a_date_draws_the_same_faults_again_none_of_them_in_an_annotation_or_a_message(checkout):
    drawn = draw(0, 60)
    assert drawn == draw(0, 60) != draw(1, 60)
    assert {one.line: one.body for one in drawn} == {3: None, 7: (7, 4), 9: (7, 4)}
    assert all(ast.dump(ast.parse(one.code)) != ast.dump(ast.parse(SUMS)) for one in drawn)
    changes = {one.change for one in drawn if one.line == 9}
    assert changes == {"sdattn/keep/sums.py: return given + more -> return given - more"}


def test_a_file_is_drawn_as_often_as_it_is_long(checkout):
    (checkout / "sdattn/keep/longer.py").write_text("LONG = 1\n" * 27)
    drawn = [one.path for one in draw(0, 400)]
    assert 270 < drawn.count("sdattn/keep/longer.py") < 330  # 27 of 36 lines: 300


@pytest.mark.slow
def test_what_enters_a_line_finds_its_fault_and_a_test_that_fails_anyway_finds_none(
    checkout, capsys
):
    date = next(date for date in range(99) if {one.line for one in draw(date, 3)} == {3, 7, 9})
    command = ["--sample", "3", "--processes", "1", "--date", str(date)]
    assert mutants.main(command) == 1
    said = capsys.readouterr().out
    assert "tests that fail without a fault: tests/keep/test_broken.py::test\n" in said
    assert "keep/test_sums.py::test  line 9" in said and "SURVIVED  line 3" in said
    assert said.count("test_broken") == 1
    [line] = (line for line in said.splitlines() if line.startswith("SURVIVED  line 3"))
    mutants.EQUIVALENT.write_text(line.partition("line 3  ")[2] + "  # nobody has so many\n")
    assert mutants.main(command) == 0
    assert "keep         killed=2 survived=0 equivalent=1" in capsys.readouterr().out


def test_each_equivalent_fault_is_of_a_line_that_is_there_and_has_a_reason():
    lines = mutants.EQUIVALENT.read_text("utf-8").splitlines()
    for line in filter(None, lines):
        if not line.startswith("#"):
            path, change = line.split(": ", 1)
            change, reason = change.rsplit("  # ", 1)
            text = (mutants.ROOT / path).read_text("utf-8")
            known = {" ".join(one.split()) for one in text.splitlines()}
            assert any(change.startswith(f"{one} -> ") for one in known if one)
            assert reason
