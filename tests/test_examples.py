"""What the pages show: programs run, commands and their options exist."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsv4.cli import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands() -> list[str]:
    """Everything the pages tell to run as `python -m dsv4 …`, without what follows a comment or a pipe."""
    found = re.findall(r"python -m (dsv4(?: [^`\n#|&]*)?)", "\n".join(page.read_text("utf-8") for page in PAGES))
    return sorted({line.strip() for line in found})


@cache
def usage(names: tuple[str, ...]) -> str:
    result = CliRunner().invoke(cli, [*names, "--help"])
    return result.output if result.exit_code == 0 else ""


@pytest.mark.parametrize("line", commands())
def test_command_exists(line):
    words = line.split()[1:]
    names: tuple[str, ...] = ()
    for word in words:  # commands come before everything else; `bench experts|layer` names several
        if not usage((*names, word.split("|")[0])):
            break
        names = (*names, word.split("|")[0])
    assert names or not words or words[0] in ("…", "--help"), f"no command in {line!r}"
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line):
        assert option in usage(names), f"{' '.join(names)} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    text = page.read_text("utf-8")
    links = [page.parent / link for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text)]
    named = [ROOT / name for name in re.findall(r"(?<![\w/.-])(?:\./)?((?:tests|docs|launch|dsv4|pyx|cuda)/[\w./]*\w\.\w+)", text)]
    assert not [path for path in links + named if not path.exists()]


def test_the_first_chat_ends_by_itself():
    (options, said) = re.search(r"python -m dsv4 chat(.*?)`, and ask for `(.*?)`", PAGES[0].read_text("utf-8")).groups()
    line = [sys.executable, "-m", "dsv4", "chat", *options.split()]
    done = subprocess.run(line, input=said + "\n", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and len(done.stdout) > 100, done.stderr
    assert " tokens · " in done.stderr and "· length" not in done.stderr


def test_the_readme_program_runs(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text("utf-8"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith(", ") and (tmp_path / "state").exists(), done.stderr
