"""Requests as jobs, results in order, and Ctrl-C wherever it comes."""

import signal
from dataclasses import replace

import numpy as np
import pytest
from made_up import completion

from infer.batch import InOrder, Totals, follow, jobs_for
from infer.noise import row_key
from infer.requests import Request
from infer.row import Piece
from infer.slots import Reading

REQUEST = Request([1, 2], "ab", None, None, None, {}, "f:1")
DONE = completion([2, 0], 2)


def test_rows_are_seeded_from_their_places_or_by_themselves():
    own = replace(REQUEST, seed=7, max_new_tokens=3, stop=("x",))
    jobs = jobs_for([REQUEST, own], [(0, 1), (1, 0), (1, 1)], max_new_tokens=9, seed=5, stop=("y",))
    assert [(job.max_new_tokens, job.stop) for job in jobs] == [(9, ("y",)), (3, ("x",)), (3, ("x",))]
    keys = [row_key(5, 0, 1), row_key(7, 0, 0), row_key(7, 0, 1)]
    assert all(np.array_equal(job.key, key) for job, key in zip(jobs, keys, strict=True))


def test_an_empty_stop_of_a_row_counts():
    (job,) = jobs_for([replace(REQUEST, stop=())], [(0, 0)], max_new_tokens=9, seed=5, stop=("y",))
    assert job.stop == ()


def piece(job, text, *, last=False):
    return Piece(job, [], [], [(text, 0)], DONE if last else None)


def test_what_comes_is_passed_on_in_order():
    shown = []
    in_order = InOrder(lambda piece: shown.append(piece.text))
    steps = [(1, "c", False), (0, "a", False), (1, "d", True), (0, "b", True), (3, "x", True), (2, "e", False)]
    got = []
    for job, text, last in steps:
        in_order.add(piece(job, text, last=last))
        got.append("".join(shown))
    assert got == ["", "a", "a", "abcd", "abcd", "abcde"]
    in_order.flush()
    assert "".join(shown) == "abcdex"


def test_totals():
    totals = Totals()
    totals.add(DONE)
    totals.add(completion([], 2))
    assert (totals.rows, totals.tokens, totals.rounds, totals.drafted, totals.accepted) == (2, 6, 2, 4, 2)
    assert totals.summary(2.0) == "6 tokens in 2.0 s (3.0 tokens/s), 2.00 a round, 2 of 4 drafts accepted"


def run(interrupted_inside=False):
    """Events as `Generator.run` gives them: on Ctrl-C the last pieces, then the exception."""
    try:
        yield Reading(0, 1, 2)
        yield piece(0, "a")
        if interrupted_inside:
            signal.raise_signal(signal.SIGINT)
        yield piece(0, "b", last=True)
    except KeyboardInterrupt:
        yield piece(0, "!", last=True)
        yield piece(1, "?", last=True)
        raise


@pytest.mark.parametrize("keep", [True, False])
def test_all_events_are_handed_out(keep):
    read, came = [], []
    outcome = follow(run(), read.append, came.append, keep=keep)
    assert (len(read), "".join(piece.text for piece in came)) == (1, "ab")
    assert (outcome.interrupted, outcome.totals.rows) == (False, 1)
    assert outcome.completions == ({0: DONE} if keep else {})


def test_ctrl_c_while_it_decodes_gives_what_there_is():
    came = []
    outcome = follow(run(interrupted_inside=True), lambda event: None, came.append, keep=True)
    assert "".join(piece.text for piece in came) == "a!?"
    assert outcome.interrupted
    assert set(outcome.completions) == {0, 1}


def test_ctrl_c_while_something_is_written_waits_for_it():
    came = []

    def write(piece):
        if not came:
            signal.raise_signal(signal.SIGINT)
        came.append(piece)

    outcome = follow(run(), lambda event: None, write, keep=False)
    assert "".join(piece.text for piece in came) == "a!?"
    assert outcome.interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait():
    came = []

    def write(piece):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        came.append(piece)

    outcome = follow(run(), lambda event: None, write, keep=False)
    assert outcome.interrupted
    assert came == []
