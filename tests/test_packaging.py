"""What gets installed: declared packages and sources, the archives, and what a build says that lacks a compiler."""

import configparser
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import dsv4

ROOT = Path(__file__).resolve().parent.parent
SETUP = """
import sys, sysconfig
get_path = sysconfig.get_path
sysconfig.get_path = lambda name, *rest, **more: {include!r} if name == "include" else get_path(name, *rest, **more)
{before}
sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", {out!r}, "--build-temp", {out!r}]
exec(open("setup.py").read())
"""

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs a checkout")


def run(*command, cwd, **env):
    command, env = [str(c) for c in command], {**os.environ, **env}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    return done.returncode, done.stdout + done.stderr


def build(what: str, source: Path, out: Path) -> Path:
    """One archive through the build backend, with what is installed here."""
    code = f"import setuptools.build_meta as b; b.build_{what}({str(out)!r})"
    status, text = run(sys.executable, "-c", code, cwd=source)
    assert status == 0, text
    (archive,) = [p for p in out.iterdir() if p.is_file()]
    return archive


def expected_files() -> set[str]:
    """Every Python module, CUDA file and model file of the checkout, as installed."""
    files = {f"dsv4/{p.relative_to(ROOT / 'dsv4')}" for p in (ROOT / "dsv4").rglob("*.py")}
    files |= {f"dsv4/models/nano/{p.name}" for p in (ROOT / "dsv4/models/nano").iterdir()}
    files |= {f"dsv4/server/page/{p.name}" for p in (ROOT / "dsv4/server/page").iterdir()}
    return files | {f"dsv4/cuda/{p.name}" for p in (ROOT / "cuda").iterdir()}


@pytest.mark.parametrize("script", ["generate.sh", "serve.sh"])
@pytest.mark.parametrize("ranks", ["", "0", "3", "16", "two", "99999"])
def test_launch_scripts_start_a_number_of_ranks_that_can_be(script, ranks, tmp_path):
    """Before anything is installed or started."""
    status, text = run("bash", ROOT / "launch" / script, ranks, cwd=tmp_path, VENV=str(tmp_path / "none"), MPIRUN="false")
    assert status == 2 and f"expected the number of ranks first (1, 2, 4 or 8), found '{ranks}'" in text
    assert not (tmp_path / "none").exists()


def test_every_package_is_declared():
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    packages = set(declared["options"]["packages"].split())
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "dsv4").rglob("__init__.py")}
    assert packages == found | {"dsv4.cuda"}
    assert not (ROOT / "cuda" / "__init__.py").exists()


def test_every_c_file_is_compiled():
    text = (ROOT / "pyproject.toml").read_text()
    for path in [*(ROOT / "pyx").glob("*.pyx"), *(ROOT / "pyx").glob("*/*.c")]:
        assert f'"{path.relative_to(ROOT)}"' in text, path
    for flag in ("-march", "-ffast-math", "-Ofast"):
        assert f'"{flag}' not in text


def test_the_compiled_module_is_beside_the_package():
    spec = importlib.util.find_spec("dsv4._cpu")
    assert spec and Path(spec.origin).parent == Path(dsv4.__file__).parent


LACKS = [
    ("compiler", "no C compiler: '/nowhere/cc'", "Debian: apt install"), ("header", "no Python headers", "Debian: apt install"),
    ("numpy", "no NumPy to build with", "install numpy 2"), ("numpy 2", "expected NumPy 2 to build with, found 1.26.4", "install numpy 2"),
]  # fmt: skip
BEFORE = {"numpy": "sys.modules['numpy'] = None", "numpy 2": "import numpy; numpy.__version__ = '1.26.4'"}


@pytest.mark.parametrize("without, words, hint", LACKS)
def test_a_build_says_what_it_lacks(tmp_path, without, words, hint):
    include = {"header": str(tmp_path)}.get(without, sysconfig.get_path("include"))
    env = {"CC": "/nowhere/cc"} if without == "compiler" else {}
    status, text = run(sys.executable, "-c", SETUP.format(include=include, out=str(tmp_path), before=BEFORE.get(without, "")), cwd=ROOT, **env)
    assert status != 0
    last = text.strip().splitlines()[-1]
    assert last.startswith("dsv4: " + words) and hint in last


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source archive, made from a copy of what the checkout holds."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("sdist")
    unwanted = shutil.ignore_patterns(".git", "build", "dist", "__pycache__", "*.so", "*.egg-info", ".venv*", "shared")
    shutil.copytree(ROOT, copy, ignore=unwanted, dirs_exist_ok=True)
    return build("sdist", copy, out)


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    room = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(room)
    return next(room.iterdir())


@pytest.mark.slow
def test_the_source_archive_holds_what_a_build_needs(unpacked):
    sources = [p for end in ("pyx/*.px?", "pyx/*.py?", "pyx/cpu/*", "cuda/*") for p in ROOT.glob(end)]
    for path in [*sources, ROOT / "LICENSE", ROOT / "setup.py"]:
        assert (unpacked / path.relative_to(ROOT)).is_file(), path


@pytest.mark.slow
def test_wheel_from_the_source_archive(unpacked, tmp_path):
    wheel = build("wheel", unpacked, tmp_path)
    assert wheel.name.startswith(f"dsv4-{dsv4.__version__}-cp")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert expected_files() <= names
    assert [n for n in names if n.startswith("dsv4/_cpu.") and n.endswith(".so")]
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)
    extra = {n for n in names if "dist-info" not in n and not n.endswith(".so")} - expected_files()
    assert not extra, "neither sources nor tests belong in a wheel"
    code = "import dsv4; from dsv4.ops.cpu import CpuOps; CpuOps(2); print(dsv4.__path__[0])"
    status, text = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert status == 0 and text.strip() == str(tmp_path / "site" / "dsv4"), text


@pytest.mark.slow
def test_editable_install(unpacked, tmp_path):
    """It points into the sources, where the compiled module then lies."""
    site = tmp_path / "site"
    options = ("-q", "--no-build-isolation", "--no-deps", "--target", site)
    status, text = run(sys.executable, "-m", "pip", "install", *options, "-e", unpacked, cwd=tmp_path)
    assert status == 0, text
    code = f"import site; site.addsitedir({str(site)!r}); import dsv4._cpu; print(dsv4._cpu.__file__)"
    # -S: start-up files of a dsv4 that is installed beside the dependencies are not run
    paths = [str(site)] + [p for p in sys.path if p and not (Path(p) / "dsv4").exists()]
    status, text = run(sys.executable, "-S", "-c", code, cwd=tmp_path, PYTHONPATH=os.pathsep.join(paths))
    assert status == 0 and Path(text.strip()).parent == unpacked / "dsv4", text
