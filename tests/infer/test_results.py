"""Results that outlive a kill at any byte, come out in order, and are never mixed."""

import json
import resource
import signal

import pytest

from infer.completion import Completion, TokenLogprob
from infer.requests import Request
from infer.results import OUTPUT_KEYS, Results
from mtp_jax.errors import UserError

SETTINGS = {"temperature": 0.5, "stop": ("a",), "checkpoint": "models/demo"}
ROWS = [{"prompt": "b\u2028\x85"}, {"prompt_ids": [1], "extra": {"x": [1.5, None]}}, {"prompt": "a", "note": "\ud800"}]


def request_of(row, number=0):
    return Request([len(str(row))], "shown", None, None, None, row, f"p.jsonl:{number + 1}")


REQUESTS = [request_of(row, number) for number, row in enumerate(ROWS)]


def record(index, sample=0):
    """Some result, another for each request and sample."""
    tokens = [index, sample, 7]
    return Completion(tokens, f"长\n{index}", "length", [0, 1, 0], [-1, 1, -1], [-1] * 3, 2, None, 0.5, 0.0).record()


def expected(requests=REQUESTS, num_samples=1):
    return [
        {**request.row, **({"sample": sample} if num_samples > 1 else {}), **record(index, sample)}
        for index, request in enumerate(requests)
        for sample in range(num_samples)
    ]


def rows_of(out):
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def complete(out, requests=REQUESTS, num_samples=1, settings=SETTINGS):
    """Makes what is missing, last first; gives what that was."""
    with Results(out, requests, settings, num_samples) as results:
        missing = results.missing
        for index, sample in reversed(missing):
            results.add(index, sample, record(index, sample))
        results.finish()
    return missing


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def partial(out):
    return out.with_name("out.jsonl.partial")


@pytest.mark.parametrize("num_samples", [1, 3])
def test_results_come_in_the_order_of_requests(out, num_samples):
    missing = complete(out, num_samples=num_samples)
    assert missing == [(index, sample) for index in range(3) for sample in range(num_samples)]
    assert rows_of(out) == expected(num_samples=num_samples)
    assert list(rows_of(out)[num_samples])[:2] == ["prompt_ids", "extra"]  # the row's own keys come first
    assert {path.name for path in out.parent.iterdir()} == {"out.jsonl", "out.jsonl.settings.json"}


def test_a_result_is_on_disk_once_it_is_added(out):
    with Results(out, REQUESTS, SETTINGS) as results:
        results.add(2, 0, record(2))
        lines = partial(out).read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines[1:]] == [{"index": 2, "sample": 0, "row": expected()[2]}]
        assert results.missing == [(0, 0), (1, 0)]
        assert not out.exists()


@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_run_killed_at_any_byte_goes_on(out, num_samples):
    with Results(out, REQUESTS, SETTINGS, num_samples) as results:
        targets = results.missing
        order = targets[::2] + targets[1::2]
        ends = [partial(out).stat().st_size]
        for index, sample in order:
            results.add(index, sample, record(index, sample))
            ends.append(partial(out).stat().st_size)
    content = partial(out).read_bytes()
    assert ends[-1] == len(content)
    for size in range(len(content) + 1):
        partial(out).write_bytes(content[:size])
        kept = order[: sum(end <= size for end in ends[1:])]
        with Results(out, REQUESTS, SETTINGS, num_samples) as results:  # killed again, after one more result
            for index, sample in results.missing[:1]:
                results.add(index, sample, record(index, sample))
                kept.append((index, sample))
        assert complete(out, num_samples=num_samples) == [target for target in targets if target not in kept]
        assert rows_of(out) == expected(num_samples=num_samples)
        assert not partial(out).exists()
        out.unlink()


def test_a_run_killed_while_the_output_was_put_in_place(out, monkeypatch):
    """Before, or after but with the partial file still there."""
    with Results(out, REQUESTS, SETTINGS) as results:
        for index in range(3):
            results.add(index, 0, record(index))
        content = partial(out).read_bytes()
    assert complete(out) == []
    assert rows_of(out) == expected()
    partial(out).write_bytes(content)
    assert complete(out) == []
    assert rows_of(out) == expected()
    assert not partial(out).exists()


