"""The store: random steps against all experts in memory, late copies, missing waits, files and stages that fail."""

import threading

import numpy as np
import pytest
from compare import same_bits
from staging_stages import INNER, SLICES, D, FileExperts, LateStage

from dsv4._cpu import Bank
from dsv4.errors import BackendError, CheckpointError, ConfigError, InputError
from dsv4.experts import store
from dsv4.experts.cache import Cache
from dsv4.experts.store import Store, slots_for, sum_bytes
from dsv4.ops import open_ops
from dsv4.ops.staging import HostStage

K, MANY = 2, 4  # experts of a row: as the store is told, and where order matters (a sum of two has none)
BANKS = {"layers.0.": 12, "layers.1.": 12, "layers.2.": 12, "mtp.0.": 9}


class Model:
    """Banks of one set of experts: in memory (`plain`), and in a store whose stage is `stage`."""

    def __init__(self, path, slots, threads=1, make_stage=LateStage, backend="cpu"):
        self.ops, self.source = open_ops(backend, threads=threads), FileExperts(path, BANKS)
        rng = np.random.default_rng(1)
        self.fixed = rng.integers(0, 12, (40, K)).astype(np.int64)
        self.calls = 0
        if make_stage:
            self.ops.stage = lambda slots, size: make_stage(slots, size, clock=lambda: self.calls)
        self.store = Store(self.ops, self.source, slots, K, threads)
        self.stage = self.store._stage
        self.plain, self.staged = {}, {}
        for number, prefix in enumerate(BANKS):
            shared = tuple(
                self.ops.matrix("fp8", rng.integers(0, 0x60, (n, k), np.uint8), np.full((-(-n // 128), -(-k // 128)), 118, np.uint8))
                for n, k in ((INNER, D), (D, INNER), (INNER, D))
            )
            self.plain[prefix] = self.ops.bank(self.source.matrices(self.ops, prefix), shared)
            self.staged[prefix] = self.store.bank(prefix, shared, self.fixed if number < 2 else None)

    def step(self, rng, most=12):
        """A forward of random rows through all banks; differences are raised."""
        tokens = rng.integers(0, 40, int(rng.integers(1, most + 1)))
        self.store.begin(tokens)
        for prefix in BANKS:
            if self.staged[prefix].fixed is not None:
                ids = np.sort(self.fixed[tokens], axis=1).astype(np.int32)
            else:
                n = BANKS[prefix]
                ids = np.stack([np.sort(rng.choice(n, MANY, replace=False)) for _ in tokens]).astype(np.int32)
            x = rng.standard_normal((len(tokens), D), np.float32)
            weights = rng.random(ids.shape, np.float32)
            expected = self.ops.moe(x, ids, weights, self.plain[prefix], 7.0, SLICES)
            assert np.isfinite(expected).all() and expected.any()
            found = self.store.moe(x, ids, weights, self.staged[prefix], 7.0, SLICES)
            same_bits(found, expected, prefix)

    def run(self, seed, steps, most=12):
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            self.step(rng, most)


ALL = sum(BANKS.values())


@pytest.mark.parametrize("threads, sums", [(1, 64), (2, 64), (3, 5), (4, 1)])
@pytest.mark.parametrize("slots", [K, K + 1, 2 * K, 7, 20, ALL])
def test_random_steps_give_the_bits_of_resident_experts(tmp_path, monkeypatch, slots, threads, sums):
    """sums: there is room for so many."""
    monkeypatch.setattr(store, "SUMS", 4 * SLICES * D * sums)
    model = Model(tmp_path / "experts", slots, threads)
    model.store.hold([model.staged["mtp.0."]])
    model.run(seed=slots + threads, steps=12)
    assert not model.stage.early
    counted = model.store.counters
    assert counted.bytes_staged >= counted.misses * model.source.layout.nbytes > 0 and counted.stall_s > 0
    assert model.store._cache.room() == slots - held(slots)  # nothing is left pinned


def held(slots):
    return min(BANKS["mtp.0."], max(0, min(slots // 2, slots - 2 * K)))


def test_the_reference_backend_too(tmp_path):
    Model(tmp_path / "experts", 6, backend="reference").run(seed=3, steps=4, most=5)


@pytest.mark.parametrize("left_out", ["free", "settle"])
def test_a_wait_that_is_left_out_changes_bits(tmp_path, left_out):
    """The control: without the wait before a buffer is written again, or before computing, the stress test fails."""
    waits = {"free", "settle"} - {left_out}
    model = Model(tmp_path / "experts", 2 * K, 2, lambda *a, **k: LateStage(*a, delay=5e-3, waits=waits, **k))
    with pytest.raises(AssertionError, match="differ"):
        model.run(seed=1, steps=20)


def test_copies_come_after_the_work_that_reads_the_slot(tmp_path, monkeypatch):
    """A mark that is taken too early is noticed by this stage."""
    for early in (False, True):
        model = Model(tmp_path / "experts", 5)
        model.ops.bank = lambda experts, shared, make=model.ops.bank: ([*experts], make(experts, shared))

        def noting(compute):
            def call(*given):
                given = list(given)
                at = next(i for i, one in enumerate(given) if isinstance(one, (tuple, Bank)))
                if isinstance(given[at], tuple):  # of the store
                    model.calls += 1
                    experts, given[at] = given[at]
                    for slot, matrices in enumerate(model.store._matrices):
                        if any(matrices is one for one in experts):
                            model.stage.used[slot] = model.calls
                return compute(*given)

            return call

        for name in ("moe", "moe_add"):
            monkeypatch.setattr(model.ops, name, noting(getattr(model.ops, name)))
        if early:
            model.stage.mark = lambda: 0
        model.run(seed=2, steps=6)
        assert bool(model.stage.early) == early and model.calls > 50


# ---------------------------------------------------------------------- faults
def test_a_file_that_shrinks_is_one_clear_line_and_the_store_goes_on(tmp_path):
    model = Model(tmp_path / "experts", 6, 2)
    model.run(seed=1, steps=2)
    whole = (tmp_path / "experts").read_bytes()
    with open(tmp_path / "experts", "r+b") as file:
        file.truncate(len(whole) // 3)
        for seed in range(3):
            with pytest.raises(CheckpointError, match=r"experts: \S+: expected whole tensors.*found the end of the file") as caught:
                model.run(seed=seed, steps=4)
            assert "\n" not in str(caught.value)
        file.write(whole)
    model.run(seed=5, steps=6)
    assert model.store._cache.room() == 6


def test_a_file_that_is_whole_again_is_enough_for_the_next_forward(tmp_path):
    """What a failed forward had sent for ahead does not fail the next one."""
    model, tokens = Model(tmp_path / "experts", 30), np.array([3, 4, 5])
    whole = (tmp_path / "experts").read_bytes()
    with open(tmp_path / "experts", "r+b") as file:
        file.truncate(0)
        model.store.begin(tokens)
        loads = list(model.store._loads.values())
        assert {load.bank for load in loads} == {0, 1} and all(load.done.exception(30) for load in loads)
        with pytest.raises(CheckpointError):
            model.store.moe(np.ones((1, D), np.float32), model.fixed[tokens[:1]].astype(np.int32), np.ones((1, K), np.float32),
                            model.staged["layers.0."], 7.0, SLICES)  # fmt: skip
        file.write(whole)
    model.run(seed=0, steps=3)
    assert model.store._cache.room() == 30


@pytest.mark.parametrize("place", ["pin", "submit", "_send", "_wait", "_release", "count", "age"])
def test_an_interrupt_anywhere_leaves_a_store_that_works(tmp_path, place):
    """Before or after any step: nothing stays pinned, and nothing is taken for resident that did not come."""
    model = Model(tmp_path / "experts", 6)
    owner = next(o for o in (model.store, model.store._cache, model.store._reader) if hasattr(o, place))
    good, calls = getattr(owner, place), []

    def interrupted(*arguments):
        calls.append(None)
        if len(calls) % 3 == 1:
            raise KeyboardInterrupt
        result = good(*arguments)
        if len(calls) % 3 == 2:
            raise KeyboardInterrupt
        return result

    for seed in range(12):
        setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.run(seed, steps=3)
        setattr(owner, place, good)
        model.run(seed, steps=1)
        assert model.store._cache.room() == 6


def test_a_nan_scale_is_found_when_it_is_read(tmp_path):
    model = Model(tmp_path / "experts", 6)
    expert = model.source.first["layers.2."] + 5
    with open(tmp_path / "experts", "r+b") as file:
        file.seek(expert * model.source.layout.nbytes + model.source.layout.starts[3] + 77)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match=r"layers\.2\.5\.3: .*NaN \(0xFF\) scale"):
        model.run(seed=1, steps=9)


@pytest.mark.parametrize("method", ["send", "free"])
def test_a_stage_that_fails_is_heard_in_the_forward(tmp_path, method):
    model = Model(tmp_path / "experts", 6, 2)
    good, calls = getattr(model.stage, method), []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) % 5 == 4:
            raise BackendError("copy: the device is gone")
        return good(*arguments)

    setattr(model.stage, method, failing)
    rng, failed = np.random.default_rng(0), 0
    for _ in range(12):
        try:
            model.step(rng)
        except BackendError as error:
            failed += 1
            assert str(error) == "copy: the device is gone"
    assert failed > 3
    setattr(model.stage, method, good)
    rng = np.random.default_rng(1)
    for _ in range(9):  # what was sent ahead may still have to say so, once
        try:
            model.step(rng)
        except BackendError:
            failed += 1
    model.run(seed=2, steps=4)


def test_an_error_in_the_computation_leaves_nothing_pinned(tmp_path):
    model = Model(tmp_path / "experts", 6)
    with pytest.raises(InputError):
        model.store.moe(np.zeros((3, D + 8), np.float32), np.array([[0, 1], [2, 3], [4, 5]], np.int32),
                        np.ones((3, 2), np.float32), model.staged["layers.2."], 7.0, SLICES)  # fmt: skip
    assert model.store._cache.room() == 6
    model.run(seed=1, steps=2)


# ---------------------------------------------------------------------- what is fetched, and when
class Road:
    """What keeps a layer's experts from being read until others have been computed; and which have (−1: the shared one).

    wanted: of the first read, of the second …; what may be read at once: [].
    """

    def __init__(self, model, monkeypatch, wanted=()):
        self.model, self.wanted, self.computed, self.changed = model, iter(wanted), [], threading.Condition()
        self.add, self.free = model.ops.moe_add, model.stage.free
        monkeypatch.setattr(model.ops, "moe_add", self.compute)
        monkeypatch.setattr(model.stage, "free", self.read)

    def compute(self, sums, where, x, ids, weights, bank, limit, shared):
        self.add(sums, where, x, ids, weights, bank, limit, shared)
        with self.changed:
            self.computed += [*self.experts, *([-1] if shared else [])]
            self.changed.notify()

    def read(self, half):
        wanted = set(next(self.wanted, []))
        with self.changed:
            assert self.changed.wait_for(lambda: wanted <= set(self.computed), 20), f"{wanted} before {self.computed}"
        self.free(half)

    def go(self, ids):
        """A layer of rows that choose these, against all experts in memory → the experts computed, in order."""
        model, ids, bank = self.model, np.array(ids, np.int32), "layers.2."
        choices = model.store._choices

        def noting(chosen, which, experts, slots):
            self.experts = experts.tolist()
            return choices(chosen, which, experts, slots)

        model.store._choices = noting
        rng = np.random.default_rng(len(ids))
        given = rng.standard_normal((len(ids), D), np.float32), ids, rng.random(ids.shape, np.float32)
        found = model.store.moe(*given, model.staged[bank], 7.0, SLICES)
        same_bits(found, model.ops.moe(*given, model.plain[bank], 7.0, SLICES))
        return self.computed


@pytest.mark.parametrize("stage", [HostStage, LateStage])
@pytest.mark.parametrize("here, ids", [
    ([5, 6], [[1, 5, 6, 9]]), ([5, 6], [[5, 9, 10]]), ([5, 6], [[1, 2, 3]]), ([1, 5], [[1, 9, 10], [2, 5, 9], [1, 2, 3]]),
])  # fmt: skip
def test_what_is_there_computes_while_the_rest_travels(tmp_path, monkeypatch, stage, here, ids):
    """No expert is read before the shared one and those that are there have been computed, also for a single row."""
    model = Model(tmp_path / "experts", 8, make_stage=lambda slots, size, **_: stage(slots, size))
    model.store.moe(np.ones((1, D), np.float32), np.array([here], np.int32), np.ones((1, K), np.float32), model.staged["layers.2."],
                    7.0, SLICES)  # fmt: skip
    needed = set(np.ravel(ids).tolist())
    road = Road(model, monkeypatch, [{-1, *needed} & {-1, *here}])
    assert sorted(road.go(ids)) == sorted({-1, *needed})


def test_an_expert_computes_while_the_next_one_travels(tmp_path, monkeypatch):
    model = Model(tmp_path / "experts", 8)
    road = Road(model, monkeypatch, [[-1], [3], [3, 4], [3, 4, 8]])
    assert road.go([[3, 8], [4, 11]]) == [-1, 3, 4, 8, 11]


def test_a_file_that_shrinks_under_way(tmp_path, monkeypatch):
    """After what is there has been computed: one line, nothing pinned, and the next forward may try again."""
    model = Model(tmp_path / "experts", 8)
    road = Road(model, monkeypatch, [[], [], [-1, 5]])
    road.go([[5, 6]])
    road.computed.clear()
    whole = (tmp_path / "experts").read_bytes()
    with open(tmp_path / "experts", "r+b") as file:
        free, sizes = model.stage.free, iter([0])
        monkeypatch.setattr(model.stage, "free", lambda half: (free(half), [file.truncate(n) for n in sizes]))
        with pytest.raises(CheckpointError, match=r"experts: layers\.2\.1\.0: expected whole tensors.*found the end of the file") as caught:
            road.go([[1, 5], [2, 5]])
        assert "\n" not in str(caught.value) and road.computed == [5, -1] and model.store._cache.room() == 8
        file.write(whole)
        file.flush()
        monkeypatch.setattr(model.stage, "free", free)
        road.go([[1, 5], [2, 5]])


@pytest.mark.parametrize("slots, rows", [(K, 12), (2 * K, 12), (7, 40), (11, 40)])
def test_rows_beyond_the_room_for_sums_read_an_expert_once(tmp_path, monkeypatch, slots, rows):
    """Experts ascending, each for all rows; and what is there stays for its turn."""
    model, size = Model(tmp_path / "experts", slots), 4 * SLICES * D
    rng = np.random.default_rng(slots)
    ids = np.stack([np.sort(rng.choice(12, MANY, replace=False)) for _ in range(rows)])
    needed = np.unique(ids)
    for turn, room in enumerate((size * rows, size * rows // 3)):
        monkeypatch.setattr(store, "SUMS", room)
        before = model.store.counters.bytes_staged
        assert Road(model, monkeypatch).go(ids) == [*needed, -1]
        read = (model.store.counters.bytes_staged - before) // model.source.layout.nbytes
        assert read == len(needed) if not turn else read <= len(needed) - max(0, slots - 2 * K)


def test_sums_take_no_more_than_was_planned(tmp_path, monkeypatch):
    model, row = Model(tmp_path / "experts", 7), 4 * SLICES * D
    monkeypatch.setattr(store, "SUMS", 11 * row)  # two rows whose every choice has a sum, or any number with one each
    begin, taken = model.ops.moe_begin, []
    monkeypatch.setattr(model.ops, "moe_begin", lambda *sizes: taken.append((sums := begin(*sizes)).nbytes) or sums)
    for rows in (1, 2, 3, 5, 12, 20):
        model.store.begin(np.zeros(rows, np.int64))
        ids = np.tile(np.arange(MANY, dtype=np.int32), (rows, 1)) + 4 * (rows % 3)
        model.store.moe(np.ones((rows, D), np.float32), ids, np.ones((rows, MANY), np.float32), model.staged["layers.2."], 7.0, SLICES)
        assert taken[-1] <= sum_bytes(rows, MANY, SLICES, D)
    assert [nbytes // row for nbytes in taken] == [5, 10, 3, 5, 12, 20]
    assert [sum_bytes(rows, MANY, SLICES, D) // row for rows in (1, 2, 3, 5, 12, 20)] == [5, 10, 11, 11, 12, 20]


def test_one_sum_for_experts_in_any_order_changes_bits(tmp_path, monkeypatch):
    """The control: sums in the order in which experts come are other sums."""
    model = Model(tmp_path / "experts", 8)
    begin = model.ops.moe_begin
    monkeypatch.setattr(model.ops, "moe_begin", lambda rows, lanes, *sizes: begin(rows, 1, *sizes))
    with pytest.raises(AssertionError, match="differ"):
        model.run(seed=1, steps=5)


def test_an_expert_is_read_while_the_one_before_is_copied(tmp_path):
    """Copies that are made only when the next one is asked for: with one buffer, each would have to be waited for."""

    class Lazy(LateStage):
        held, waited, lock = [], 0, threading.Lock()

        def make(self, *then):
            with self.lock:
                for half, slot in self.held:
                    self._slots[slot] = self.buffers[half]
                self.held = [*then]

        def send(self, half, slot, mark):
            self.make((half, slot))

        def free(self, half):
            self.waited += any(half == held for held, _ in self.held)

        def settle(self, copied):
            self.make()

    model = Model(tmp_path / "experts", ALL, 1, Lazy)
    model.run(seed=0, steps=4)
    assert model.stage.waited == 0 and model.store.counters.misses > 20


def test_who_computes_waits_for_no_later_copies(tmp_path):
    class Watched(LateStage):
        beside = 0

        def settle(self, copied):
            super().settle(copied)
            self.beside += self.queue.unfinished_tasks > 0

    model = Model(tmp_path / "experts", ALL, 1, lambda *a, **k: Watched(*a, delay=5e-3, **k))
    model.run(seed=0, steps=4)
    assert model.stage.beside > 0


def test_hash_layers_are_read_before_their_turn(tmp_path):
    model = Model(tmp_path / "experts", 30)
    tokens = np.array([3, 4, 5])
    model.store.begin(tokens)
    counted = model.store.counters
    needed = sum(len(np.unique(model.fixed[tokens])) for _ in range(2))
    assert counted.prefetched == needed and counted.misses == 0
    for prefix in ("layers.0.", "layers.1."):
        model.store.moe(np.ones((3, D), np.float32), model.fixed[tokens].astype(np.int32), np.ones((3, K), np.float32),
                        model.staged[prefix], 7.0, SLICES)  # fmt: skip
    assert counted.misses == 0 and counted.hits == needed and counted.bytes_staged == needed * model.source.layout.nbytes
    assert model.store._cache.room() == 30


def test_the_draft_is_resident_and_stays(tmp_path):
    model = Model(tmp_path / "experts", 22)
    model.store.hold([model.staged["mtp.0."]])
    model.run(seed=1, steps=10)
    assert (model.store._cache.place[3, :9] >= 0).all()
    before = model.store.counters.misses
    model.store.moe(np.ones((4, D), np.float32), np.array([[0, 8], [1, 7], [2, 6], [3, 5]], np.int32),
                    np.ones((4, K), np.float32), model.staged["mtp.0."], 7.0, SLICES)  # fmt: skip
    assert model.store.counters.misses == before


# ---------------------------------------------------------------------- which expert goes
def take(cache, bank, experts):
    slots, missing = cache.pin(bank, np.array(experts))
    cache.count(bank, np.array(experts))
    cache.unpin(slots)
    return missing.tolist()


def test_the_least_used_expert_goes():
    cache = Cache(3, [8, 8])
    for _ in range(3):
        take(cache, 0, [0, 1])
    assert take(cache, 0, [2]) == [True]
    assert take(cache, 1, [2]) == [True]  # takes the place of (0, 2)
    assert take(cache, 0, [0, 1]) == [False, False] and take(cache, 0, [2]) == [True]


def test_old_choices_count_less():
    cache = Cache(2, [8])
    for _ in range(9):
        take(cache, 0, [0])
    for _ in range(400):
        cache.age()
    take(cache, 0, [1])
    take(cache, 0, [2])  # one choice now is more than nine long ago
    assert take(cache, 0, [1]) == [False] and take(cache, 0, [0]) == [True]
    for _ in range(40_000):
        cache.age()  # weights stay finite
    take(cache, 0, [5])
    assert np.isfinite(cache._score).all() and cache._score[0, 5] > cache._score[0, 0]


def test_a_pinned_expert_stays():
    cache = Cache(3, [8])
    slots, _ = cache.pin(0, np.array([0]))
    for e in range(1, 8):
        take(cache, 0, [e])
        take(cache, 0, [e])
    assert take(cache, 0, [0]) == [False] and cache.room() == 2
    cache.unpin(slots)
    assert cache.room() == 3


def test_a_load_that_failed_late_does_not_touch_the_slots_next_owner():
    cache = Cache(1, [4])
    slots, _ = cache.pin(0, np.array([0]))
    cache.unpin(slots)
    again, _ = cache.pin(0, np.array([1]))
    cache.forget(slots, 0, np.array([0]))
    assert cache.place[0].tolist() == [-1, again[0], -1, -1]
    cache.forget(again, 0, np.array([1]))
    assert cache.place[0].tolist() == [-1] * 4


# ---------------------------------------------------------------------- budgets
def test_budgets():
    assert slots_for(600, 100, 6, 1000) == 6 and slots_for(1999, 100, 6, 1000) == 19 and slots_for(1 << 40, 100, 6, 50) == 50
    with pytest.raises(ConfigError, match="at least 600 bytes, the 6 experts of one row at 100 bytes each on this rank; found 599"):
        slots_for(599, 100, 6, 1000)
