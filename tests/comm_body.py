"""What every communicator does, as one body for all of them. Under mpirun: python comm_body.py [nccl]."""

import sys

import numpy as np
from compare import same_bits


def parts_of(size, rows=3, width=50):
    """Numbers whose sum depends on the order of adding, per rank."""
    rng = np.random.default_rng(size)
    return (rng.standard_normal((size, rows, width)) * 10.0 ** rng.integers(-4, 5, (size, rows, width))).astype(np.float32)


def tree(parts):
    """Neighbours first, lower ranks on the left: the order that is promised."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[0::2], parts[1::2])]
    return parts[0]


def body(comm, device=lambda array: array, host=np.asarray):
    """device, host: NumPy arrays to where the communicator's arrays live, and back."""
    rank, size = comm.rank, comm.size
    for rows in (1, 3, 130):
        parts = parts_of(size, rows)
        same_bits(host(comm.sum_parts(device(parts[rank]), size)), tree(list(parts)), f"sum of {rows} rows")
    whole = device(parts[rank])
    assert comm.sum_parts(whole, 1) is whole, "a part that is computed whole is not exchanged"
    bounds = [10 * r // size + 3 * r for r in range(size + 1)]  # unequal widths
    columns = np.arange(2 * bounds[-1], dtype=np.float32).reshape(2, -1)
    mine = device(np.ascontiguousarray(columns[:, bounds[rank] : bounds[rank + 1]]))
    for _ in range(2):
        joined = comm.join(mine)
        assert (joined is None) == (rank > 0)
        if rank == 0:
            same_bits(host(joined), columns, "joined")
    nothing = comm.join(mine[:0])
    assert nothing is None if rank else nothing.shape[0] == 0
    for message in (b"", b"go", bytes(300_000)):
        assert bytes(comm.broadcast(message if rank == 0 else None)) == message
    assert comm.everyone({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert comm.traffic.sums == 3 * (size > 1)


def main():
    from dsv4.comm import Mpi, Nccl
    from dsv4.config import World

    comm = Mpi(World.from_env())
    if "nccl" in sys.argv:
        import cupy

        cupy.cuda.Device(comm.rank).use()
        comm = Nccl(comm)
        body(comm, cupy.asarray, cupy.asnumpy)
    else:
        body(comm)
    comm.close()
    print("rank", comm.rank, "done", flush=True)


if __name__ == "__main__":
    main()