def test_a_finished_run_is_left_as_it_is(out):
    complete(out)
    before = out.stat()
    assert complete(out) == []
    assert out.stat() == before
    assert {path.name for path in out.parent.iterdir()} == {"out.jsonl", "out.jsonl.settings.json"}


def test_requests_may_be_appended(out):
    complete(out, REQUESTS[:1], num_samples=2)
    content = out.read_bytes()
    targets = [(index, sample) for index in (1, 2) for sample in (0, 1)]
    with Results(out, REQUESTS, SETTINGS, 2) as results:
        assert results.missing == targets
        results.add(2, 1, record(2, 1))
    assert out.read_bytes() == content
    assert complete(out, num_samples=2) == targets[:-1]
    assert rows_of(out) == expected(num_samples=2)


@pytest.mark.parametrize("requests", [REQUESTS, REQUESTS[:2]])
def test_an_output_of_other_settings_is_refused_by_name(out, requests):
    """Whether or not prompts are left to do."""
    complete(out, requests)
    before = {path.name: path.read_bytes() for path in out.parent.iterdir()}
    message = r"out\.jsonl: holds results of other settings: temperature was 0\.5, is 1; top_k was null, is 5; remove"
    with pytest.raises(UserError, match=message):
        Results(out, REQUESTS, {**SETTINGS, "temperature": 1, "top_k": 5})
    assert {path.name: path.read_bytes() for path in out.parent.iterdir()} == before
    out.unlink()  # what is left binds nobody
    assert len(complete(out, settings={"temperature": 1})) == 3
    assert complete(out, settings={"temperature": 1}) == []


@pytest.mark.parametrize("content", [None, "", "{}", "notes"])
def test_an_output_of_unknown_settings_is_refused(out, content):
    complete(out)
    made_by = out.with_name("out.jsonl.settings.json")
    made_by.unlink() if content is None else made_by.write_text(content)
    with pytest.raises(UserError, match=r"out\.jsonl\.settings\.json: expected the settings that made .*out\.jsonl"):
        Results(out, REQUESTS, SETTINGS)


def test_results_of_an_old_output_outlive_a_kill_while_they_are_taken_over(out):
    complete(out, REQUESTS[:2])
    with Results(out, REQUESTS, SETTINGS):
        content = partial(out).read_bytes()
    for size in range(len(content) + 1):
        partial(out).write_bytes(content[:size])
        with Results(out, REQUESTS, SETTINGS) as results:
            assert results.missing == [(2, 0)]
            assert partial(out).read_bytes() == content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {**SETTINGS, "temperature": 0}}, "temperature was 0.5, is 0;"),
        ({"settings": {**SETTINGS, "top_k": 5}}, "top_k was null, is 5;"),
        ({"num_samples": 2}, "num_samples was 1, is 2;"),
        ({"requests": REQUESTS[:2]}, "the prompts are others"),
        ({"requests": [request_of({**ROWS[0], "seed": 1}), *REQUESTS[1:]]}, "the prompts are others"),
        ({"requests": [Request([1], "", None, None, None, ROWS[0], ""), *REQUESTS[1:]]}, "the prompts are others"),
    ],
    ids=range(6),
)
def test_results_of_another_run_are_not_mixed_in(out, change, message):
    with Results(out, REQUESTS, SETTINGS) as results:
        results.add(1, 0, record(1))
    content = partial(out).read_bytes()
    with pytest.raises(UserError, match=rf"out\.jsonl\.partial: holds results of another run: {message}"):
        Results(out, **{"requests": REQUESTS, "settings": SETTINGS, **change})
    assert partial(out).read_bytes() == content


def test_a_run_without_results_binds_nobody(out):
    """Neither one that ended nor one that was killed."""
    with Results(out, REQUESTS, SETTINGS):
        content = partial(out).read_bytes()
    assert not partial(out).exists()
    partial(out).write_bytes(content)
    with Results(out, REQUESTS, {"temperature": 1}) as results:
        assert len(results.missing) == 3


