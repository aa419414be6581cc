"""A small Hugging Face hub on loopback: what huggingface_hub asks of one to list and download files.

Large files ("lfs") are redirected to another host name, as the real hub does, whose requests must not carry the token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_test"
_REPO = "/api/models/"


@dataclass
class Request:
    """One request as it came: path without query, the first byte asked for, whether it carried the token."""

    method: str
    host: str
    path: str
    start: int
    token: bool


@dataclass
class Hub:
    """The served repositories {name: {file: bytes}}, how they are served, and what was asked.

    private: names that need TOKEN. gated: names that no token opens. cut: bytes after which the connection of a file's
    body ends, None to serve them whole. ranges: False ignores Range headers, as some proxies do.
    """

    repos: dict[str, dict[str, bytes]]
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    cut: int | None = None
    ranges: bool = True
    requests: list[Request] = field(default_factory=list)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies(self) -> list[tuple[str, int]]:
        """The files whose bytes were asked for, each with the first byte."""
        return [(r.path.split("/", 5)[-1], r.start) for r in self.requests if r.method == "GET" and "/cdn/" in r.path]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serves a hub on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            _answer(self, hub)

        def do_GET(self) -> None:
            _answer(self, hub)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(h: BaseHTTPRequestHandler, hub: Hub) -> None:
    path = h.path.partition("?")[0]
    start = int(m.group(1)) if (m := re.match(r"bytes=(\d+)-", h.headers.get("Range", ""))) else 0
    token = h.headers.get("Authorization") == f"Bearer {TOKEN}"
    hub.requests.append(Request(h.command, h.headers["Host"].partition(":")[0], path, start, token))
    if m := re.fullmatch(rf"/cdn/([^/]+/[^/]+)/{COMMIT}/(.+)", path):
        _send_file(h, hub, hub.repos[m.group(1)][m.group(2)], start)
        return
    found = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+)(?:/(tree|revision|resolve)/([^/]+)(?:/(.+))?)?", path)
    name, kind, file = (found.group(1), found.group(2), found.group(4)) if found else ("", None, None)
    if name in hub.gated:
        return _send(h, 403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"})
    if name not in hub.repos or (name in hub.private and not token):
        # The real hub does not tell strangers what exists.
        return _send(h, 404 if token else 401, b'{"error": "no"}', {"X-Error-Code": "RepoNotFound"})
    files = hub.repos[name]
    if kind == "resolve":
        if file not in files:
            return _send(h, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        where = f"http://localhost:{hub.port}/cdn/{name}/{COMMIT}/{file}"
        size, etag = str(len(files[file])), hashlib.sha256(files[file]).hexdigest()
        headers = {"Location": where, "X-Linked-Size": size, "X-Linked-Etag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        return _send(h, 302, b"", headers)
    if kind == "tree":
        entries = [{"type": "file", "path": f, "size": len(data), "oid": "0" * 40} for f, data in files.items()]
        return _send(h, 200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
    info = {"_id": "0", "id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
    _send(h, 200, json.dumps(info).encode(), {"Content-Type": "application/json"})


def _send(h: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    h.send_response(status)
    for key, value in {**headers, "Content-Length": str(len(body))}.items():
        h.send_header(key, value)
    h.end_headers()
    if h.command == "GET":
        h.wfile.write(body)


def _send_file(h: BaseHTTPRequestHandler, hub: Hub, data: bytes, start: int) -> None:
    if not hub.ranges:
        start = 0
    h.send_response(206 if start else 200)
    if start:
        h.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
    h.send_header("Content-Length", str(len(data) - start))
    h.end_headers()
    if h.command == "GET":
        h.wfile.write(data[start:] if hub.cut is None else data[start : start + hub.cut])
