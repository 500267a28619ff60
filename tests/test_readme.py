"""The README's Python runs as it stands, each section's blocks one after the other."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
SECTIONS = {
    part.splitlines()[0]: blocks
    for part in re.split(r"^## ", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if (blocks := re.findall(r"```python\n(.*?)```", part, re.DOTALL))
}


def test_the_readme_has_code():
    assert len(SECTIONS) >= 4
    first = next(iter(SECTIONS.values()))[0]  # the chain, link by link
    assert all(name in first for name in ("set_attn_processor", "AttentionStore", "heatmaps("))
    assert len([line for line in first.splitlines() if line.strip()]) <= 11


@pytest.mark.parametrize("section", SECTIONS)
def test_blocks_run(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in SECTIONS[section]:
        exec(compile(block, str(README), "exec"), names)
