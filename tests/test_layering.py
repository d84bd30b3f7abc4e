"""The walls of the architecture: who may import whom, and how large a file may grow."""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import dsv4

PACKAGE = Path(dsv4.__file__).resolve().parent
SOURCES = sorted(p for p in PACKAGE.rglob("*.py"))
ROOT = Path(__file__).resolve().parents[1]

# Data flows one way; a module may import those before it only.
ORDER = [
    "errors", "files", "sizes", "sampling", "config", "rope", "checkpoint", "formats", "ops", "split", "parameters", "weights",
    "experts", "watch", "comm", "rows", "plan", "snapshot", "state", "crew", "step", "model", "dspark", "gate", "speculate",
    "session", "tokenizer", "chat", "loading", "generate", "engine", "prefix", "scheduling", "scheduler", "ranks",
    "inspection", "parity", "logits", "determinism", "server", "cli_support", "cli_spec", "terminal", "terminal_screen",
    "cli_chat", "synth", "planner", "cli_plan", "bench", "cli_gate", "cli_pack", "cli_serve", "cli_synth", "cli",
]  # fmt: skip


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path, typing_too: bool = False) -> set[str]:
    """Names of what a file imports: "dsv4.x" for our own, the top-level package for others."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not typing_too:
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")]
    package = ("dsv4", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += [node.module] if node.module else []
            names = [".".join(base)] if node.module or not node.level else []
            found |= set(names) or {".".join([*base, alias.name]) for alias in node.names}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_backwards(path):
    here = module_of(path)
    if here in ("__init__", "__main__"):
        return
    assert here in ORDER, f"{here}: give it a place in ORDER"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "dsv4" and len(parts) > 1 and parts[1] != here and not parts[1].startswith("_"):
            assert parts[1] in ORDER and ORDER.index(parts[1]) < ORDER.index(here), f"{here} imports {name}"


def test_no_framework_and_no_device_library_outside_its_place():
    for path in SOURCES:
        tops = {name.split(".")[0] for name in imports(path, typing_too=True)}
        assert not tops & {"torch", "jax", "tensorflow"}, path
        if "cupy" in tops:
            assert path.relative_to(PACKAGE).as_posix() in ("ops/kernels.py", "comm.py"), path
        if "_cpu" in {part for name in imports(path) for part in name.split(".")}:
            assert path.parent.name == "ops", path


def test_environment_is_read_in_one_place():
    for path in SOURCES:
        if path.name != "config.py":
            text = path.read_text(encoding="utf-8")
            assert "os.environ" not in text and "getenv" not in text, path


def test_checkpoint_names_live_in_one_place():
    for path in SOURCES:
        if path.name not in ("weights.py", "inspection.py"):
            text = path.read_text(encoding="utf-8")
            for name in ("ffn.experts", "attn.wq_a", "hc_attn_fn", "shared_experts.w"):
                assert name not in text, (path, name)


def test_the_page_of_the_architecture_has_every_module():
    page = ROOT / "docs" / "architecture.md"
    if not page.exists():
        pytest.skip("needs a checkout")
    cells = re.findall(r"^\| (`.*?) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    for name in (path.relative_to(PACKAGE).as_posix() for path in SOURCES if path != PACKAGE / "__init__.py"):
        assert any(name.startswith(one) if one.endswith("/") else fnmatch(name, one) for one in listed), name
    for one in listed:
        assert list((ROOT / "dsv4").glob(one)) if "*" in one else (ROOT / "dsv4" / one).exists(), one


def test_files_stay_readable():
    kinds = {".py", ".pyx", ".pxi", ".c", ".cpp", ".h", ".cu", ".cuh"}
    others = [p for d in ("pyx", "cuda", "tests") for p in (ROOT / d).rglob("*") if p.suffix in kinds]
    others = [p for p in others if not (p.suffix == ".c" and p.with_suffix(".pyx").exists())]  # what Cython makes
    for path in [*SOURCES, *others]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, path


def test_functions_stay_short():
    for path in [*SOURCES, *Path(__file__).parent.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < 50, (path, node.name)


def test_no_flags_that_break_bits():
    for path in [ROOT / "pyproject.toml", ROOT / "setup.cfg", *ROOT.glob("setup.py"), *(ROOT / "launch").glob("*")]:
        text = path.read_text(encoding="utf-8")
        assert "-march=native" not in text and "fast-math" not in text and "-Ofast" not in text, path


def test_importing_the_package_imports_no_backend():
    code = (
        "import sys, dsv4;"
        "heavy = {'numpy', 'click', 'rich', 'tokenizers', 'cupy', 'numba', 'mpi4py', 'safetensors'} & set(sys.modules);"
        "assert not heavy, heavy; assert not [m for m in sys.modules if m.startswith('dsv4.ops')]"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
