"""A model hub on this machine: as much of its API as huggingface_hub needs to upload a folder and load it back."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml


class Hub:
    """What was uploaded, by repository and file; ``cards`` holds the metadata that it was asked to check."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.cards: list[dict[str, Any]] = []


@contextmanager
def hub() -> Iterator[Hub]:
    """Serve an empty hub on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/api/validate-yaml":
            card = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            self.hub.cards.append(card)
            wrong = [] if card.get("library_name") else [{"message": "no library"}]
            self._answer({"errors": wrong, "warnings": []}, 400 if wrong else 200)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.hub.files.setdefault(name, {})
            self.hub.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            self._answer({"url": f"{self.hub.url}/{name}"})
        elif self.path.endswith("/preupload/main"):
            asked = [each["path"] for each in json.loads(body)["files"]]
            self._answer({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in asked]})
        elif self.path.endswith("/commit/main"):
            name = "/".join(self.path.split("/")[3:5])
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.hub.files[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            where = f"{self.hub.url}/{name}/commit/{_commit(self.hub.files[name])}"
            self._answer({"commitUrl": where, "commitOid": _commit(self.hub.files[name])})
        else:
            self._answer({"error": f"POST {self.path}"}, 404)

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[0] == "api":
            name = "/".join(parts[2:4])
            if name not in self.hub.files:
                return self._answer({"error": "no such repository"}, 404, {"X-Error-Code": "RepoNotFound"})
            files = self.hub.files[name]
            listed = [{"rfilename": path} for path in files]
            tree = [
                {"type": "file", "path": path, "size": len(data), "oid": _hash(data)} for path, data in files.items()
            ]
            about = {"id": name, "modelId": name, "sha": _commit(files), "siblings": listed, "tags": []}
            return self._answer(tree if "tree" in parts else about)
        name, path = "/".join(parts[:2]), "/".join(parts[4:])
        data = self.hub.files.get(name, {}).get(path)
        if parts[2:3] != ["resolve"] or data is None:
            code = "EntryNotFound" if name in self.hub.files else "RepoNotFound"
            return self._answer({"error": path}, 404, {"X-Error-Code": code})
        self._send(data, 200, {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": _commit(self.hub.files[name])})

    do_HEAD = do_GET

    def _answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _hash(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _commit(files: dict[str, bytes]) -> str:
    return _hash(json.dumps({path: _hash(data) for path, data in files.items()}).encode())
