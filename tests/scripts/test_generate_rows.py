"""generate.py with a file of prompts, called as a user calls it."""

import json
import signal
import subprocess
import time

import pytest

TIMES = {"seconds", "tokens_per_second", "compile_seconds"}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(text):
    """Results without what differs from run to run."""
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in text.splitlines()]


@pytest.fixture
def prompts(tmp_path):
    """Of different lengths, longest first, so that the order of decoding is another than the file's."""
    rows = [
        {"prompt": "def f(x):\n    return " + "x + " * 20, "name": "long"},
        {"prompt_ids": [4, 5], "max_new_tokens": 3},
        {"messages": [{"role": "user", "content": "x"}]},
        {"prompt": "def", "seed": 7},
        {"prompt": "def"},
    ]
    return write_rows(tmp_path / "prompts.jsonl", rows)


@pytest.fixture
def flags(checkpoint, prompts):
    return "--checkpoint", checkpoint, "--max-new-tokens", 12, "--temperature", 1.5, "--prompt-file", prompts


def test_results_are_the_rows_with_keys_in_the_files_order(call, flags, prompts, tmp_path):
    status, out, err = call("generate", *flags)
    assert status == 0
    given = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    got = read_rows(out)
    assert [{key: row[key] for key in asked} for asked, row in zip(given, got, strict=True)] == given
    assert [len(row["tokens"]) <= limit for row, limit in zip(got, [12, 3, 12, 12, 12], strict=True)] == [True] * 5
    assert "sample" not in got[0]
    assert "5 rows" in err
    status, out, _ = call("generate", *flags, "--output", tmp_path / "out.jsonl")
    assert (status, out) == (0, "")
    assert read_rows((tmp_path / "out.jsonl").read_text(encoding="utf-8")) == got


def test_results_depend_neither_on_the_batch_size_nor_on_drafts(call, flags):
    one, two, plain = (
        [row["tokens"] for row in read_rows(call("generate", *flags, *more)[1])]
        for more in (("--batch-size", 1), ("--batch-size", 4), ("--num-draft-tokens", 0))
    )
    assert one == two == plain


def test_a_row_is_seeded_from_its_place_or_by_itself(call, flags, checkpoint, tmp_path):
    rows = read_rows(call("generate", *flags, "--num-samples", 2)[1])
    assert [row["sample"] for row in rows] == [0, 1] * 5
    assert len({tuple(row["tokens"]) for row in rows}) == 10
    # The row with a seed of its own gives the same anywhere, and what --seed gives the first row.
    alone = "--checkpoint", checkpoint, "--max-new-tokens", 12, "--temperature", 1.5, "--num-samples", 2
    seeded = write_rows(tmp_path / "seeded.jsonl", [{"prompt": "def", "seed": 7}])
    got = [read_rows(call("generate", *alone, "--prompt-file", seeded)[1])]
    got.append(json.loads(call("generate", *alone, "--prompt", "def", "--seed", 7, "--json")[1])["completions"])
    for completions in got:
        assert [row["tokens"] for row in completions] == [row["tokens"] for row in rows[6:8]]


def test_a_rows_stop_strings_replace_those_given(call, checkpoint, tmp_path):
    flags = "--checkpoint", checkpoint, "--max-new-tokens", 12
    (whole,) = read_rows(
        call("generate", *flags, "--prompt-file", write_rows(tmp_path / "a.jsonl", [{"prompt": "def"}]))[1]
    )
    first, second = whole["text"][2:4], whole["text"][5:7]
    path = write_rows(tmp_path / "b.jsonl", [{"prompt": "def"}, {"prompt": "def", "stop": second}])
    rows = read_rows(call("generate", *flags, "--prompt-file", path, f"--stop={first}")[1])
    assert [row["text"] for row in rows] == [whole["text"][: whole["text"].index(stop)] for stop in (first, second)]


def test_a_report_shows_all_rows(call, flags, tmp_path):
    page = tmp_path / "page.html"
    status, _, _ = call("generate", *flags, "--output", tmp_path / "out.jsonl", "--report", page, "--logprobs", 1)
    assert status == 0
    assert page.read_text(encoding="utf-8").count("<section") >= 5
    assert all("logprobs" in row for row in read_rows((tmp_path / "out.jsonl").read_text(encoding="utf-8")))


