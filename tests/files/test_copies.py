"""Copies of objects: fetched once while they stay as they are, and few of them kept."""

import fsspec
import pytest
from helpers.storages import memory_run  # noqa: F401

from sdattn.files.addresses import Address, Copies

MEMORY = type(fsspec.filesystem("memory"))


@pytest.fixture
def fetched(monkeypatch):
    """The names of what is fetched."""
    found, own = [], Address.fetch
    monkeypatch.setattr(
        Address, "fetch", lambda self, path: (found.append(self.name), own(self, path))
    )
    return found


def test_those_are_kept_that_were_asked_for_last(root, fetched):
    copies, paths = Copies(2), {}
    for name in "abc":
        (root / name).write_bytes(name.encode())
    for name in "abaca":
        paths[name] = copies.of(root / name)
    assert fetched == ["a", "b", "c"]  # each once
    assert [paths[name].exists() for name in "abc"] == [True, False, True]
    assert paths["a"].read_bytes() == b"a"
    copies.of(root / "b")
    assert fetched == ["a", "b", "c", "b"]


def test_of_what_is_not_there_or_breaks_off_there_is_no_copy(root, monkeypatch):
    monkeypatch.setattr("sdattn.files.addresses._WAITS", ())

    class Cut(MEMORY):
        def get_file(self, path, to, **_):
            with open(to, "wb") as file:
                file.write(b"half")
            raise error

    (root / "a").write_bytes(b"whole")
    cut, copies = Address(Cut(skip_instance_cache=True), root.path, "memory"), Copies(2)
    error = FileNotFoundError("gone since it was listed")
    for missing in (cut / "a", root / "b"):
        with pytest.raises(FileNotFoundError):
            copies.of(missing)
    error = TimeoutError("the connection broke")
    with pytest.raises(OSError, match="reached"):
        copies.of(cut / "a")
    assert copies.of(root / "a").read_bytes() == b"whole"
