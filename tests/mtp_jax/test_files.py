"""What is written, and what is left as it was."""

import os
import threading

import pytest

from mtp_jax.files import replacing, write_text


def test_a_link_stays_one_and_its_file_is_replaced(tmp_path):
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_text(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "after"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_pipe_is_written_to(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(pipe, "through")
    reader.join(timeout=10)
    assert got == ["through"]
    assert pipe.is_fifo()


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(UnicodeEncodeError), replacing(tmp_path / "file") as partial:
        partial.write_text("half, then \ud800", encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"
