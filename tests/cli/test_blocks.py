"""The live page, served by the command and driven as a person does."""

import http.client
import json
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pytest
from browser import list_troubles, start_browser  # noqa: F401

pytestmark = pytest.mark.slow

pytest.importorskip("gradio", reason="pip install 'sdattn[app]'")


# The app of the command, which says of each call of the model that there was one.
COUNTED = """
import sys
from sdattn import cli, load_pipeline
from sdattn.cli.blocks import serve

pipe = load_pipeline("demo", device="cpu")
pipe.unet.register_forward_pre_hook(lambda *_: print("pass", flush=True))
cli.options.quiet()
serve(pipe, port=int(sys.argv[1]))
"""


@contextmanager
def served(*command):
    """The port of an app. Of a process: gradio leaves sockets behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *(str(port) if one is ... else one for one in command)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield port, process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def address():
    """Where the command says that it is."""
    with served("-m", "sdattn", "app", "--port", ..., "--device", "cpu") as (port, _):
        yield f"http://127.0.0.1:{port}/"


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


@pytest.fixture(scope="module")
def counted():
    """An app whose calls of the model can be counted, and its port."""
    with served("-c", COUNTED, ...) as (port, process):
        assert f":{port}/" in process.stdout.readline()  # it is up
        yield port, process


def ask(port, path, body=None, **headers):
    """(status, body) of a request, a POST if it has a body."""
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            headers.setdefault("Content-Type", "application/json")
            connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def join(port, session, steps, seed=0):
    """Have a picture drawn, as the page does: by way of the queue."""
    known = json.loads(ask(port, "/config")[1])["dependencies"]
    number = next(one["id"] for one in known if one["api_name"] == "draw")
    data = ["a red cat", "", seed, steps, 2.0, "default", False]
    body = {"data": data, "fn_index": number, "session_hash": session, "event_data": None}
    status, said = ask(port, "/gradio_api/queue/join", json.dumps(body))
    assert status == 200, said


@contextmanager
def listening(port, session):
    """The messages of the queue to a session, until it is left."""
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", f"/gradio_api/queue/data?session_hash={session}")
        lines = connection.getresponse()
        yield (json.loads(line[5:]) for line in lines if line.startswith(b"data:"))


def until(messages, kind):
    return next(one for one in messages if one["msg"] == kind)


def test_nobody_passes_the_queue_by(counted):
    port, _ = counted
    for path in ("/gradio_api/run/draw", "/gradio_api/api/draw"):
        body = json.dumps({"data": ["a red cat", "", 0, 1, 2.0, "default", False]})
        status, said = ask(port, path, body)
        assert status == 404 and "join the queue" in said


def test_other_sites_are_kept_out(counted):
    port, _ = counted
    for here in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "192.168.0.7"):
        assert ask(port, "/config", Host=here)[0] == 200
        assert ask(port, "/config", Host=here, Origin=f"http://{here}")[0] == 200
    for foreign in ("attacker.example", f"attacker.example:{port}", "localhost.attacker", "", "["):
        status, said = ask(port, "/config", Host=foreign)
        assert status == 403 and "is no name of this machine" in said
    for origin in ("https://attacker.example", "null", "http://localhost:1", "http://127.0.0.1"):
        status, said = ask(port, "/gradio_api/upload", "x", Origin=origin)
        assert status == 403 and "cannot use this one" in said


def test_nothing_is_uploaded(counted):
    port, _ = counted
    body = '--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
    body += "ab\r\n--x--\r\n"
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    status, said = ask(port, "/gradio_api/upload", body, **form)
    assert status == 413, said


def test_a_picture_whose_page_was_closed_is_given_up(counted):
    port, process = counted
    join(port, "first", steps=100)
    with listening(port, "first") as messages:
        until(messages, "progress")
    join(port, "second", steps=1)
    with listening(port, "second") as messages:
        done = until(messages, "process_completed")
    assert done["success"] and "iframe" in done["output"]["data"][0]
    join(port, "third", steps=1, seed=None)  # draws nothing
    with listening(port, "third") as messages:
        done = until(messages, "process_completed")
    assert not done["success"] and "The seed is empty" in done["output"]["error"]
    process.terminate()
    assert 2 <= process.stdout.read().count("pass") < 100  # of 101
