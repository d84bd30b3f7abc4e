"""Files are replaced whole or not at all, and only files are replaced."""

import os
import stat
import threading
from pathlib import Path

import pytest

from dsv4.files import replaceable, replacing


def test_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(ValueError), replacing(path) as file:
        file.write(b"half")
        raise ValueError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["f"]


def test_every_name_that_a_file_can_have(tmp_path):
    for name in ("x" * 255, "x" * 250, "ä" * 127):
        assert replaceable(tmp_path / name)
        with replacing(tmp_path / name) as file:
            file.write(name.encode())
    assert sorted(os.listdir(tmp_path)) == ["x" * 250, "x" * 255, "ä" * 127]


def test_links_are_followed(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with replacing(link) as file:
        file.write(b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"


def test_pipes_and_devices_stay_what_they_are(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen = []
    reader = threading.Thread(target=lambda: seen.append(pipe.read_bytes()))
    reader.start()
    with replacing(pipe) as file:
        file.write(b"through")
    reader.join(10)
    assert seen == [b"through"] and stat.S_ISFIFO(os.stat(pipe).st_mode)
    with replacing("/dev/null") as file:
        file.write(b"nowhere")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_what_can_be_replaced(tmp_path, monkeypatch):
    """By what replacing() needs: a directory that takes another file. The file itself may be read-only."""
    for name in ("read-only", "closed/file"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"old")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "closed" / "new")
    denied = {tmp_path / "read-only", tmp_path / "closed"}
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in denied and Path(path).exists())
    found = {name: replaceable(tmp_path / name) for name in ("read-only", "new", "pipe", "closed/file", "link", "no/x", "closed", "x" * 300)}
    assert found == {
        "read-only": True, "new": True, "pipe": True, "closed/file": False, "link": False, "no/x": False, "closed": False,
        "x" * 300: False,
    }  # fmt: skip
    assert not replaceable("a\0b")
