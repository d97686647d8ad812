"""Figures counted from the trace, against counts made round by round; traces come from `settle`."""

import dataclasses
import json
import random

import pytest
from scripted import simulate
from traces import traced

from infer.completion import Completion

END = 1_000_000


def counts(completion: Completion) -> dict:
    keys = ("tokens", "finish_reason", "rounds", "drafted", "accepted", "accepted_per_position")
    return {key: completion.record()[key] for key in keys}


def expected(*args) -> dict:
    result = simulate(*args)
    del result["draft_positions"]
    return result


@pytest.mark.parametrize("seed", range(12))
def test_counts_and_cuts_are_those_of_a_decoding_that_ended_there(seed):
    draw = random.Random(seed)
    num_drafts, limit = draw.randint(0, 4), draw.randint(2, 17)
    script = [draw.randint(0, num_drafts) for _ in range(5)]
    truth = [draw.randint(0, 99) for _ in range(limit + 8)]
    whole = traced(truth, script, num_drafts, limit, [])
    assert counts(whole) == expected(truth, script, num_drafts, limit, [])
    for num_tokens in range(1, limit + 1):
        stopped = [*truth[: num_tokens - 1], END, *truth[num_tokens:]]
        kept = whole.cut(num_tokens)
        assert {**counts(kept), "tokens": stopped[:num_tokens]} == expected(stopped, script, num_drafts, limit, [END])
        as_decoded = traced(stopped, script, num_drafts, limit, [END])
        assert dataclasses.replace(kept, tokens=as_decoded.tokens) == as_decoded


def test_a_cut_leaves_the_whole_as_it_was():
    whole = traced(list(range(20)), [3], 3, 12, [])
    before = dataclasses.asdict(whole)
    whole.cut(3)
    assert dataclasses.asdict(whole) == before


def test_the_record_has_the_documented_keys_and_is_json():
    completion = dataclasses.replace(traced(list(range(20)), [2, 0], 3, 9, []), text="abc")
    keys = {"tokens", "text", "finish_reason", "rounds", "drafted", "accepted", "accepted_per_position"}
    keys |= {"tokens_per_round", "seconds", "tokens_per_second", "compile_seconds"}
    assert set(dataclasses.replace(completion, logprobs=None).record()) == keys
    record = json.loads(json.dumps(completion.record(), allow_nan=False))
    assert set(record) == keys | {"logprobs"}
    assert record["logprobs"][8] == {"logprob": -0.5, "top": [[3, -0.5]]}
    assert (record["tokens_per_round"], record["tokens_per_second"]) == (2.0, 4.5)
    assert completion.cut(1).tokens_per_round is None
