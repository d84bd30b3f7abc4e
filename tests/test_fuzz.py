"""Random histories of several sessions against one clean run.

Whatever was forwarded, drafted, verified, rewound, copied, saved and restored on the way, every row has the bits it has
in a sequence run once, in one piece.
"""

import numpy as np
import pytest

import dsv4
from dsv4.errors import Dsv4Error
from dsv4.gate import make_rule
from dsv4.session import forward_all
from dsv4.snapshot import Snapshot
from dsv4.speculate import Speculator


class Clean:
    """The baseline: `tokens` in as few forwards as can be, and, where asked for, the draft after every position."""

    def __init__(self, path, tokens, drafts, threads=2):
        self.tokens = tokens
        with dsv4.Engine.load(path, chunk=256, max_context=len(tokens), max_sessions=1, threads=threads) as engine:
            outputs = []
            with engine.session() as session:
                for start in range(0, len(tokens), 256):
                    output = session.forward(tokens[start : start + 256], "all")
                    outputs.append((output.logits, output.main_hidden))
            self.drafts = {}
            with engine.session() as session:
                for at, token in enumerate(tokens if drafts else ()):
                    if at:
                        self.drafts[at] = session.draft(token)
                    session.decode(token)
        self.logits, self.hidden = map(np.concatenate, zip(*outputs))


def bits(a, b, what):
    assert np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32)), what


class Player:
    """Sessions that all consume beginnings of one sequence, and are led astray between."""

    def __init__(self, engine, clean, seed, folder, reach=None):
        self.engine, self.clean, self.folder = engine, clean, folder
        self.rng = np.random.default_rng(seed)
        self.limit = min(len(clean.tokens), engine.max_context)
        self.reach = reach or engine.pool.headroom
        self.sessions = [engine.session()]
        self.saved: list[Snapshot] = []
        self.log: list[str] = []

    def up_to(self, n):
        return int(self.rng.integers(0, n + 1))

    def junk(self, n):
        return self.rng.integers(0, self.engine.config.vocab_size, n).tolist()

    def follow(self, _, position):
        """choose() of a verification: the baseline's next token."""
        return self.clean.tokens[min(position, len(self.clean.tokens) - 1)]

    def check(self, session, output, first, last, wanted="all"):
        at = slice(first, last) if wanted == "all" else slice(last - 1, last)
        if wanted != "none":
            bits(output.logits, self.clean.logits[at], f"logits {first}..{last}\n{self.history()}")
            bits(output.main_hidden, self.clean.hidden[at], f"main hidden {first}..{last}\n{self.history()}")
        assert session.tokens == self.clean.tokens[: session.position], self.history()

    def history(self):
        return "\n".join(self.log[-40:])

    # ------------------------------------------------------------------ what may happen to a session
    def forward(self, s):
        n = min(1 + self.up_to(self.engine.pool.headroom - 1), self.limit - s.position)
        if n:
            at, wanted = s.position, ("all", "last", "none")[self.up_to(2)]
            self.check(s, s.forward(self.clean.tokens[at : at + n], wanted), at, at + n, wanted)

    def prefill(self, s):
        n = min(1 + self.up_to(3 * self.engine.chunk), self.limit - s.position)
        if n:
            at = s.position
            logits = s.prefill(self.clean.tokens[at : at + n])
            bits(logits, self.clean.logits[at + n - 1], f"prefill {at}..{at + n}\n{self.history()}")

    def decode(self, s):
        if s.position < self.limit:
            bits(s.decode(self.clean.tokens[s.position]), self.clean.logits[s.position - 1], f"decode\n{self.history()}")

    def stray(self, s):
        """Rows that are taken back."""
        at, n = s.position, min(1 + self.up_to(self.engine.pool.headroom - 1), self.limit - s.position)
        if n and at >= s._oldest:
            s.forward(self.junk(n), "none")
            s.rewind(at)

    def verify(self, s):
        at = s.position
        n = min(1 + self.up_to(min(6, self.engine.pool.headroom) - 1), self.limit - at)
        if n:
            right = self.up_to(n)
            block = self.clean.tokens[at : at + max(right, 1)]
            block = block + self.junk(n - len(block))
            found = s.verify(block, ("batched", "sequential")[self.up_to(1)], self.follow)
            assert found.accepted >= min(right, n) - 1
            bits(found.logits, self.clean.logits[at : s.position], f"verify {at}..{s.position}\n{self.history()}")

    def round(self, s):
        """A drafted round; what is drafted does not matter."""
        if s.engine.draft is not None and 0 < s.position < self.limit:
            at = s.position
            rule = make_rule("always", s.engine.config.dspark.block_size, s.engine.gate, costs=s.engine.costs)
            rounds = Speculator(rule, self.follow)
            found = rounds.step(s, self.clean.tokens[at], self.clean.logits[at - 1], 1 + self.up_to(6))
            bits(found.logits, self.clean.logits[at : s.position], f"round {at}..{s.position}\n{self.history()}")

    def draft(self, s):
        if s.position in self.clean.drafts:
            found, want = s.draft(self.clean.tokens[s.position]), self.clean.drafts[s.position]
            assert found.ids.tolist() == want.ids.tolist(), f"draft at {s.position}\n{self.history()}"
            bits(found.logits, want.logits, f"draft's logits at {s.position}\n{self.history()}")
            bits(found.confidence, want.confidence, f"confidence at {s.position}\n{self.history()}")

    def rewind(self, s):
        back = min(1 + self.up_to(self.reach - 1), s.position) if self.up_to(9) else s.position
        if s.position - back >= s._oldest or s.position == back:
            s.rewind(s.position - back)

    def refuse(self, s):
        """Requests that are errors change nothing."""
        tokens, oldest = list(s.tokens), s._oldest
        wrong = [
            lambda: s.forward([-1]), lambda: s.forward([]), lambda: s.forward([1.5]), lambda: s.prefill([]),
            lambda: s.forward([0] * (self.engine.pool.headroom + 1)), lambda: s.rewind(s.position + 1),
            lambda: s.prefill([0] * (self.engine.max_context + 1)), lambda: s.verify([0], "both"),
        ]  # fmt: skip
        with pytest.raises(Dsv4Error):
            wrong[self.up_to(len(wrong) - 1)]()
        assert (s.tokens, s._oldest) == (tokens, oldest)

    def fork(self, s):
        if len(self.sessions) < self.engine.pool.slots:
            self.sessions.append(s.fork())

    def close(self, s):
        s.close()
        self.sessions[self.sessions.index(s)] = self.engine.session()

    def save(self, s):
        snapshot = s.snapshot()
        if not self.up_to(3):
            snapshot.save(self.folder / "state")
            snapshot = Snapshot.load(self.folder / "state")
        self.saved = [*self.saved[-3:], snapshot]

    def restore(self, s):
        fitting = [one for one in self.saved if len(one.tokens) <= self.engine.max_context]
        if fitting:
            s.restore(fitting[self.up_to(len(fitting) - 1)])

    def together(self, _):
        """Rows of several sessions in one forward."""
        parts = []
        for s in self.sessions:
            n = min(1 + self.up_to(4), self.limit - s.position, self.engine.pool.headroom)
            if n:
                parts.append((s, self.clean.tokens[s.position : s.position + n], "all"))
        if parts:
            for (s, tokens, _), output in zip(parts, forward_all(parts)):
                at = s.position - len(tokens)
                bits(output.logits, self.clean.logits[at : s.position], f"together {at}\n{self.history()}")

    MOVES = {
        "forward": 3, "prefill": 2, "decode": 3, "stray": 3, "verify": 4, "round": 2, "draft": 2, "rewind": 3, "refuse": 1,
        "fork": 1, "close": 1, "save": 1, "restore": 1, "together": 2,
    }  # fmt: skip

    def play(self, moves):
        names, weights = list(self.MOVES), np.array(list(self.MOVES.values()), float)
        for _ in range(moves):
            which = self.up_to(len(self.sessions) - 1)
            name = str(self.rng.choice(names, p=weights / weights.sum()))
            session = self.sessions[which]
            self.log.append(f"{name} session {which} at {session.position} (oldest {session._oldest})")
            getattr(self, name)(session)
        for session in self.sessions:
            session.close()
        assert len(self.engine.pool._free_slots) == self.engine.pool.slots
        assert len(set(self.engine.pool._free_pages)) == self.engine.pool.pages.size


