"""What counts as a rank's work: see dsv4/watch.py."""

import threading
import time
from types import SimpleNamespace

import pytest

from dsv4.watch import WORK, Watch


def burn(seconds):
    """Use that much of this thread's processor time."""
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass


def rank(**extra):
    return SimpleNamespace(rank=1, size=2, turns=0, idle=False, patience=600.0, **extra)


def test_the_watching_thread_is_no_sign_of_work():
    """Its beats add up: were they counted, a rank that hangs would be given up seconds later now and then."""
    watch = Watch(rank())
    watch.standstill()
    for _ in range(4):
        burn(WORK)
        age = watch.standstill()
    assert age >= 4 * WORK


def work(how, watch):
    if how == "computes":
        worker = threading.Thread(target=burn, args=(2 * WORK,))
        worker.start()
        worker.join()
    elif how == "exchanges":
        watch.comm.turns += 1
    elif how == "is idle":
        watch.comm.idle = True


@pytest.mark.parametrize("how", ["computes", "exchanges", "is idle", "hangs"])
def test_signs_of_work(how):
    watch = Watch(rank())
    watch.standstill()
    burn(WORK)
    work(how, watch)
    assert (watch.standstill() == 0.0) == (how != "hangs")


def test_computing_without_ever_meeting_the_others_is_given_up():
    watch = Watch(rank())
    watch.standstill()
    watch.comm.patience = WORK
    burn(WORK)
    work("computes", watch)
    assert watch.standstill() >= WORK
