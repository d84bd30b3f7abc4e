"""App: the routes, from a request's bytes to an answer's."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..errors import CapacityError, ConfigError, Dsv4Error, InputError, StateError
from ..generate import prompt_tokens
from ..scheduler import Request, Scheduler, Ticket
from .asked import Asked, read_chat, read_completion
from .bridge import batches
from .chat_reply import ChatReply
from .faults import Fault
from .fields import read_json
from .limits import Limits
from .metrics import Metrics
from .replies import Reply

LOG = logging.getLogger("dsv4.server")
LARGE = 64 << 10  # bytes of a body that takes a while to cut into tokens; one such at a time, so that threads are left for others
LAST_WORDS = 5  # seconds that a client has to read why its answer was cut off
PAGE = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/app.js": ("app.js", "text/javascript"),
    "/page/stream.js": ("stream.js", "text/javascript"),
    "/page/rounds.js": ("rounds.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class Service:
    """What the routes share: the engine's facts, the scheduler, the limits; and what is being answered now."""

    def __init__(self, engine: Any, scheduler: Scheduler, limits: Limits, model: str):
        self.engine, self.scheduler, self.limits, self.model = engine, scheduler, limits, model
        self.fingerprint = f"dsv4-{__version__}-{engine.identity[:8]}"
        self.started = int(time.time())
        self.metrics = Metrics(scheduler.stats)
        self.closing = False
        self.failed = False  # something broke that no request was to blame for
        self.tickets: set[Ticket] = set()  # of requests being answered
        self._large = asyncio.Lock()

    # ------------------------------------------------------------------ generation
    async def completion(self, http: HttpRequest) -> Answer:
        body = await self._body(http)
        return await self._start(http, body, lambda: read_completion(read_json(body), self.model, self.limits), Reply)

    async def chat(self, http: HttpRequest) -> Answer:
        if self.engine.tokenizer is None:
            raise Fault(400, "messages: the checkpoint has no tokenizer.json; use /v1/completions with token ids", "messages")
        body = await self._body(http)
        return await self._start(
            http, body, lambda: read_chat(read_json(body), self.model, self.limits, self.engine.tokenizer), ChatReply
        )

    async def _body(self, http: HttpRequest) -> bytes:
        """The body, which says that it is JSON. Raises Fault: 415, 413 for too much of it, 408 for too late."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another site can send other types unasked, but not this one
            raise Fault(415, f"content-type: expected application/json; found {kind!r}")
        too_large = Fault(413, f"body: expected at most {self.limits.max_body} bytes; found more", code="body_too_large")
        declared = http.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self.limits.max_body:
            raise too_large
        body = bytearray()

        async def read() -> None:
            async for part in http.stream():
                body.extend(part)
                if len(body) > self.limits.max_body:
                    raise too_large

        try:
            await asyncio.wait_for(read(), self.limits.body_s)
        except asyncio.TimeoutError as error:
            raise Fault(408, f"body: expected it within {self.limits.body_s:g} s", code="timeout") from error
        return bytes(body)

    async def _start(self, http: HttpRequest, body: bytes, read: Callable[[], Asked], form: type[Reply]) -> Answer:
        """Read the request and hand it to the scheduler; both may take a while, so not on the event loop."""

        def submit() -> Answer:
            asked = read()
            tokens = prompt_tokens(self.engine, asked.prompt)
            if asked.sampling.logprobs is not None and self.engine.tokenizer is None:
                raise Fault(400, "logprobs: the checkpoint has no tokenizer.json, so tokens have no names", "logprobs")
            reply = form(asked, self.engine.tokenizer, self.model, self.fingerprint, len(tokens))
            return Answer(self, self.scheduler.submit(Request(tokens, asked.sampling)), reply)

        large = len(body) > LARGE
        async with self._large if large else nullcontext():
            if large and await http.is_disconnected():
                raise ClientDisconnect
            answer = await asyncio.to_thread(submit)
        self.tickets.add(answer.ticket)
        return answer

    # ------------------------------------------------------------------ the rest
    async def list_models(self, http: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def one_model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name != self.model:
            raise Fault(404, f"model: expected {self.model}; found {name!r}", "model", "model_not_found")
        return _json(self._model())

    def _model(self) -> dict:
        context = {"max_context": self.engine.max_context, "max_tokens": self.limits.max_tokens}
        return {"id": self.model, "object": "model", "created": self.started, "owned_by": "dsv4", **context}

    async def health(self, http: HttpRequest) -> Response:
        status = "failed" if self.failed or self.scheduler.broken else "closing" if self.closing else "ok"
        return _json({"status": status}, 200 if status == "ok" else 503)

    async def show_metrics(self, http: HttpRequest) -> Response:
        return Response(self.metrics.text(), headers={"content-type": self.metrics.content_type})

    def fault_of(self, error: BaseException) -> Fault:
        """An error as the answer to one request. What no request is to blame for is logged and told in general words."""
        if isinstance(error, Fault):
            return error
        if isinstance(error, CapacityError):
            return Fault(429, str(error), code="busy")
        if isinstance(error, StateError):
            return Fault(503, str(error), code="closing")
        if isinstance(error, (InputError, ConfigError)):
            place = str(error).partition(":")[0]
            return Fault(400, str(error), None if " " in place else place)
        self.failed = True
        LOG.error("a request failed", exc_info=error)
        return Fault(500, "something broke; the server's log says what", code="internal_error")


class Answer:
    """The response to a request that the scheduler has taken: an ASGI application for one request.

    However it ends (sent, refused, out of time, the client gone), the ticket is cancelled: that frees its slot.
    """

    def __init__(self, service: Service, ticket: Ticket, reply: Reply):
        self.service, self.ticket, self.reply = service, ticket, reply
        self.start = time.monotonic()
        self.begun = False  # the status is out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._stream(send) if self.reply.asked.stream else self._whole(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        limit = self.service.limits.request_s
        try:
            await asyncio.wait({work, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                fault = self.service.fault_of(work.exception()) if work.exception() else None
            elif gone.done():
                self.service.metrics.disconnects.inc()
                return
            else:
                self.ticket.cancel()
                await _ended(work)
                fault = Fault(504, f"the answer was not complete within {limit:g} s", code="timeout")
            if fault:  # a client that does not read does not hear it either
                work = asyncio.ensure_future(self._fail(fault, scope, receive, send))
                await asyncio.wait({work, gone}, timeout=LAST_WORDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.ticket.cancel()
            self.service.tickets.discard(self.ticket)
            await _ended(work)
            await _ended(gone)

    async def _batches(self) -> AsyncIterator[None]:
        """One turn per batch of steps, once the reply has taken it; the last has a finish_reason."""
        async with aclosing(batches(self.ticket)) as source:
            async for steps in source:
                if not self.reply.count:
                    self.service.metrics.first_token.observe(time.monotonic() - self.start)
                for step in steps:
                    self.reply.push(step)
                    if self.reply.finish_reason:
                        break
                yield
                if self.reply.finish_reason:
                    self.service.metrics.whole.observe(time.monotonic() - self.start)
                    return
        raise Fault(503, "the server is closing: the answer was cut off", code="closing")

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._batches()) as turns:
            async for _ in turns:
                pass
        self.begun = True
        await _json(self.reply.whole())(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Begins at once, so that a client knows that it was taken, however long it waits and its prompt is."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        self.begun = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self.reply.pending:
            await _event(send, self.reply.chunk())
        async with aclosing(self._batches()) as turns:
            async for _ in turns:
                if self.reply.pending:
                    await _event(send, self.reply.chunk())
        if self.reply.asked.include_usage:
            await _event(send, self.reply.last_chunk())
        await _event(send, None)

    async def _fail(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.begun:
            await fault.response()(scope, receive, send)
        elif self.reply.asked.stream:
            await _event(send, fault.body())
            await _event(send, None)


async def _event(send: Send, data: dict | None) -> None:
    """A server-sent event; None ends the stream."""
    text = "[DONE]" if data is None else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": data is not None})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(task: asyncio.Future) -> None:
    """Cancel a task and wait until it is over; what it raised was looked at where it matters."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _json(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content, ensure_ascii=False).encode(), status, media_type="application/json")


