"""Serving: a socket, a loop in a thread of its own, and an orderly end when a signal comes."""

from __future__ import annotations

import asyncio
import errno
import select
import signal
import socket
import threading
import time

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import ConfigError
from .app import Service

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last passes through an mpirun, and leaves it alive
BACKLOG = 128  # connections that wait to be taken, and that asyncio takes, or complains about, at once
SLOW_HEADS = 10  # seconds that a client has to send a request's head, up to its body
SLOW_READERS = 5  # seconds that a client has to take the rest of a finished answer, at the end


def listen(host: str, port: int) -> socket.socket:
    """A socket to serve on; port 0 takes a free one. Raises ConfigError where there is none to be had."""
    listener = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # The protocol is named: only then does asyncio send small packets, such as a token, at once (TCP_NODELAY).
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: a name that no host has
        if listener is not None:
            listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use; choose another with --port") from error
        raise ConfigError(f"{host}:{port}: expected an address to listen on; {error}") from error


class Protocol(H11Protocol):
    """uvicorn's would wait for the rest of a request's head for ever; this one closes the connection after SLOW_HEADS."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        """Start or stop the clock. Between requests, before the next one's first bytes, uvicorn's own, shorter limit holds."""
        if self.conn.their_state is not h11.IDLE:
            if self._due:
                self._due.cancel()
            self._due = None
        elif not self._due:
            self._due = self.loop.call_later(SLOW_HEADS, self.timeout_keep_alive_handler)


def make_server(app: ASGIApp) -> uvicorn.Server:
    config = uvicorn.Config(
        app, http=Protocol, backlog=BACKLOG, ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_graceful_shutdown=SLOW_READERS,
    )  # fmt: skip
    return uvicorn.Server(config)


def serve(service: Service, app: ASGIApp, listener: socket.socket) -> None:
    """Serve until SIGINT, SIGTERM or SIGUSR1; then refuse what comes, let running answers end, and return.

    Answers that take longer than drain_s are cut off; all of them at once, if a second signal comes. Main thread only.
    """
    server = make_server(app)
    heard, told = socket.socketpair()
    told.setblocking(False)

    def run() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            told.send(b"\0")

    # A signal is a byte on a socket, whichever thread it reaches: a lock that Python waits for could miss it.
    waking = signal.set_wakeup_fd(told.fileno())
    previous = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
    try:
        thread = threading.Thread(target=run, name="dsv4-http")
        thread.start()
        heard.recv(1)
        _drain(service, heard)
        server.should_exit = True
        thread.join()
    finally:
        signal.set_wakeup_fd(waking)
        for number, handler in previous.items():
            signal.signal(number, handler)
        heard.close()
        told.close()


def _drain(service: Service, heard: socket.socket) -> None:
    """Wait for running answers, then cut off those that are left."""
    service.closing = True
    end = time.monotonic() + service.limits.drain_s
    while service.tickets and time.monotonic() < end and not select.select([heard], [], [], 0.05)[0]:
        pass
    for ticket in list(service.tickets):
        ticket.cancel()
