"""Results of a file of prompts, in a file: kept as they come, so that a run that was killed goes on where it was."""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from infer.requests import Request
from mtp_jax.errors import UserError
from mtp_jax.files import read_text, replacing, write_text

# What is put into a row; rows that have one of these already are refused, since one of the two would be lost.
_COUNTS = ("rounds", "drafted", "accepted", "accepted_per_position", "tokens_per_round")
_TIMES = ("seconds", "tokens_per_second", "compile_seconds")
OUTPUT_KEYS = frozenset(("sample", "text", "tokens", "finish_reason", "logprobs", *_COUNTS, *_TIMES))

_MAGIC = b'{"results_of": '  # how a partial file begins
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def check_keys(requests: Sequence[Request]) -> None:
    """Refuses rows with keys that results have.

    Raises:
      UserError: names the first such row.
    """
    for request in requests:
        if taken := sorted(OUTPUT_KEYS & request.row.keys()):
            raise UserError(f"{request.where}: {', '.join(taken)}: results have keys of that name; rename the row's")


def result_row(row: Mapping[str, Any], sample: int | None, record: Mapping[str, Any]) -> dict[str, Any]:
    """A result as it is written: the request's row with the result's keys. Args: sample: None if there is only one."""
    return {**row, **({} if sample is None else {"sample": sample}), **record}


