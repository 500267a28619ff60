"""A small model hub on a port of this machine, with the faults that a real one has.

    with HubServer({"acme/sd": Repository(folder)}) as hub:
        ...  # HF_ENDPOINT=hub.url
        hub.status = 503

It speaks the part of the hub's HTTP API that downloads use. Weights are answered with a redirect to
another host, as large files are; names of files, sizes and hashes come from the folder. As an HTTPS
proxy (HTTPS_PROXY=hub.url) it asks everybody for a login.
"""

import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from helpers.hub_repository import COMMIT, Repository

TOKEN = "secret"  # the only token that the hub knows
REVISIONS = ("main", "v1", COMMIT)
_CHUNK = 1 << 14  # bytes sent at once


@dataclass(frozen=True)
class Request:
    """A request that came: ``"GET"``, the path with its query, the header ``Range`` or ``""``."""

    method: str
    path: str
    range: str


class HubServer:
    """A hub of some repositories, by their names ``"owner/name"``, while it is a ``with``.

    Attributes, to be set at any time:
        repositories: those that there are.
        drops: every connection is closed without an answer.
        status: every answer has this code, 503 for example.
        retry_after: seconds that an answer with a status asks to wait.
        delay: seconds that pass before each answer.
        bytes_per_second: how fast files come.
        cut_after: bytes of a file after which its connection is closed, ``cuts`` times.
        stall_after: bytes of a file after which nothing more comes, ``stalls`` times;
            ``has_stalled`` is set then.

    ``requests`` are those that came, in their order.
    """

    def __init__(self, repositories: Mapping[str, Repository]) -> None:
        self._all = dict(repositories)
        self.requests: list[Request] = []
        self.has_stalled = threading.Event()
        self._closed = threading.Event()
        self.reset()

    def reset(self) -> None:
        """Answer well again, and forget the requests."""
        self.repositories = dict(self._all)
        self.drops = False
        self.status: int | None = None
        self.retry_after: int | None = None
        self.delay = 0.0
        self.bytes_per_second: float | None = None
        self.cut_after: int | None = None
        self.cuts = 1000
        self.stall_after: int | None = None
        self.stalls = 1000
        self.requests.clear()
        self.has_stalled.clear()

    def weights_sent(self) -> list[str]:
        """Return the weights that were asked for whole: a range is of a header, or goes on."""
        whole = (one for one in self.requests if one.method == "GET" and not one.range)
        paths = [one.path for one in whole]
        return sorted(path.split("/", 4)[4] for path in paths if path.startswith("/cdn/"))

    def __enter__(self) -> "HubServer":
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait(self) -> None:
        """Let the delay of an answer pass."""
        self._closed.wait(self.delay)

    def stall(self) -> None:
        """Wait until the hub is closed or reset."""
        self.has_stalled.set()
        while self.stall_after is not None and not self._closed.wait(0.05):
            pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that is gone: some are killed."""


class _Refused(Exception):  # noqa: N818
    """An answer other than what was asked for: code, the hub's code for it, and its message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message}
        if code:
            self.headers["X-Error-Code"] = code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_CONNECT(self) -> None:
        self._say(407, b"", {"Proxy-Authenticate": 'Basic realm="proxy"'})

    def do_GET(self) -> None:
        hub = self.server.hub
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        hub.requests.append(Request(self.command, self.path, self.headers.get("Range") or ""))
        hub.wait()
        if hub.drops:
            self.close_connection = True
        elif hub.status is not None:
            wait = {} if hub.retry_after is None else {"Retry-After": str(hub.retry_after)}
            self._say(hub.status, b"upstream error", {"Content-Type": "text/plain", **wait})
        else:
            try:
                self._answer(unquote(urlsplit(self.path).path), body)
            except _Refused as refused:
                self._say_json({"error": str(refused)}, refused.status, refused.headers)

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _answer(self, path: str, body: bytes) -> None:
        if path == "/api/whoami-v2":
            if self._token() != TOKEN:
                raise _Refused(401, "", "Invalid username or password.")
            self._say_json({"type": "user", "name": "somebody"})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w[\w-]*)(?:/(.*))?)?", path):
            self._answer_api(found[1], found[2] or "revision", found[3] or "main", body)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._answer_file(*found.groups())
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            repository = self._repository(found[1], is_signed=True)
            self._send(repository.folder / found[2], {"ETag": '"x"'})
        else:
            raise _Refused(404, "", f"Not Found: {path}")

    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip()

    def _repository(self, name: str, *, is_signed: bool = False) -> Repository:
        token = TOKEN if is_signed else self._token()
        if token not in ("", TOKEN):
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        repository = self.server.hub.repositories.get(name)
        if repository is None or (repository.access == "private" and not token):
            raise _Refused(404 if token else 401, "RepoNotFound", "Repository not found")
        return repository

    def _answer_api(self, name: str, what: str, rest: str, body: bytes) -> None:
        repository = self._repository(name)
        query = parse_qs(urlsplit(self.path).query)
        revision, _, folder = rest.partition("/")
        if what == "refs":
            heads = [{"name": "main", "ref": "refs/heads/main", "targetCommit": COMMIT}]
            tags = [{"name": "v1", "ref": "refs/tags/v1", "targetCommit": COMMIT}]
            self._say_json({"branches": heads, "tags": tags, "converts": []})
            return
        _check_revision(revision)
        if what == "revision":
            info = repository.info(name, with_sizes="blobs" in query)
            if asked := query.get("expand"):
                info = {key: info[key] for key in ("_id", "id", *asked) if key in info}
            self._say_json(info)
        elif what == "tree":
            is_recursive = query.get("recursive", [""])[0].lower() == "true"
            self._say_json(repository.tree(folder, is_recursive=is_recursive))
        elif what == "paths-info":
            try:
                paths = json.loads(body)["paths"]
            except ValueError:  # from a form
                paths = parse_qs(body.decode())["paths"]
            here = repository.files()
            self._say_json([repository.entry(path) for path in paths if path in here])
        else:
            raise _Refused(404, "", f"Not Found: {what}")

    def _answer_file(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name)
        _check_revision(revision)
        if repository.access == "gated" and self._token() != TOKEN:
            text = f"Access to model {name} is restricted. You must have access to it and be "
            raise _Refused(401, "GatedRepo", text + "authenticated to access it. Please log in.")
        if repository.access == "refused":
            text = f"Access to model {name} is restricted and you are not in the authorized list."
            raise _Refused(403 if self._token() else 401, "GatedRepo", text)
        if file not in repository.files():
            refused = _Refused(404, "EntryNotFound", "Entry not found")
            refused.headers["X-Repo-Commit"] = COMMIT
            raise refused
        entry = repository.entry(file)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{entry["oid"]}"'}
        if "lfs" not in entry:
            self._send(repository.folder / file, headers)
            return
        headers["X-Linked-Etag"] = f'"{entry["lfs"]["oid"]}"'
        headers["X-Linked-Size"] = str(entry["size"])
        # "localhost" is another host than the hub's, whose redirects clients follow elsewhere
        headers["Location"] = f"http://localhost:{self.server.hub.port}/cdn/{name}/{file}"
        self._say(302, b"", headers)

    def _say_json(self, told: Any, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        kind = {"Content-Type": "application/json"}
        self._say(status, json.dumps(told).encode(), {**kind, **headers})

    def _say(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, path: Path, headers: dict[str, str]) -> None:
        """Send a file, or the range of it that was asked for, as well as the hub can."""
        hub = self.server.hub
        data = path.read_bytes()
        size = len(data)
        status, first, last = 200, 0, size - 1
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            status, first, last = 206, int(asked[1]), int(asked[2] or last)
            if first >= size:
                self._say(416, b"", {"Content-Range": f"bytes */{size}"})
                return
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        data = data[first : last + 1]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(data), _CHUNK):
            if hub.cut_after is not None and start >= hub.cut_after and hub.cuts > 0:
                hub.cuts -= 1
                self.close_connection = True
                return
            if hub.stall_after is not None and start >= hub.stall_after and hub.stalls > 0:
                hub.stalls -= 1
                hub.stall()
            self.wfile.write(data[start : start + _CHUNK])
            if hub.bytes_per_second is not None:
                time.sleep(_CHUNK / hub.bytes_per_second)


def _check_revision(revision: str) -> None:
    if revision not in REVISIONS:
        raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
