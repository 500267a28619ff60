"""scripts/on_gpu on a machine that has none: the same parts, at tiny sizes."""

import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "on_gpu"


@pytest.fixture(scope="module")
def script():
    spec = spec_from_loader("on_gpu", SourceFileLoader("on_gpu", str(SCRIPT)))
    module = module_from_spec(spec)
    sys.modules["on_gpu"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the script itself")
def test_it_runs_on_a_machine_without_one(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["machine"]["device"] == "cpu"
    assert list(found["parts"]) == ["tests", "capture-float32", "batch"]
    assert found["tests"]["failures"] == 0 < found["tests"]["tests"]
    times = found["capture-float32"]["models"]["demo"]["times"]
    assert {"none", "default"} < set(times)
    assert all(len(way["call"]) == 2 for way in times.values())
    assert min(found["batch"]["image and maps"]) > 0
    table = (tmp_path / "gpu.md").read_text()
    assert "| capture-float32 | the demo model" in table and table in done.stdout


@pytest.mark.slow
def test_a_part_that_fails_or_takes_too_long_does_not_end_the_others(
    script, tmp_path, monkeypatch, capsys
):
    def part(name, code, seconds=20):
        return script.Part(name, ["-c", code], tmp_path / f"{name}.json", seconds)

    figures = '{"models": {}}'
    said = [
        part("wrong", "raise SystemExit('no such model')"),
        part("long", "import time; time.sleep(60)", seconds=1),
        part("right", f"open({str(tmp_path / 'right.json')!r}, 'w').write({figures!r})"),
    ]
    monkeypatch.setattr(script, "parts", lambda *_: said)
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["parts"]["wrong"] == "failed with exit code 1"
    assert found["parts"]["long"].startswith("stopped after 1 s")
    assert found["parts"]["right"].startswith("done") and found["right"] == {"models": {}}
    assert "no such model" in capsys.readouterr().out