class Results:
    """Results of requests, written to `OUT.partial` as they come and to `OUT`, in the requests' order, at the end.

    The partial file's first line says which requests and settings it is for; a line each follows, in the order in which
    they came: `{"index", "sample", "row"}`, where `row` is the request's row with the result's keys, as in `OUT`.
    What a kill leaves of a last line is dropped. Results of other requests or settings are never mixed in.

    Rows already in `OUT` are kept if they belong to these requests, or the first of them: results of a finished run are
    not made again, and requests may be appended. `OUT.settings.json` says which settings made them; with others, or
    without that file, `OUT` is refused.
    """

    def __init__(
        self, out: Path, requests: Sequence[Request], settings: Mapping[str, Any], num_samples: int = 1
    ) -> None:
        """Reads what is there and makes the partial file, unless nothing is missing.

        Args:
          settings: whatever changes a result, as JSON values by name; names are shown where one differs.
          num_samples: results for each request; more than one are told apart by the key `sample`.

        Raises:
          UserError: a file cannot be written or read, holds something else, or a row has a key that results have.
        """
        self._out, self._partial = out, out.with_name(out.name + ".partial")
        self._made_by = out.with_name(out.name + ".settings.json")
        self._rows = [request.row for request in requests]
        self._num_samples = num_samples
        check_keys(requests)
        digest = hashlib.sha256()
        for request in requests:
            digest.update(_line([request.row, request.ids]))
        self._header = {"input": digest.hexdigest(), "settings": {**settings, "num_samples": num_samples}}
        self._targets = [(index, sample) for index in range(len(requests)) for sample in range(num_samples)]
        self._places: dict[tuple[int, int], int] = {}  # where the partial file has the line of a result
        self._file: BinaryIO | None = None  # none where there is nothing to do
        try:
            finished = self._read_out()
            if self._partial.exists() or len(finished) < len(self._targets):
                self._file = open(self._partial, "a+b")  # noqa: SIM115  (closed by __exit__)
                self._lock(self._file)
                self._read_partial()
                self._start(finished)
        except (UserError, OSError) as error:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self._partial}: cannot be written: {error.strerror}") from error

    @property
    def missing(self) -> list[tuple[int, int]]:
        """What has no result yet, in order: (index of the request, number of its sample)."""
        return [] if self._file is None else [target for target in self._targets if target not in self._places]

    def __enter__(self) -> "Results":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            with suppress(OSError):  # each line was flushed, or its failure told
                self._file.close()
            if not self._places:
                self._partial.unlink()  # so that another try may have other settings

    def add(self, index: int, sample: int, record: Mapping[str, Any]) -> None:
        """Keeps the result of a request: its row with the keys of `record`, on disk before this returns."""
        assert record.keys() <= OUTPUT_KEYS, record.keys() - OUTPUT_KEYS
        row = result_row(self._rows[index], sample if self._num_samples > 1 else None, record)
        try:
            self._append((index, sample), row)
        except OSError as error:
            raise UserError(f"{self._partial}: cannot be written: {error.strerror}") from error

    def finish(self) -> None:
        """Puts `OUT` in place, whole, and removes the partial file. Nothing may be missing."""
        if self._file is None:
            return
        assert not self.missing, self.missing
        # First, so that there is no moment at which `OUT` is there without it; by itself it binds nobody.
        write_text(self._made_by, json.dumps(self._header["settings"], indent=2) + "\n")
        with replacing(self._out, ".ordered") as ordered, open(ordered, "wb") as file:
            for target in self._targets:
                self._file.seek(self._places[target])
                file.write(_line(json.loads(self._file.readline())["row"]))
        self._file.close()
        self._file = None
        self._partial.unlink()

    def _read_out(self) -> list[dict[str, Any]]:
        """The rows of `OUT`, if there is one: results of these requests or the first of them."""
        if not self._out.exists():
            return []
        if not self._out.is_file():
            raise UserError(f"{self._out}: cannot be written: expected the name of a file, got a folder or a device")
        text = read_text(self._out)
        rows = [_object(line) for line in text.removesuffix("\n").split("\n")] if text else []
        for number, row in enumerate(rows, 1):
            if number > len(self._targets) or not self._is_result(row, *self._targets[number - 1]):
                raise UserError(
                    f"{self._out}:{number}: expected an earlier result of these prompts, in their order, got another "
                    "row; remove the file, or name another one for the output"
                )
        if rows:
            self._check_settings_of_out()
        return rows

    def _check_settings_of_out(self) -> None:
        """Refuses an `OUT` that other settings made, or settings that nobody knows."""
        then = _object(read_text(self._made_by)) if self._made_by.is_file() else {}
        if not then:
            raise UserError(
                f"{self._made_by}: expected the settings that made {self._out}, which are in no other place; remove "
                f"{self._out.name}, or name another file for the output"
            )
        if other := self._differences(then):
            raise UserError(
                f"{self._out}: holds results of other settings: {'; '.join(other)}; remove the file, or name another "
                "one for the output"
            )

    def _is_result(self, row: Mapping[str, Any], index: int, sample: int) -> bool:
        given = {key: value for key, value in row.items() if key not in OUTPUT_KEYS}
        number = sample if self._num_samples > 1 else None
        return "tokens" in row and row.get("sample") == number and json.dumps(given) == json.dumps(self._rows[index])

    def _lock(self, file: BinaryIO) -> None:
        """Two runs at a time would write into each other's lines. The lock ends with the file or the process."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{self._partial}: another run is writing it; wait for its end, or stop it") from error

    def _read_partial(self) -> None:
        """Finds the results in the partial file, and drops a line that was not written whole."""
        content = self._partial.read_bytes()
        header, *lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True) or [b""]
        if not (content.startswith(_MAGIC) or _MAGIC.startswith(content)):
            raise UserError(f"{self._partial}: expected results of an earlier run, got something else; remove it")
        if not lines:
            os.truncate(self._partial, 0)
            return
        self._check_header(_object(header.decode("utf-8", "replace")).get("results_of"))
        place, targets = len(header), set(self._targets)
        for number, line in enumerate(lines, 2):
            match _object(line.decode("utf-8", "replace")):
                case {"index": int(index), "sample": int(sample), "row": dict()} if (index, sample) in targets:
                    self._places[index, sample] = place
                case _:
                    raise UserError(f"{self._partial}:{number}: expected a result, got something else; remove the file")
            place += len(line)
        os.truncate(self._partial, place)

    def _check_header(self, header: Any) -> None:
        """Refuses results of other requests or settings."""
        if not (isinstance(header, dict) and isinstance(header.get("settings"), dict)):
            raise UserError(f"{self._partial}: expected results of an earlier run, got something else; remove it")
        other = self._differences(header["settings"])
        if header.get("input") != self._header["input"]:
            other.append("the prompts are others")
        if other:
            raise UserError(
                f"{self._partial}: holds results of another run: {'; '.join(other)}; finish that run, remove the file, "
                "or name another one for the output"
            )

    def _differences(self, then: Mapping[str, Any]) -> list[str]:
        """Between the settings of an earlier run and those of this one."""
        now = json.loads(json.dumps(self._header["settings"]))
        return [
            f"{name} was {json.dumps(then.get(name))}, is {json.dumps(now.get(name))}"
            for name in sorted(then.keys() | now.keys())
            if then.get(name) != now.get(name)
        ]

    def _start(self, finished: Sequence[Mapping[str, Any]]) -> None:
        """Writes the first line, if there is none, and what only `OUT` has."""
        if not self._places:
            self._write({"results_of": self._header})
        for target, row in zip(self._targets, finished, strict=False):
            if target not in self._places:
                self._append(target, row)

    def _append(self, target: tuple[int, int], row: Mapping[str, Any]) -> None:
        place = self._write({"index": target[0], "sample": target[1], "row": row})
        self._places[target] = place

    def _write(self, value: Any) -> int:
        """Puts a line at the end of the partial file, and gives its place there."""
        assert self._file is not None
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(_line(value))
        self._file.flush()
        return place


def _line(value: Any) -> bytes:
    """JSON in one line for every reader, with the ends of lines escaped that JSON itself allows in strings."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS) + "\n"
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only escape
        return json.dumps(value, allow_nan=False).encode() + b"\n"


def _object(line: str) -> dict[str, Any]:
    """The JSON object in a line, or none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
