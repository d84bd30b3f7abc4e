"""The command that serves a model over HTTP."""

from __future__ import annotations

import signal
import socket
import sys
from importlib.util import find_spec

import click

from .cli_support import Bars, FiniteRange, engine_options, load_engine, model_option, say, spec_option
from .config import API_KEY, RunConfig, World, environment
from .errors import BackendError, ConfigError, install
from .server.limits import Limits

NEEDS = ("starlette", "uvicorn", "prometheus_client")


@click.command()
@model_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all of this host's.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0: a free one.")
@click.option("--api-key", metavar="KEY", help="Key that clients must send. Better set DSV4_API_KEY: other users can see a process's options.")
@click.option("--name", metavar="NAME", help="The model's name for clients. Default: the directory's.")
@click.option("--max-sessions", type=int, metavar="N",
              help=f"Answers generated side by side, {RunConfig.max_sessions} by default.")  # fmt: skip
@click.option("--max-queue", type=click.IntRange(min=1), default=64, show_default=True, help="Requests that may wait, beside those that run.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="The most tokens of one answer. Default: the context.")
@click.option("--max-body", type=click.IntRange(min=1), default=Limits.max_body >> 10, show_default=True,
              help="Largest request, in KiB.")  # fmt: skip
@click.option("--timeout", type=FiniteRange(min=1), default=Limits.request_s, show_default=True,
              help="Seconds that one answer may take.")  # fmt: skip
@click.option("--drain", type=FiniteRange(min=0), default=Limits.drain_s, show_default=True,
              help="Seconds that running answers have left when the server is stopped.")  # fmt: skip
@click.option("--prefix-cache", type=click.IntRange(min=0), default=256, show_default=True,
              help="MiB of state to keep, so that a prompt that begins like an earlier one need not start anew.")  # fmt: skip
@click.option("--prefix-dir", type=click.Path(file_okay=False), metavar="DIR", help="Also keep that state on disk, for the next start.")
@spec_option
@engine_options
def serve(model, host, port, api_key, name, settings, max_sessions, **limits):
    """Serve a model over HTTP, as OpenAI's clients expect it.

    And a chat page for browsers. Unless --host says otherwise, only this machine can reach it. Ctrl-C ends it once the
    running answers are complete, a second Ctrl-C at once. Started by mpirun, rank 0 serves and the others compute with it.

    \b
    Examples:
      python -m dsv4 serve                                    then open http://127.0.0.1:8000
      DSV4_API_KEY=… python -m dsv4 serve --model DIR --host 0.0.0.0
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
           -d '{"model": "nano", "messages": [{"role": "user", "content": "Hello"}]}'
    """
    key = _key(api_key)
    if limits["prefix_dir"] and not limits["prefix_cache"]:
        raise click.UsageError("--prefix-dir needs a --prefix-cache above 0")
    missing = [package for package in NEEDS if find_spec(package) is None]
    if missing:
        raise BackendError(f"serve: expected {', '.join(NEEDS)}; found no {', '.join(missing)}; {install('serve')}")
    if World.from_env().rank:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # launchers send them to all ranks, and rank 0 ends the job
            signal.signal(number, signal.SIG_IGN)
        load_engine(model, {**settings, "max_sessions": max_sessions}, None)
    from .server.serving import listen

    with listen(host, port) as listener:  # before the load, which may take minutes, as the port may be taken
        with Bars() as bars:
            engine, _ = load_engine(model, {**settings, "max_sessions": max_sessions}, bars)
        with engine:
            _serve(engine, name or _name(model), host, listener, key, limits)


def _key(given: str | None) -> str | None:
    """The API key, None for none. Raises ConfigError for one that no client could send."""
    key = given if given is not None else environment(API_KEY).get(API_KEY)
    if key is not None and (not key.isascii() or not key.isprintable() or not key or " " in key):
        raise ConfigError("API key: expected printable ASCII without spaces, found something else")
    return key


def _name(model: str) -> str:
    from .engine import model_directory

    return model_directory(model).resolve().name


def _serve(engine, name: str, host: str, listener: socket.socket, key: str | None, limits: dict) -> None:
    from .scheduler import Scheduler
    from .server.app import Service, make_app
    from .server.guard import LOOPBACK, Guard
    from .server.serving import serve

    local = host in LOOPBACK
    if not local and key is None:
        print(f"dsv4: {host} can be reached from other machines without an API key: set DSV4_API_KEY", file=sys.stderr)
    bounds = Limits(
        max_tokens=limits["max_tokens"] or engine.max_context, max_body=limits["max_body"] << 10,
        request_s=limits["timeout"], drain_s=limits["drain"],
    )  # fmt: skip
    with Scheduler(
        engine, max_waiting=limits["max_queue"], prefix_bytes=limits["prefix_cache"] << 20,
        prefix_dir=limits["prefix_dir"], spec=limits["spec"],
    ) as scheduler:  # fmt: skip
        service = Service(engine, scheduler, bounds, name)
        app = Guard(make_app(service), service, key, LOOPBACK if local else None)
        shown = f"[{host}]" if ":" in host else host
        say(f"dsv4: {name} at http://{shown}:{listener.getsockname()[1]} (Ctrl-C ends)")
        serve(service, app, listener)
