"""Bridge: the steps of a ticket, from the scheduler's blocking iterator to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

from ..generate import Step
from ..scheduler import Ticket


async def batches(ticket: Ticket) -> AsyncIterator[list[Step]]:
    """Lists of steps, each with all that came since the one before. Raises what the ticket raises.

    A thread per ticket waits for it; it ends when the ticket does, so whoever leaves early cancels the ticket.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue()

    def wait() -> None:
        end: Exception | None = None
        # RuntimeError: the loop was closed meanwhile, by a server that was told twice to stop. Nobody listens then.
        with suppress(RuntimeError):
            try:
                for step in ticket:
                    loop.call_soon_threadsafe(arrived.put_nowait, step)
            except Exception as error:
                end = error
            loop.call_soon_threadsafe(arrived.put_nowait, end)

    threading.Thread(target=wait, name="dsv4-ticket", daemon=True).start()
    while True:
        came = [await arrived.get()]
        while not arrived.empty():
            came.append(arrived.get_nowait())
        steps = [item for item in came if isinstance(item, Step)]
        if steps:
            yield steps
        if len(steps) < len(came):
            if came[-1] is not None:
                raise came[-1]
            return
