"""What a folder holds."""

from pathlib import Path


def tree(folder):
    paths = sorted(Path(folder).rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.is_file()}