def make_app(service: Service) -> Starlette:
    """The ASGI application, without the guard."""

    def page(name: str, kind: str) -> Callable[[HttpRequest], Awaitable[Response]]:
        content = (PAGE / name).read_bytes()

        async def show(http: HttpRequest) -> Response:
            return Response(content, headers=PAGE_HEADERS, media_type=kind)

        return show

    async def refuse(http: HttpRequest, error: Exception) -> Response:
        return service.fault_of(error).response()

    async def left(http: HttpRequest, error: ClientDisconnect) -> Response:
        service.metrics.disconnects.inc()
        return Fault(400, "body: expected all of it; found an end before").response()  # nobody reads this

    async def unknown(http: HttpRequest, error: HTTPException) -> Response:
        headers = {name: ", ".join(sorted(value.split(", "))) for name, value in (error.headers or {}).items()}
        expected = headers.get("Allow", "a path of this server, see docs/server.md")  # which a 405 has
        found = http.method if error.status_code == 405 else repr(http.url.path)
        response = Fault(error.status_code, f"expected {expected}; found {found}").response()
        response.headers.update(headers)
        return response

    return Starlette(
        routes=[
            Route("/v1/completions", service.completion, methods=["POST"]),
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/models", service.list_models),
            Route("/v1/models/{name:path}", service.one_model),
            Route("/health", service.health),
            Route("/metrics", service.show_metrics),
            *(Route(path, page(*file)) for path, file in PAGE_FILES.items()),
        ],
        exception_handlers={
            Fault: refuse, Dsv4Error: refuse, Exception: refuse, HTTPException: unknown, ClientDisconnect: left
        },
    )
