"""Which files a data path stands for, and what is known of each."""

import gzip
import os

import pytest

from mtp_jax.errors import UserError
from train import sources
from train.sources import Kind, find_source, matches


def _write(folder, contents):
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _names(path, **options):
    return [file.name for file in find_source(path, **options).files]


def test_folders_are_read_recursively_and_sorted(tmp_path):
    texts = {"z.txt": b"last", "b/y.md": b"middle", "b/c/x": "ü".encode(), "a": b"first"}
    _write(tmp_path, {**texts, "nul": b"a\0b", "latin": b"\xfc", "empty": b"", "empty.jsonl": b"", "fake.gz": b"text"})
    source = find_source(tmp_path)
    assert [file.name for file in source.files] == ["a", "b/c/x", "b/y.md", "z.txt"]
    assert source.others == 5


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """At any depth: what was left out in silence would be missed by nobody."""
    _write(tmp_path, {"a": b"text", "b/c/x": b"text"})
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("c"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    for folder in (tmp_path, tmp_path / "b" / "c"):
        with pytest.raises(UserError, match=rf"--data {tmp_path}/b/c: cannot be read: Permission denied"):
            find_source(folder)


def test_kinds_go_by_name(tmp_path):
    compressed = gzip.compress(b"x")
    _write(
        tmp_path, {"a.jsonl": b"{}", "b.JSONL.gz": compressed, "c.txt.gz": compressed, "d.parquet": b"\0", "e": b"x"}
    )
    found = {file.name: (file.kind, file.compressed) for file in find_source(tmp_path).files}
    assert found == {
        "a.jsonl": (Kind.JSONL, False),
        "b.JSONL.gz": (Kind.JSONL, True),
        "c.txt.gz": (Kind.TEXT, True),
        "d.parquet": (Kind.PARQUET, False),
        "e": (Kind.TEXT, False),
    }


def test_the_runs_own_folder_is_no_data(tmp_path):
    _write(tmp_path, {name: b"text" for name in ("a", "run/config.json", "run/tokenizer/tokenizer.json", "runs")})
    assert _names(tmp_path, leave_out=tmp_path / "run") == ["a", "runs"]


def test_patterns_stand_for_files_and_folders(tmp_path):
    _write(tmp_path, {name: b"text" for name in ("a/x.txt", "a/y.md", "b/c/x.txt", "z.txt")})
    assert _names(tmp_path / "*.txt") == ["z.txt"]
    assert _names(tmp_path / "*" / "x.txt") == ["a/x.txt"]
    assert _names(tmp_path / "[ab]") == ["a/x.txt", "a/y.md", "b/c/x.txt"]
    assert _names(tmp_path / "**") == ["a/x.txt", "a/y.md", "b/c/x.txt", "z.txt"]
    assert _names(tmp_path / "**" / "x.txt") == ["a/x.txt", "b/c/x.txt"]


def test_a_file_whose_name_looks_like_a_pattern_is_itself(tmp_path):
    _write(tmp_path, {"a[1].txt": b"text", "a1.txt": b"other"})
    assert _names(tmp_path / "a[1].txt") == ["a[1].txt"]


def test_paths_with_nothing_at_them_are_mistakes(tmp_path):
    with pytest.raises(UserError, match="absent: expected a file or a folder, there is none"):
        find_source(tmp_path / "absent")
    with pytest.raises(UserError, match="nothing matches"):
        find_source(tmp_path / "*.txt")


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: content[:-4] + b"abcd"])
def test_a_damaged_compressed_text_is_named(tmp_path, damage):
    _write(tmp_path, {"a.txt.gz": damage(gzip.compress(b"text" * 99))})
    with pytest.raises(UserError, match=r"a\.txt\.gz"):
        find_source(tmp_path)


def test_standard_library_has_no_tests_and_no_packages():
    names = [file.name for file in sources.standard_library(("*", "!encodings/*")).files]
    assert {"json/decoder.py", "heapq.py"} <= set(names)
    assert not [n for n in names if "site-packages" in n or "/test" in n or n.startswith(("test", "encodings/"))]
    assert names == sorted(names, key=lambda name: name.split("/"))
    with pytest.raises(UserError, match="no source in"):
        sources.standard_library(("nothing",))


def test_patterns_of_names():
    assert matches("json/tool.py", ("json/*",))
    assert not matches("json/tool.py", ("*", "!json/*"))
    assert not matches("json/tool.py", ())


def test_fingerprint_knows_names_contents_and_their_order(tmp_path):
    def fingerprint(number, contents):
        _write(tmp_path / str(number), contents)
        return sources.fingerprint([find_source(tmp_path / str(number))])

    same = {"a": b"bc", "d": b"e"}
    assert fingerprint(0, same) == fingerprint(1, same)
    others = [same, {"a": b"bd", "d": b"e"}, {"a": b"bc", "c": b"e"}, {"a": b"e", "d": b"bc"}, {"a": b"bc"}]
    assert len({fingerprint(10 + i, contents) for i, contents in enumerate(others)}) == len(others)


def test_a_file_that_changes_meanwhile_is_refused(tmp_path):
    _write(tmp_path, {"a": b"before"})
    file = find_source(tmp_path).files[0]
    assert sources.read_text_file(file) == "before"
    (tmp_path / "a").write_bytes(b"after it")
    with pytest.raises(UserError, match="changed while it was being read"):
        sources.read_text_file(file)
