"""A scheduler that says what a test tells it to, and a server around it on a free port."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

from dsv4.generate import RoundRecord, Step
from dsv4.server.app import Service, make_app
from dsv4.server.guard import LOOPBACK, Guard
from dsv4.server.limits import Limits
from dsv4.server.metrics import COUNTERS, GAUGES
from dsv4.server.serving import listen, make_server


class FakeTicket:
    """Gives the script's steps: strings are texts of a step, exceptions are raised, events are waited for."""

    def __init__(self, script):
        self.script = script
        self.cancelled = threading.Event()

    def __iter__(self):
        for item in self.script:
            if isinstance(item, threading.Event):
                while not (item.wait(0.01) or self.cancelled.is_set()):
                    continue
            elif isinstance(item, Exception):
                raise item
            if self.cancelled.is_set():
                return
            if isinstance(item, Step):
                yield item

    def cancel(self):
        self.cancelled.set()


class FakeScheduler:
    """submit() answers with `script`, or raises it; `requests` and `tickets` are what came and what was given."""

    def __init__(self):
        self.script, self.requests, self.tickets = [], [], []
        self.broken = False

    def submit(self, request):
        self.requests.append(request)
        if isinstance(self.script, Exception):
            raise self.script
        self.tickets.append(FakeTicket(self.script))
        return self.tickets[-1]

    def stats(self):
        return dict.fromkeys([*GAUGES, *COUNTERS], 7)


def until(condition, seconds=30):
    """Wait for what another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def steps(texts, reason="stop", cached=0, **fields):
    """A step per text, the last with a finish reason; every two steps are a round."""
    found = []
    for i, text in enumerate(texts):
        record = RoundRecord((i + 1) // 2, (1, 2, 3), (0.5, -1.0, 2.0), 2, 1) if i else None
        last = i == len(texts) - 1
        usage = {"prompt_tokens": 1, "completion_tokens": len(texts), "cached_tokens": cached} if last else None
        found.append(Step(65 + i % 26, text, round=record, finish_reason=reason if last else None, usage=usage, **fields))
    return found


@contextmanager
def running(app):
    """An address that serves `app` meanwhile."""
    with listen("127.0.0.1", 0) as listener:
        server = make_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def served(engine, scheduler, key=None, hosts=LOOPBACK, model="nano", **limits):
    """(address, Service) of a server over a scheduler."""
    service = Service(engine, scheduler, Limits(**{"max_tokens": engine.max_context, **limits}), model)
    with running(Guard(make_app(service), service, key, hosts)) as address:
        yield SimpleNamespace(address=address, service=service)