@pytest.fixture
def many(checkpoint, tmp_path):
    """Rows enough to be stopped amid them, one at a time, and their flags."""
    path = write_rows(tmp_path / "many.jsonl", [{"prompt": "def " + "f(x) " * (i % 7), "row": i} for i in range(40)])
    return "--checkpoint", checkpoint, "--prompt-file", path, "--max-new-tokens", 150, "--temperature", 1.5


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_stopped_goes_on_where_it_was(call, start, many, tmp_path, sent):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert call("generate", *many, "--output", whole)[0] == 0
    process = start("generate", *many, "--output", out, "--batch-size", 1, stderr=subprocess.PIPE)
    partial = out.with_name("out.jsonl.partial")
    while not partial.exists() or partial.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(sent)
    assert process.wait(timeout=300) == (130 if sent == signal.SIGINT else -signal.SIGKILL)
    if sent == signal.SIGINT:
        assert "out.jsonl.partial; the same command goes on from there" in process.stderr.read()
    assert not out.exists()
    kept = [json.loads(line)["index"] for line in partial.read_text().splitlines(keepends=True)[1:] if line[-1] == "\n"]
    assert 3 <= len(kept) < 40
    status, _, err = call("generate", *many, "--output", out)
    assert status == 0
    assert f"{40 - len(kept)} rows" in err, "rows that were there are not decoded again"
    assert read_rows(out.read_text(encoding="utf-8")) == read_rows(whole.read_text(encoding="utf-8"))
    assert not partial.exists()
    report = tmp_path / "page.html"
    status, stdout, err = call("generate", *many, "--output", out, "--report", report)
    assert (status, stdout) == (0, "")
    assert "nothing was left to do" in err
    assert f"{report} is not written" in err
    assert not report.exists()
    status, _, err = call("generate", *many, "--output", out, "--seed", 3)
    assert status == 2
    assert f"{out}: holds results of other settings: seed was 0, is 3" in err


def test_other_settings_are_refused_by_name(call, start, many, tmp_path):
    out = tmp_path / "out.jsonl"
    partial = out.with_name("out.jsonl.partial")
    process = start("generate", *many, "--output", out, "--batch-size", 1, stderr=subprocess.PIPE)
    while not partial.exists() or partial.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.kill()
    process.wait(timeout=300)
    status, _, err = call("generate", *many, "--output", out, "--seed", 3, "--logit-bias", "5=1")
    assert status == 2
    assert "seed was 0, is 3" in err
    assert 'logit_bias was {}, is {"5": 1.0}' in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "p.jsonl: expected at least one prompt, got an empty file"),
        ('{"prompt": "a"}\n\n{"prompt": "b"}\n', "p.jsonl:2: expected a JSON object, got a blank line"),
        ('{"prompt": "a"}\n{"prompt": 1}\n', "p.jsonl:2: expected {"),
        ('{"prompt": "a"}\n{}\n', "p.jsonl:2: expected {"),
        ('{"prompt": "a"}\n[1]\n', "p.jsonl:2: expected a JSON object, got [1]"),
        ('{"prompt": "a"}\n{"prompt": ""}\n', "p.jsonl:2: the prompt is empty"),
        ('{"prompt": "a"}\n{"prompt": "a", "seed": "x"}\n', 'p.jsonl:2: seed: expected an integer'),
        ('{"prompt": "a", "max_new_tokens": -1}\n', "p.jsonl:1: max_new_tokens: expected an integer"),
        ('{"prompt": "a", "stop": 3}\n', "p.jsonl:1: stop: expected a string"),
        ('{"prompt_ids": [307]}\n', "p.jsonl:1: the prompt holds id 307; expected ids from 0 to 306"),
        ('{"prompt": "a", "text": "b"}\n', "p.jsonl:1: text: results have keys of that name"),
        ('{"prompt_ids": [1]}\n' + json.dumps({"prompt_ids": [1] * 300}), "p.jsonl:2: a prompt of 300 tokens"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("to_a_file", [True, False])
def test_a_bad_row_is_one_line_and_status_2(call, checkpoint, tmp_path, content, message, to_a_file):
    (tmp_path / "p.jsonl").write_text(content, encoding="utf-8")
    more = ("--output", tmp_path / "out.jsonl") if to_a_file else ()
    status, out, err = call("generate", "--checkpoint", checkpoint, "--prompt-file", tmp_path / "p.jsonl", *more)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--output", "/nowhere/out.jsonl"],
            "/nowhere/out.jsonl.partial: cannot be written: No such file or directory",
        ),
        (["--output", "/dev"], "/dev: cannot be written"),
        (["--output", "{prompts}"], "--prompt-file and --output are the same file"),
        (["--json"], "--json is one object"),
        (["--output", ""], "--output: expected a path"),
        (["--min-new-tokens", "4"], "prompts.jsonl:2: --min-new-tokens 4 is above max_new_tokens 3"),
        (["--chat", "--cache-length", "2"], "prompts.jsonl:1: a prompt of"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(call, flags, prompts, monkeypatch, more, message):
    def load(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr("infer.generator.Generator.from_pretrained", load)
    status, out, err = call("generate", *flags, *(word.format(prompts=prompts) for word in more))
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
