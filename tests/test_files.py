"""Files are replaced whole or not at all, and only files are replaced."""

import os
import stat
import threading

import pytest

from dsv4.files import replacing


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
