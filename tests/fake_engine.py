"""A stand-in for Engine whose logits are a fixed function of the tokens consumed: generation without a model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from dsv4.gate import GateSettings
from dsv4.tokenizer import Tokenizer

VOCAB = 640


class FakeEngine:
    """script: tokens to prefer one after another, from the first generated one on; else pseudo-random logits."""

    def __init__(self, directory=None, script=(), max_context=256, vocab=VOCAB, spoil=None):
        self.config = SimpleNamespace(vocab_size=vocab, bos_token_id=0, eos_token_ids=(1,), max_position_embeddings=1024)
        self.tokenizer = Tokenizer.load(directory) if directory else None
        self.max_context, self.chunk = max_context, 8
        self.script, self.spoil = list(script), spoil
        self.sessions: list[FakeSession] = []

        self.draft, self.gate, self.costs = None, GateSettings(), None

    def session(self):
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]


class FakeSession:
    def __init__(self, engine):
        self.engine, self.tokens, self.open, self.prompt = engine, [], True, 0

    position = property(lambda self: len(self.tokens))

    def prefill(self, tokens, progress=None):
        self.prompt = len(tokens)
        for start in range(0, len(tokens), self.engine.chunk):
            self.tokens += tokens[start : start + self.engine.chunk]
            if progress:
                progress(len(self.tokens), len(tokens))
        return self._logits()

    def rewind(self, position):
        del self.tokens[position:]

    def decode(self, token):
        assert self.position < self.engine.max_context, "the context was overrun"
        self.tokens.append(token)
        return self._logits()

    def forward(self, tokens, wanted):
        assert wanted == "all" and len(tokens) <= self.engine.chunk
        rows = []
        for token in tokens:
            self.tokens.append(token)
            rows.append(self._logits())
        best = [int(row.argmax()) if np.isfinite(row).all() else -1 for row in rows]
        return SimpleNamespace(logits=np.stack(rows), best=best)

    def _logits(self):
        rng = np.random.default_rng([len(self.tokens), sum(self.tokens)])
        logits = rng.standard_normal(self.engine.config.vocab_size).astype(np.float32)
        done = len(self.tokens) - self.prompt
        if self.prompt and done < len(self.engine.script):
            logits[self.engine.script[done]] = 30.0
        if done == self.engine.spoil:
            logits[5] = np.nan
        return logits

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.open = False
