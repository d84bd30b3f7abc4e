"""A program for mpirun: generates, and lets one rank fail at one point.

    mpi_job.py MODEL [RANK PHASE FAULT]

PHASE: load, forward, draft, verify or idle. FAULT: kill, raise, stop (the process is stopped), hang (it sleeps),
interrupt (Ctrl-C); slow is none: it computes for 7 seconds, then all goes on. Prints "struck" and the time.
"""

import os
import signal
import sys
import threading
import time

import dsv4
from dsv4 import dspark, loading, model
from dsv4.config import World

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}


def strike(fault):
    print(f"struck {time.time()}", flush=True)
    if fault == "slow":
        end = time.time() + 7
        while time.time() < end:
            pass
        return
    if fault == "raise":
        raise ValueError("struck")
    if fault == "hang":
        time.sleep(1000)
    os.kill(os.getpid(), SIGNALS[fault])
    time.sleep(0.1)  # where the signal is heard


def before(owner, name, fault, when=lambda *arguments: True):
    """Let the fault happen before a function runs."""
    original = getattr(owner, name)

    def struck(*arguments, **named):
        if when(*arguments):
            strike(fault)
        return original(*arguments, **named)

    setattr(owner, name, struck)


def arm(phase, fault):
    if phase == "load":
        before(loading, "load_weights", fault)
    elif phase == "forward":
        before(model.Model, "forward", fault)
    elif phase == "draft":
        before(dspark.Draft, "draft", fault)
    elif phase == "verify":  # rows of a drafted block; the prompt has more
        before(model.Model, "forward", fault, lambda self, step, pool: 1 < len(step) < 8)
    else:
        threading.Timer(3, strike, (fault,)).start()


def main():
    path, *fault = sys.argv[1:]
    if fault and World.from_env().rank == int(fault[0]):
        arm(*fault[1:])
    with dsv4.Engine.load(path, threads=1, max_context=128) as engine:
        params = dsv4.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        print(*(step.token for step in engine.generate(range(20), params, spec="always")), flush=True)
        if "idle" in fault:
            time.sleep(60)


if __name__ == "__main__":
    main()
