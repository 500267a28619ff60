"""What the live page's server lets in, without a page and without gradio."""

import json
import socket

import pytest

pytest.importorskip("fastapi", reason="pip install 'sdattn[app]'")

from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from sdattn.app.server import _address_guard, check_address

ADDRESS = {"data": [{"path": "http://10.0.0.1/a.png", "meta": {"_type": "gradio.FileData"}}]}
FILE = {"data": [{"path": "/tmp/gradio/a.png", "meta": {"_type": "gradio.FileData"}}]}
UPLOAD = b'--x\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\n{"path": "a://b"}\r\n--x--'
TYPES = (
    *("application/json", "application/json; x=multipart", "application/json; boundary=multipart"),
    *("application/vnd.multipart+json", "Application/JSON", "application/json;multipart/form-data"),
    *("text/plain", "", "multipart", "multipart/mixed", "Multipart/Form-Data; boundary=x"),
    *("multipart/form-datas", "multipart/form-data+json", "x; multipart/form-data; boundary=x"),
)


@pytest.fixture(scope="module")
def client():
    app = FastAPI(dependencies=[_address_guard()])

    @app.post("/read")
    async def read(request: Request) -> dict:
        body = await request.body()
        return {"length": len(body)}

    return TestClient(app)


@pytest.mark.parametrize("kind", TYPES)
def test_no_way_to_write_the_type_of_a_body_hides_an_address(client, kind):
    headers = {"Content-Type": kind}
    assert client.post("/read", content=json.dumps(ADDRESS), headers=headers).status_code == 403
    answer = client.post("/read", content=json.dumps(FILE), headers=headers)
    assert answer.json() == {"length": len(json.dumps(FILE))}


@pytest.mark.parametrize("space", ["", " "])
def test_an_upload_is_no_value(client, space):
    headers = {"Content-Type": f"multipart/form-data{space}; boundary=x"}
    answer = client.post("/read", content=UPLOAD, headers=headers)
    assert answer.json() == {"length": len(UPLOAD)}
    # Its bytes are no JSON, whatever they are called; and an upload's are not read here.
    again = client.post("/read", content=UPLOAD, headers={"Content-Type": "application/json"})
    assert again.json() == {"length": len(UPLOAD)}
    assert client.post("/read", content=json.dumps(ADDRESS), headers=headers).status_code == 200


@pytest.fixture
def taken():
    """A port of this machine on which somebody listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_is_taken_is_refused_at_once(taken):
    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        with pytest.raises(ValueError, match=f"`port={taken}`: another program listens there"):
            check_address(host, taken)
    check_address("127.0.0.1", None)


def test_a_port_that_was_left_a_moment_ago_is_free(taken):
    with socket.socket() as served:
        served.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        served.bind(("127.0.0.1", 0))
        served.listen()
        port = served.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            there, _ = served.accept()
            there.close()  # the side that closes first keeps the port in TIME_WAIT
    check_address("127.0.0.1", port)


def test_a_host_that_is_not_this_machine_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="`host='198.51.100.7'`: it is no address of this"):
        check_address("198.51.100.7", None)  # an address for documentation

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match="`host='my-host'`.*Name or service not known"):
        check_address("my-host", 7860)
