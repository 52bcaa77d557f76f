"""A Hugging Face hub on loopback: the endpoints that huggingface_hub calls to download and to upload repositories."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
REVISIONS = ("main", "v1", COMMIT)


@dataclass
class HubServer:
    """Repositories by the path of their kind and name, ``models/org/name`` or ``datasets/org/name``."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str = ""
    """The token that requests need; none if empty."""
    gated: bool = False
    cuts: set[str] = field(default_factory=set)
    """Files whose next transfer ends after half of the bytes."""
    damaged: set[str] = field(default_factory=set)
    """Files whose next transfer has another first byte."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    commits: list[str] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    url: str = ""


class _Handler(BaseHTTPRequestHandler):  # of HTTP/1.0: no thread waits for a second request
    hub: HubServer

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, body: Any = b"", status: int = 200, send: bool = True, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if send:
            self.wfile.write(content)

    def lacks_token(self) -> bool:
        """Refuse a request without the token."""
        lacks = bool(self.hub.token) and self.headers.get("Authorization") != f"Bearer {self.hub.token}"
        if lacks:
            self.fail(403 if self.hub.gated else 401, "GatedRepo" if self.hub.gated else "RepoNotFound")
        return lacks

    def fail(self, status: int, code: str) -> None:
        self.answer(b"", status, X_Error_Code=code)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path).strip("/")
        hub.requests.append(f"{self.command} {path}")
        if self.lacks_token():
            return None
        if path == "api/whoami-v2":
            return self.answer({"name": "org", "type": "user"})
        words = path.removeprefix("api/").split("/")
        words = words if words[0] in ("models", "datasets") else ["models", *words]
        repository, words = "/".join(words[:3]), words[3:]
        if repository not in hub.files:
            return self.fail(404, "RepoNotFound")
        if len(words) > 1 and words[1] not in REVISIONS:
            return self.fail(404, "RevisionNotFound")
        files = hub.files[repository]
        if words[:1] == ["tree"]:
            return self.answer([{"type": "file", "path": name, **_facts(files[name])} for name in files])
        if words[:1] != ["resolve"]:
            return self.answer({"id": repository.partition("/")[2], "sha": COMMIT, "siblings": []})
        name = "/".join(words[2:])
        if name not in files:
            return self.fail(404, "EntryNotFound")
        is_cut = name in hub.cuts and self.command == "GET"
        content = files[name]
        if name in hub.damaged and self.command == "GET":
            hub.damaged.remove(name)
            content = bytes([content[0] ^ 1]) + content[1:]
        self.answer(content, send=self.command == "GET" and not is_cut, ETag=f'"{_etag(name, files[name])}"')
        if is_cut:
            hub.cuts.remove(name)
            self.wfile.write(files[name][: len(files[name]) // 2])

    def do_PUT(self) -> None:
        self.hub.uploads[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer()

    def do_POST(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path.strip("/")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub.requests.append(f"POST {path}")
        repository = "/".join(path.removeprefix("api/").split("/")[:3])
        if self.lacks_token():
            pass
        elif path == "api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path == "api/repos/create":
            request = json.loads(body)
            hub.private = "private" in (request.get("visibility"), request.get("private") and "private")
            name = f"{request.get('organization') or 'org'}/{request['name']}"
            hub.files.setdefault(f"models/{name}", {})
            self.answer({"url": f"{hub.url}/{name}"})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            for file in files:
                file |= {"uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
            self.answer({"files": [{**file, "shouldIgnore": False} for file in files]})
        elif path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{hub.url}/upload/{entry['oid']}", "header": {}}}
            self.answer({"transfer": "basic", "objects": objects})
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    hub.files[repository][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[repository][value["path"]] = hub.uploads[value["oid"]]
            hub.commits.append(lines[0]["value"]["summary"])
            url = f"{hub.url}/{repository.partition('/')[2]}/commit/{COMMIT}"
            self.answer({"success": True, "commitUrl": url, "commitOid": COMMIT, "hookOutput": ""})


def _etag(name: str, content: bytes) -> str:
    """The sha256 of a file in large-file storage, the git hash of others."""
    digest = hashlib.sha256(content).hexdigest()
    return digest if name.endswith(".safetensors") else digest[:40]


def _facts(content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    return {"size": len(content), "oid": digest[:40], "lfs": {"oid": digest, "size": len(content), "pointerSize": 1}}


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve a hub until the block ends."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = False  # server_close waits for them
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
