"""Everything is in pyproject.toml and setup.cfg; here only: say in one line what a build lacks."""

import shutil
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildExt(build_ext):
    def build_extension(self, ext):
        compiler = getattr(self.compiler, "compiler_so", ["cc"])[0]
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"dsv4: no C compiler: {compiler!r} is not there. Install gcc or clang (Debian: apt install gcc), or "
                "name one in the environment variable CC."
            )
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not header.exists():
            raise SystemExit(
                f"dsv4: no Python headers: {header} is not there. Install them (Debian: apt install python3-dev)."
            )
        try:
            import numpy
        except ImportError:
            raise SystemExit("dsv4: no NumPy to build with. Let pip fetch it (without --no-build-isolation), or install numpy 2.")
        if int(numpy.__version__.split(".")[0]) < 2:
            raise SystemExit(
                f"dsv4: expected NumPy 2 to build with, found {numpy.__version__}: what it builds would not run with NumPy 2. "
                "Let pip fetch it (without --no-build-isolation), or install numpy 2."
            )
        ext.include_dirs.append(numpy.get_include())
        super().build_extension(ext)


setup(cmdclass={"build_ext": BuildExt})
