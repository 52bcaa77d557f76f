"""An S3 store on loopback: moto's server in a separate process, behind a proxy that injects faults."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.paths import ROOT

FAULTS = {"slow down": (503, "SlowDown"), "error": (500, "InternalError"), "denied": (403, "AccessDenied")}
"""Answers with an error. The other faults are reset, truncated (half of the body) and latency, before the answer."""
_CONTROL = "/-control"
_SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"""moto reads the service from it, and does not compare signatures."""
_HOP = ("connection", "transfer-encoding", "content-length", "expect")


@dataclass
class Store:
    """A bucket, and the faults of its server."""

    port: int
    bucket: str
    environment: dict[str, str]

    def url(self, name: str = "") -> str:
        return f"s3://{self.bucket}/{name}".rstrip("/")

    def fault(self, kind: str, match: str = "", method: str = "", count: int = 1, skip: int = 0, **more: Any) -> None:
        """Inject a fault into requests of ``method`` whose path and query contain ``match``: into ``count`` of them,
        after ``skip`` without. Latency also takes ``seconds``."""
        self._control({"kind": kind, "match": match, "method": method, "count": count, "skip": skip, **more})

    def requests(self) -> list[str]:
        """Return "METHOD path Range" of each request to this bucket."""
        return [each for each in self._control(None) if f"/{self.bucket}" in each]

    def put(self, name: str, content: bytes) -> None:
        assert self.send("PUT", f"/{self.bucket}/{name}", content)[0] == 200

    def get(self, name: str) -> bytes:
        status, content = self.send("GET", f"/{self.bucket}/{name}")
        assert status == 200, name
        return content

    def delete(self, name: str) -> None:
        self.send("DELETE", f"/{self.bucket}/{name}")

    def names(self) -> list[str]:
        text = self.send("GET", f"/{self.bucket}?list-type=2")[1].decode()
        return [part.partition("</Key>")[0] for part in text.split("<Key>")[1:]]

    def send(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send a request that no fault hits."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {"x-no-fault": "1", "Authorization": _SIGNED})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def _control(self, fault: Any) -> Any:
        return json.loads(self.send("POST", _CONTROL, json.dumps(fault).encode())[1])


@contextmanager
def object_server() -> Iterator[int]:
    """Run the server and the proxy; yield the proxy's port."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.object_store"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as server:
        assert server.stdin is not None and server.stdout is not None
        yield int(server.stdout.readline())
        server.stdin.close()  # it ends then, also after a kill of the tests


def new_bucket(port: int, bucket: str) -> Store:
    """Return a new bucket, and forget the faults."""
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
    files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    more = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    store = Store(port, bucket, {**keys, **files, **more, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"})
    assert store.send("PUT", f"/{bucket}")[0] == 200
    store.fault("none", count=0)
    return store


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # answers "Expect: 100-continue"; each connection has one request
    faults: list[dict[str, Any]] = []
    requests: list[str] = []
    lock = threading.Lock()
    behind = 0

    def log_message(self, *_: Any) -> None:
        pass

    def _forward(self) -> None:
        self.close_connection, body = True, self._body()
        if self.path == _CONTROL:
            if fault := json.loads(body):
                self.faults[:] = [*self.faults, fault] if fault["count"] else []
            return self._answer(200, json.dumps(self.requests).encode())
        fault = {} if "x-no-fault" in self.headers else self._fault()
        if fault.get("kind") in FAULTS:
            status, code = FAULTS[fault["kind"]]
            return self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())
        if fault.get("kind") == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        time.sleep(fault.get("seconds", 0))
        connection = http.client.HTTPConnection("127.0.0.1", self.behind)
        connection.request(self.command, self.path, body, {k: v for k, v in self.headers.items() if k not in _HOP})
        answer = connection.getresponse()
        content = answer.read()
        self._answer(answer.status, content, answer.getheaders(), cut=fault.get("kind") == "truncated")
        connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _fault(self) -> dict[str, Any]:
        with self.lock:
            self.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".rstrip())
            for each in self.faults:
                if each["count"] and each["match"] in self.path and each["method"] in ("", self.command):
                    if not each["skip"]:
                        each["count"] -= 1
                        return each
                    each["skip"] -= 1
        return {}

    def _answer(self, status: int, content: bytes, headers: Any = (), cut: bool = False) -> None:
        self.send_response_only(status)
        size = dict(headers).get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
        passed = {name: value for name, value in headers if name.lower() not in _HOP}
        for name, value in {**passed, "Content-Length": size, "Connection": "close"}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)


class _Server(ThreadingHTTPServer):
    request_queue_size = 128


def main() -> None:
    """Serve until stdin ends."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    _Proxy.behind = moto.get_host_and_port()[1]
    proxy = _Server(("127.0.0.1", 0), _Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    print(proxy.server_port, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