def tokens_for(path, length):
    with dsv4.Engine.load(path, chunk=1, max_context=1, max_sessions=1) as engine:
        return np.random.default_rng(7).integers(0, engine.config.vocab_size, length).tolist()


@pytest.fixture(scope="module")
def clean(checkpoint_dir):
    """clean(name): the baseline of a model, 333 tokens (no whole number of pages)."""
    made = {}

    def get(name):
        path = checkpoint_dir(name)
        if name not in made:
            made[name] = Clean(path, tokens_for(path, 333), drafts=False)
        return path, made[name]

    return get


@pytest.mark.parametrize("name, chunk, threads, seed", [
    ("tiny-m", 1, 1, 0), ("tiny-m", 2, 2, 1), ("tiny-m", 7, 1, 2), ("tiny-m", 64, 2, 3), ("nano", 3, 2, 4), ("nano", 50, 1, 5),
])  # fmt: skip
def test_histories(name, chunk, threads, seed, clean, tmp_path):
    path, baseline = clean(name)
    with dsv4.Engine.load(path, chunk=chunk, threads=threads, max_context=333, max_sessions=3) as engine:
        Player(engine, baseline, seed, tmp_path).play(120)


@pytest.mark.parametrize("back", [1, 20, 63])
def test_draft_after_rewind(back, nano_dir):
    """A draft after a rewind is the draft of a sequence that never went further; so is what a snapshot keeps."""
    tokens = tokens_for(nano_dir, 200)
    with dsv4.Engine.load(nano_dir, chunk=64, max_context=256, max_sessions=2) as engine:
        with engine.session() as gone_back, engine.session() as straight:
            gone_back.prefill(tokens)
            gone_back.draft(5)
            gone_back.rewind(200 - back)
            straight.prefill(tokens[: 200 - back])
            bits(gone_back.draft(5).logits, straight.draft(5).logits, "draft's logits")
            assert gone_back.snapshot().checksum() == straight.snapshot().checksum()
