"""Communicators: the same sums, in the same order, by every transport that can run here (MPI: test_mpi.py)."""

import faulthandler
import sys
import threading

import numpy as np
import pytest
from comm_body import body, parts_of, tree
from fake_nccl import cupy_with_nccl, on_device

from dsv4.comm import Nccl, RankError, Single, Threads, open_communicator
from dsv4.config import World
from dsv4.errors import BackendError


def run_all(jobs):
    """Every job in a thread of its own; the first exception is raised here."""
    failures = []

    def run(job):
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)


def test_single():
    body(Single())


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_threads(size):
    run_all([lambda comm=comm: body(comm) for comm in Threads.group(size)])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_nccl_against_a_stand_in(size):
    controls, wires, calls = Threads.group(size), Threads.group(size), [[] for _ in range(size)]

    def job(rank):
        comm = Nccl(controls[rank], cupy_with_nccl(wires[rank], calls[rank]))
        body(comm, on_device)
        comm.close()

    run_all([lambda rank=rank: job(rank) for rank in range(size)])
    for rank, made in enumerate(calls):
        names = [call[0] for call in made]
        assert ("id" in names) == (rank == 0), "rank 0 makes the id"
        assert ("init", size, ("unique", 7), rank) in made, "and all have it"
        assert names.count("allGather") == (3 if size > 1 else 0), "all parts are gathered; nothing is added on the way"
        if size > 1:
            assert all(call[2:] == (7, 99) for call in made if call[0] == "allGather"), "float32, on CuPy's stream"
            assert names.count("send") == (2 if rank else 0) and names.count("recv") == (0 if rank else 2 * (size - 1))


def test_nccl_without_cupy():
    """Asked for where it cannot be: one line, and nothing was imported before."""
    with pytest.raises(BackendError, match="NCCL: expected CuPy with NCCL"):
        Nccl(Single())


def test_the_order_of_a_sum_matters():
    """The numbers of the body are such that another order shows."""
    parts = parts_of(8)
    assert tree(list(parts)).tobytes() != parts.sum(axis=0).tobytes()
    assert tree(list(parts)).tobytes() != tree(list(parts[[0, 4, 2, 6, 1, 5, 3, 7]])).tobytes()


def test_a_rank_that_does_not_come():
    comm = Threads.group(2)[0]
    comm.patience = 0.2
    with pytest.raises(RankError, match="rank 1 did not answer"):
        comm.everyone(None)


def test_traffic_is_counted():
    comms = Threads.group(4)
    y = np.ones((2, 10), np.float32)
    run_all([lambda comm=comm: comm.sum_parts(y, 4) for comm in comms])
    assert [(c.traffic.messages, c.traffic.bytes, c.traffic.sums) for c in comms] == [(2, 160, 1)] * 4


def test_where_mpi4py_is_missing_nothing_is_left_behind(monkeypatch):
    """The clock that would end a wait for the others is stopped, and the next try fails for the same reason."""
    armed = []
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: armed.append(True))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", armed.clear)
    for _ in range(2):
        with pytest.raises(BackendError, match="mpi4py cannot be loaded"):
            open_communicator(World(0, 2))
        assert not armed
