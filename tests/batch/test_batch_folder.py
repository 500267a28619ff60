"""Whose a batch run's folder is."""

import pytest
from helpers.batch_runs import files_of

from sdattn.batch import open_batch, status, verify
from sdattn.batch.storage.folder import BatchFolder


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="file is a file"):
        BatchFolder(tmp_path / "file").open("job")
    with pytest.raises(FileExistsError, match=r"no batch\.json, but chapter\.txt"):
        BatchFolder(tmp_path / "thesis").open("job")
    assert files_of(tmp_path) == {"file": b"mine", "thesis/chapter.txt": b"mine"}


def test_a_folder_that_was_begun_is_gone_on_with(tmp_path):
    root = tmp_path / "run"
    folder = BatchFolder(root)
    folder.open("killed")  # before it wrote anything
    (folder.temporary / "half").mkdir()
    (root / ".batch" / "stop").write_text("SIGTERM")
    folder.lock.release()
    again = BatchFolder(root)
    again.open("next")
    assert again.is_new and again.stopped is None
    assert not [*again.temporary.iterdir()]
    again.lock.release()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, FileNotFoundError, "no batch.json"),
        ("{", ValueError, "batch.json is corrupt"),
        ("[]", ValueError, "is not of this version"),
        ('{"format": "sdattn-batch-9"}', ValueError, "'sdattn-batch-9'"),
    ],
)
@pytest.mark.parametrize("ask", [open_batch, status, verify])
def test_what_is_no_batch_run_is_told(tmp_path, ask, text, error, message):
    if text is not None:
        (tmp_path / "batch.json").write_text(text)
    with pytest.raises(error, match=message):
        ask(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == (["batch.json"] if text else [])


def test_every_process_hears_that_a_run_is_to_stop(tmp_path):
    folder, other = BatchFolder(tmp_path / "run"), BatchFolder(tmp_path / "run")
    folder.open("job")
    assert other.stopped is None
    folder.stop("SIGINT")
    assert folder.stopped == other.stopped == "SIGINT"
    folder.lock.release()
