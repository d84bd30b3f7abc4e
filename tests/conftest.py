"""Fixtures shared by all tests: where the embedded model, the goldens and the generated tiny checkpoints are."""

import json
import signal
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job: the tests' processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(TESTS))  # shared helpers (ops_cases, variants, tools) import by name, installed or not

import cuda_ops  # noqa: E402

import dsv4  # noqa: E402
from tools.make_tiny import CONFIGS, write  # noqa: E402


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """What an independent implementation computed; see tests/golden/README.md."""
    return TESTS / "golden"


@pytest.fixture(scope="session")
def continuations(golden_dir) -> dict[str, list[dict]]:
    """nano's greedy texts by an independent implementation: {kind of text: cases}, with prompt_ids and what followed."""
    return json.loads((golden_dir / "nano_continuations.json").read_text())


@pytest.fixture(scope="session")
def prompts(continuations) -> dict[str, list[list[int]]]:
    """{kind of text: prompts as token ids} that nano knows how to continue."""
    return {kind: [case["prompt_ids"] for case in cases] for kind, cases in continuations.items()}


@pytest.fixture(scope="session")
def nano_dir() -> Path:
    """The embedded model, as installed."""
    return Path(dsv4.__file__).resolve().parent / "models" / "nano"


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory) -> Path:
    """A directory with the random checkpoints tiny-a, tiny-b, tiny-m, tiny-tp, generated bit for bit."""
    root = tmp_path_factory.mktemp("tiny")
    for name in CONFIGS:
        write(str(root), name)
    return root


@pytest.fixture(scope="session")
def checkpoint_dir(nano_dir, tiny_root):
    """checkpoint_dir(name): the directory of nano or of a tiny checkpoint."""
    return lambda name: nano_dir if name == "nano" else tiny_root / name


@pytest.fixture(scope="session")
def engine(checkpoint_dir):
    """engine(name, **settings): a loaded engine, shared by all tests that ask for the same one."""
    loaded = {}

    def get(name: str, **settings):
        key = (name, *sorted(settings.items()))
        if key not in loaded:
            loaded[key] = dsv4.Engine.load(checkpoint_dir(name), **settings)
        return loaded[key]

    return get


@pytest.fixture(
    scope="session",
    params=[pytest.param("emulated", marks=pytest.mark.emulated), pytest.param("on_device", marks=pytest.mark.gpu)],
)
def device_ops(request):
    """The CUDA backend: its kernels run on the CPU, and on a GPU where there is one."""
    return getattr(cuda_ops, request.param)()


@pytest.fixture(scope="session")
def cuda(device_ops):
    """The same for NumPy arrays."""
    return cuda_ops.host_ops(device_ops)
