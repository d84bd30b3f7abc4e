"""docs/troubleshooting.md: every message that it quotes is in the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "troubleshooting.md"
ANY = "…"

pytestmark = pytest.mark.skipif(not DOC.exists(), reason="needs a checkout")


def quoted() -> list[str]:
    """The first cell of every row, where it is a message."""
    return re.findall(r"^\| `([^`]+)` \|", DOC.read_text("utf-8"), re.MULTILINE) if DOC.exists() else []


def template(node: ast.AST) -> str | None:
    """A string of the code, … where something is filled in; None for what is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) or ANY for value in node.values)
    return None


def templates() -> list[str]:
    """All strings of the package, and the lines of what sets it up."""
    found = []
    for path in [*(ROOT / "dsv4").rglob("*.py"), ROOT / "setup.py"]:
        tree = ast.parse(path.read_text("utf-8"))
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [template(node) for node in ast.walk(tree) if id(node) not in documentation]
    found += [re.sub(r"\$\([^)]*\)|\$\w+", ANY, line) for line in (ROOT / "launch" / "setup.sh").read_text("utf-8").splitlines()]
    return [text for text in found if text]


TEMPLATES = templates() if DOC.exists() else []


def parts(message: str) -> list[str]:
    return [part for part in message.split(ANY) if part.strip(" :;,.()")]


def holds(text: str, message: str) -> bool:
    """Are the message's words in the text, in order, with something filled in between?"""
    return re.search(re.escape(ANY).join(map(re.escape, parts(message))).replace(re.escape(ANY), f".*{ANY}.*"), text, re.DOTALL) is not None


@pytest.mark.parametrize("message", quoted())
def test_the_message_is_in_the_code(message):
    assert parts(message), "nothing but what differs"
    assert any(holds(text, message) for text in TEMPLATES)


def test_the_page_quotes_enough_and_the_test_would_notice():
    assert len(quoted()) == len(set(quoted())) > 60
    assert not any(holds(text, "memory: expected at most … bananas") for text in TEMPLATES)
    assert not any(holds(text, "effort: expected low or high; found …") for text in TEMPLATES)


def test_commands_that_install_an_extra_name_one_that_exists():
    project = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = ", project, re.MULTILINE))
    found = set()
    for path in [*(ROOT / "dsv4").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        text = path.read_text("utf-8")
        assert not re.search(r"\bdsv4\[\w", text), path  # no index has it under this name
        for names in re.findall(r"\.\[([a-z\d,]+)\]|\binstall\(('[^)]*)\)", text):
            found |= set(re.findall(r"\w+", " ".join(names)))
    assert {"serve", "chat", "plot", "mpi", "cuda12", "cuda13"} <= found <= extras
