"""Threads that encode and write."""

import threading
import time

import pytest
import torch
from batch_runs import PROMPT, TOKENIZER, as_layers
from PIL import Image

from sdattn import Heatmaps, read_prompt
from sdattn.batch.drawing import Writer
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.info import RunSettings
from sdattn.runs.packing import pack_run


def wait_until(true, seconds=5.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_writer_is_never_further_ahead():
    gate, begun, waiting = threading.Event(), [], []

    def call(number):
        begun.append(number)
        assert gate.wait(5)

    def submit(writer):
        for number in range(9):
            writer.submit(call, number)
            waiting.append(number)

    with Writer(threads=2, ahead=4) as writer:
        thread = threading.Thread(target=submit, args=(writer,))
        thread.start()
        wait_until(lambda: len(waiting) == 4)
        time.sleep(0.05)
        assert len(waiting) == 4  # the fifth waits for one to end
        assert len(begun) == 2
        gate.set()
        thread.join(5)
    assert sorted(begun) == [*range(9)]


def test_the_first_error_of_a_writer_is_raised_and_nothing_begun_after_it():
    gate, begun = threading.Event(), []

    def call(number):
        begun.append(number)
        assert gate.wait(5)
        if number == 1:
            raise OSError(f"disk {number} is full")

    with pytest.raises(OSError, match="disk 1 is full"):
        with Writer(threads=1, ahead=5) as writer:
            for number in (0, 1, 2, 3):
                writer.submit(call, number)
            gate.set()
            wait_until(lambda: writer._error is not None)
            writer.submit(call, 4)
            pytest.fail("the error was not raised")
    assert begun == [0, 1]


def test_an_error_of_the_last_call_is_raised_on_leaving():
    def call():
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        with Writer(threads=2, ahead=4) as writer:
            writer.submit(call)


@pytest.mark.parametrize("also", [False, True])
def test_an_error_in_the_block_waits_for_what_was_begun(also):
    done = []

    def call(number):
        time.sleep(0.01)
        if also and number == 3:
            raise OSError("the disk is full too")
        done.append(number)

    with pytest.raises(KeyboardInterrupt):
        with Writer(threads=1, ahead=9) as writer:
            for number in range(4):
                writer.submit(call, number)
            raise KeyboardInterrupt
    assert done == [0, 1, 2] + [3] * (not also)


def test_maps_that_are_not_finite_are_no_item():
    maps = torch.full((4, 6, 77), torch.nan)
    heatmaps = Heatmaps(read_prompt(TOKENIZER, PROMPT), maps)
    with pytest.raises(ValueError, match="up.b hold values that are not finite.*bfloat16"):
        layers = as_layers({"up.b": maps})
        settings = RunSettings(prompt=PROMPT, seed=0)
        pack_run(ImageRun(Image.new("RGB", (96, 64)), heatmaps, layers, settings), ("maps",))
