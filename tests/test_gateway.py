"""deploy/haproxy.cfg sends requests to servers by their model's name, streams as they are written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket

import pytest

CONFIG = Path(__file__).resolve().parent.parent / "deploy" / "haproxy.cfg"
pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy (apt-get install haproxy)")


def named(name: str) -> ThreadingHTTPServer:
    """A server that answers with its name, and the second part of a stream only once the first has arrived."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        arrived = threading.Event()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\n\r\n" % (len(name) + 1, name.encode()))
            self.wfile.flush()
            self.arrived.wait(30)
            self.wfile.write(b"4\r\nend\n\r\n0\r\n\r\n")

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[str, list[ThreadingHTTPServer]]]:
    """The gateway's address, with the configuration's ports replaced by free ones, and the servers behind it."""
    servers = [named("full"), named("fast")]
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = CONFIG.read_text("utf-8").replace("bind :8000", f"bind 127.0.0.1:{port}")
    for old, server in zip(("8001", "8002"), servers, strict=True):
        text = re.sub(rf"127\.0\.0\.1:{old}", f"127.0.0.1:{server.server_port}", text)
    (tmp_path / "haproxy.cfg").write_text(text, encoding="utf-8")
    process = subprocess.Popen(["haproxy", "-db", "-f", str(tmp_path / "haproxy.cfg")], stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", servers
    finally:
        process.kill()
        process.wait()
        for server in servers:
            server.shutdown()


@pytest.mark.parametrize("prompt", ["a", "a" * 200_000], ids=["short", "long"])
@pytest.mark.parametrize(("model", "name"), [("m:1x", "full"), ("m:3x", "fast"), ("m", "fast")])
def test_the_name_decides(gateway: tuple[str, list[ThreadingHTTPServer]], model: str, name: str, prompt: str) -> None:
    """However long the prompt is, and wherever in the body the name stands."""
    url, servers = gateway
    body = json.dumps({"prompt": prompt, "model": model}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.readline() == f"{name}\n".encode()  # before the server has written the rest
        for server in servers:
            server.RequestHandlerClass.arrived.set()  # type: ignore[attr-defined]
        assert answer.readline() == b"end\n"
