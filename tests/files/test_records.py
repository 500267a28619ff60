"""Records written as JSON and read back: what comes back is equal, what does not fit is named."""

from dataclasses import FrozenInstanceError, dataclass

import numpy as np
import pytest

from sdattn.batch.records import Manifest
from sdattn.files.records import Record, RecordError, plain, read_record
from sdattn.runs.info import Edited, RunSettings


@dataclass(frozen=True)
class Layer(Record):
    grid: tuple[int, int]
    heads: str | tuple[int, ...] | None
    note: str | None = None


@dataclass(frozen=True)
class Document(Record):
    name: str
    layers: dict[str, Layer]
    share: float
    seen: bool | None = None


WHOLE = Document("a", {"up": Layer((2, 3), (0, 1)), "down": Layer((4, 6), None, "x")}, 1)


def test_a_record_comes_back():
    document = WHOLE.to_json()
    assert document == {
        "name": "a",
        "layers": {
            "up": {"grid": [2, 3], "heads": [0, 1]},
            "down": {"grid": [4, 6], "heads": None, "note": "x"},
        },
        "share": 1,
    }
    assert read_record(Document, {"of a later version": 1, **document}) == WHOLE
    assert read_record(Document, {**document, "seen": None}) == WHOLE


def test_numbers_of_numpy_are_pythons_own():
    found = plain({"a": (np.float32(0.5), {"b": np.int64(2)}), "c": None})
    assert found == {"a": [0.5, {"b": 2.0}], "c": None}
    assert type(found["a"][0]) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "'name' is 3: .*string"),
        ({"share": True}, "'share' is true: .*number"),
        ({"seen": 1}, "'seen' is 1: .*boolean"),
        ({"layers": []}, r"'layers' is \[\]: .*object"),
        ({"layers": {"up": {"heads": None}}}, "'layers.up.grid' is missing"),
        ({"layers": {"up": {"grid": [2], "heads": None}}}, r"'layers.up.grid\[1\]' is missing"),
        ({"layers": {"up": {"grid": [2, 3, 4], "heads": None}}}, r"'layers.up.grid' .* 2 items"),
        ({"layers": {"up": {"grid": [2, 0.5], "heads": None}}}, r"'layers.up.grid\[1\]' is 0.5"),
        ({"layers": {"up": {"grid": [2, 3], "heads": 1}}}, "'layers.up.heads.str' is 1: "),
        ({"layers": {"up": {"grid": [2, 3], "heads": None, "x": 3}}}, "'layers.up.x' cannot be"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(RecordError, match=message):
        read_record(Document, {**WHOLE.to_json(), **change})


def kinds_of(kind):
    for one in kind.__subclasses__():
        yield one
        yield from kinds_of(one)


def test_what_was_recorded_stays_as_it_was():
    kinds = [one for one in kinds_of(Record) if one.__module__.startswith("sdattn.")]
    assert {RunSettings, Edited, Manifest} < {*kinds}
    for kind in kinds:
        with pytest.raises(FrozenInstanceError):
            object.__new__(kind).anything = 1
