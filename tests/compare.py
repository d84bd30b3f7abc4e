"""Comparisons: bits where bits are promised, the documented tolerances elsewhere."""

import numpy as np


def rel_l2(found, expected) -> float:
    """‖found − expected‖ / ‖expected‖ in float64."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / (norm if norm else 1.0))


def rel_l2_rows(found, expected) -> np.ndarray:
    """rel_l2 of every row (first axis)."""
    return np.array([rel_l2(f, e) for f, e in zip(found, expected)])


def same_bits(found, expected, what="arrays") -> None:
    """Equal types, shapes and bits."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape, (what, found.shape, expected.shape)
    if found.tobytes() != expected.tobytes():
        view = f"u{found.dtype.itemsize}"
        differ = np.argwhere(np.ascontiguousarray(found).view(view) != np.ascontiguousarray(expected).view(view))
        at = tuple(differ[0])
        raise AssertionError(f"{what}: {len(differ)} of {found.size} differ, first at {at}: {found[at]!r} != {expected[at]!r}")


def state_of(session) -> dict:
    """All that a session keeps, by name; the draft's windows brought up to date first."""
    session.prime()
    return session.engine.pool.export(session.slot, session.position)


def decoded_alone(session, tokens) -> tuple:
    """What invariants are held against: tokens, one forward each → (tokens, logits, main hidden, the state before the first
    and after every one)."""
    logits, hidden, states = [], [], [state_of(session)]
    for token in tokens:
        output = session.forward([token])
        logits.append(output.logits)
        hidden.append(session.engine.model.ops.to_host(output.main_hidden))
        states.append(state_of(session))
    return tokens, np.concatenate(logits), np.concatenate(hidden), states


def same_state(found: dict, expected: dict, what="state") -> None:
    """Two exports (state_of) agree in every bit."""
    assert found.keys() == expected.keys()
    for name in expected:
        same_bits(found[name], expected[name], f"{what} {name}")