def test_two_runs_at_a_time_do_not_write_the_same_results(out):
    with Results(out, REQUESTS, SETTINGS) as results:
        results.add(0, 0, record(0))
        kept = partial(out).read_bytes()
        with pytest.raises(UserError, match="another run is writing it"):
            Results(out, REQUESTS, SETTINGS)
        assert partial(out).read_bytes() == kept
    assert complete(out) == [(1, 0), (2, 0)]  # the lock has ended with the run
    assert rows_of(out) == expected()


@pytest.mark.parametrize("content", [b"notes\n", b"no", b"\n", b'{"results_of": 1}\n{}\n', b'{"a": 1}\n'])
def test_a_partial_file_of_something_else_is_not_touched(out, content):
    partial(out).write_bytes(content)
    with pytest.raises(UserError, match=r"out\.jsonl\.partial: expected results of an earlier run"):
        Results(out, REQUESTS, SETTINGS)
    assert partial(out).read_bytes() == content


@pytest.mark.parametrize("line", [b"x\n", b"\xff\n", b"{}\n", b'{"index": 3, "sample": 0, "row": {}}\n'])
def test_a_damaged_line_is_named(out, line):
    with Results(out, REQUESTS, SETTINGS) as results:
        results.add(1, 0, record(1))
    with open(partial(out), "ab") as file:
        file.write(line)
    with pytest.raises(UserError, match=r"out\.jsonl\.partial:3: expected a result"):
        Results(out, REQUESTS, SETTINGS)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("notes", 1),
        ("\n", 1),
        (lines(ROWS), 1),  # the prompts themselves
        (lines(expected()[1:]), 1),
        (lines([expected()[0], expected()[2]]), 2),
        (lines(expected()) + "{}", 4),
        (lines(expected(num_samples=2)[:1]), 1),
        (lines([{**ROWS[0], "x": float("nan")}]), 1),
    ],
    ids=range(8),
)
def test_an_output_of_something_else_is_not_touched(out, content, line):
    out.write_text(content)
    with pytest.raises(UserError, match=rf"out\.jsonl:{line}: expected an earlier result of these prompts"):
        Results(out, REQUESTS, SETTINGS)
    assert out.read_text() == content
    assert not partial(out).exists()


def test_an_empty_output_is_none(out):
    out.touch()
    assert len(complete(out)) == 3
    assert rows_of(out) == expected()


def test_an_output_that_cannot_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    for name in ("missing/out.jsonl", "file/out.jsonl", "x" * 300):
        with pytest.raises(UserError, match=r"\.partial: cannot be written: "):
            Results(tmp_path / name, REQUESTS, SETTINGS)
    with pytest.raises(UserError, match="expected the name of a file, got a folder or a device"):
        Results(tmp_path, REQUESTS, SETTINGS)


def test_a_full_disk_is_told_and_the_run_can_go_on(out):
    with Results(out, REQUESTS, SETTINGS) as results:
        results.add(1, 0, record(1))
        limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (partial(out).stat().st_size + 50, limits[1]))
        try:
            with pytest.raises(UserError, match=r"out\.jsonl\.partial: cannot be written: File too large"):
                results.add(2, 0, record(2))
            results.__exit__(None, None, None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
    assert complete(out) == [(0, 0), (2, 0)]
    assert rows_of(out) == expected()


@pytest.mark.parametrize("key", sorted(OUTPUT_KEYS))
def test_a_row_with_a_key_of_results_is_refused(out, key):
    with pytest.raises(UserError, match=rf"p\.jsonl:1: {key}: results have keys of that name"):
        Results(out, [request_of({"prompt": "a", key: 1})], SETTINGS)
    assert not partial(out).exists()


def test_the_keys_are_those_of_a_completion():
    entry = TokenLogprob(-0.5, [])
    full = Completion([1], "", "length", [0], [-1], [-1], 2, [entry], 0.5, 0.0).record()
    assert full.keys() | {"sample"} == OUTPUT_KEYS
