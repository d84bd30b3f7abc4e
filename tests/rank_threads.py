"""Several ranks as threads of this process, and what is compared between numbers of ranks."""

import threading
from contextlib import contextmanager

import numpy as np
from compare import same_bits, state_of

from dsv4 import Engine, SamplingParams
from dsv4.comm import Threads
from dsv4.generate import complete


@contextmanager
def crew_of(directory, size, **settings):
    """Rank 0's engine; the other ranks follow in threads and are gone afterwards. Their exceptions are raised here."""
    comms, failures = Threads.group(size), []

    def follow(comm):
        try:
            engine = Engine.join(directory, comm=comm, **settings)
            engine.crew.follow(engine)
        except BaseException as error:
            failures.append(error)

    others = [threading.Thread(target=follow, args=(comm,), daemon=True) for comm in comms[1:]]
    for thread in others:
        thread.start()
    try:
        with Engine.join(directory, comm=comms[0], **settings) as engine:
            yield engine
    finally:
        for thread in others:
            thread.join(10)
    assert not failures and not any(thread.is_alive() for thread in others), failures


def trace(engine, length=100) -> dict[str, np.ndarray]:
    """All a rank count could change: logits, main hidden, state, drafts, confidences, verified and generated tokens."""
    rng, out = np.random.default_rng(3), {}
    tokens = rng.integers(0, engine.config.vocab_size, length).tolist()
    with engine.session() as session, engine.session() as neighbour:
        neighbour.forward(tokens[:7])
        prompt = session.forward(tokens[: length - 9], "all")
        out["prompt"], out["prompt hidden"] = prompt.logits, prompt.main_hidden
        decode = session.forward(tokens[length - 9 : length - 8])
        out["decode"], out["decode hidden"] = decode.logits, decode.main_hidden
        out["verify rows"] = session.forward(tokens[length - 8 : length - 2], "all").logits
        session.rewind(length - 6)
        out["after rewind"] = session.decode(tokens[length - 6])
        if engine.draft is not None:
            out["draft"], out["draft logits"], out["confidence"] = session.draft(tokens[length - 5])
            verified = session.verify([tokens[length - 5], *out["draft"]])
            out["verified"], out["verified logits"] = np.array(verified.tokens), verified.logits
        with session.fork() as other:
            out["fork"] = other.decode(tokens[0])
            out["packed"] = neighbour.decode(tokens[1])
        out["state"] = session.snapshot()
        out |= state_of(session)
        again = engine.session()
        again.restore(out.pop("state"))
        out["restored"] = again.decode(tokens[2])
        again.close()
    for name, params in {"greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
                         "sampled": SamplingParams(seed=5, max_tokens=12, ignore_eos=True)}.items():  # fmt: skip
        for spec in ("off", "always"):
            out[f"{name} {spec}"] = np.array(complete(engine, tokens[:20], params, spec=spec).tokens)
    return out


def same_trace(found, expected, what):
    assert found.keys() == expected.keys()
    for name in expected:
        same_bits(found[name], expected[name], f"{what}: {name}")
