"""How the price of watching grows, at tiny sizes."""

import json
import math
import sys

import pytest

from scripts.benchmarks import bench_growth
from scripts.benchmarks.bench_growth import THEORY, VALUES, WAYS, growth, measure, slope
from scripts.benchmarks.growth_layers import Shape


def test_exponents_are_those_of_power_laws():
    assert slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert slope([1, 2, 4], [0, 5, 5]) == pytest.approx(0)
    assert slope([1, 2], [0, 5]) is None
    points = [measure("images", "cross", Shape(64, 8, n), 1, math.inf) for n in (1, 2)]
    assert [point.held for point in points] == [64 * 8 * 4, 2 * 64 * 8 * 4]
    [found] = [one for one in growth(points) if (one["axis"], one["way"]) == ("images", "cross")]
    assert found["held"] == pytest.approx(1)
    assert found["theory"] == {"watching": 1, "held": 1}


@pytest.mark.slow
def test_tables_json_and_plot_are_written(tmp_path, monkeypatch, capsys):
    paths = [str(tmp_path / name) for name in ("growth.json", "growth.png")]
    arguments = ["--quick", "--axes", "images", "--out", paths[0], "--plot", paths[1]]
    monkeypatch.setattr(sys, "argv", ["bench_growth", *arguments])
    bench_growth.main()
    found = json.loads((tmp_path / "growth.json").read_text())
    assert len(found["points"]) == len(WAYS["images"]) * len(VALUES["images"][1])
    assert {one["way"] for one in found["exponents"]} == set(THEORY)
    assert 0 < (tmp_path / "growth.png").stat().st_size < 150_000
    assert "theory" in capsys.readouterr().out
