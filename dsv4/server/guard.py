"""Guard: what is settled before a request reaches a route: from where it may come, who may ask, and whether it is too late."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .faults import Fault

if TYPE_CHECKING:
    from .app import Service

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PATHS = ("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")  # counted by name


class Guard:
    """ASGI middleware. key: what a client must show, None for nothing; hosts: the names it may call this server by, None
    for any. The names matter on a loopback address: a page that a browser got from elsewhere may know it by another
    name, and must not get through."""

    def __init__(self, app: ASGIApp, service: Service, key: str | None, hosts: tuple[str, ...] | None):
        self.app, self.service, self.hosts = app, service, hosts
        self.key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # the client left before any

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        fault = self._refusal(scope)
        try:
            await (fault.response() if fault else self.app)(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self.service.metrics.requests.labels(path, str(status)).inc()

    def _refusal(self, scope: Scope) -> Fault | None:
        headers, path = dict(scope["headers"]), scope["path"]
        host = headers.get(b"host", b"").decode("latin-1")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self.hosts is not None and name.lower() not in self.hosts:
            return Fault(403, f"host: expected {' or '.join(self.hosts)}; found {name!r}", code="unknown_host")
        if not (path in ("/", "/health") or path.startswith("/page/") or self._knows(headers)):
            return Fault(401, "authorization: expected Bearer and this server's API key", code="invalid_api_key")
        if self.service.closing and scope["method"] == "POST":
            return Fault(503, "the server is closing; ask another", code="closing")
        return None

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        if self.key is None:
            return True
        kind, _, shown = headers.get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(shown.strip(), self.key) and kind.lower() == b"bearer"
