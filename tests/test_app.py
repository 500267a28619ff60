"""The live page, served by the command and driven as a person does."""

import socket
import subprocess
import sys
import time

import pytest
from browser import list_troubles, start_browser  # noqa: F401

pytest.importorskip("gradio", reason="pip install 'sdattn[app]'")


@pytest.fixture(scope="module")
def address():
    """Where the command says that it is. Of a process: gradio leaves sockets behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sdattn", "app", "--port", str(port), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()


@pytest.fixture
def page(browser, address):
    made = browser.new_page()
    made.asked = []
    made.on("request", lambda one: made.asked.append(one.url))
    end = time.monotonic() + 120
    while True:
        try:
            made.goto(address)
            break
        except Exception:
            assert time.monotonic() < end, "the page did not come up"
            time.sleep(0.5)
    yield made
    made.close()


def test_a_prompt_becomes_a_picture_and_its_words(page, address):
    page.get_by_label("Prompt", exact=True).fill("a <b>red</b> cat")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Steps").first.fill("4")
    page.get_by_role("button", name="Draw").click()
    frame = page.frame_locator("iframe[title=sdattn]")
    frame.locator("html[data-ready]").wait_for(timeout=60_000)
    assert frame.locator("#prompt").evaluate("e => e.textContent") == "a <b>red</b> cat"
    frame.get_by_role("button", name="cat").click()
    assert "“cat”" in frame.locator("#caption").inner_text()
    assert "--steps 4 " in frame.locator("#command").inner_text()
    foreign = [
        url for url in page.asked if not url.startswith((address, "data:", "blob:", "about:"))
    ]
    assert foreign == []


def test_what_cannot_be_drawn_is_said(page):
    page.get_by_role("button", name="Draw").click()
    page.get_by_text("is empty").first.wait_for(timeout=30_000)


def test_it_is_served_to_this_machine_only(page, address):
    """The port is bound to the loopback address alone."""
    port = int(address.rsplit(":", 1)[1].strip("/"))
    with open("/proc/net/tcp") as file:
        bound = [line.split()[1] for line in file if line.split()[3] == "0A"]  # listening
    assert [one for one in bound if one.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
