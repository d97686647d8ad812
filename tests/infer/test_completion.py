"""Figures counted from the trace, against counts made round by round; traces come from `settle`."""

import dataclasses
import json
import random

import jax.numpy as jnp
import pytest
from scripted import simulate

from infer.completion import Completion, TokenLogprob
from infer.verify import Verdict, settle

END = 1_000_000


def traced(truth: list[int], script: list[int], num_drafts: int, limit: int, end_ids: list[int]) -> Completion:
    """What a loop that asks `settle` after every round writes down of each token."""
    tokens, positions, drafts, rejected = [truth[0]], [0], [-1], [-1]
    finish, round_number = ("stop" if truth[0] in end_ids else None), 0
    while finish is None and len(tokens) < limit:
        right = script[round_number % len(script)]
        made = len(tokens)
        verdict = Verdict(jnp.asarray([truth[made : made + num_drafts + 1]]), jnp.asarray([right]))
        outcome = settle(verdict, jnp.asarray([limit - made]), jnp.asarray([*end_ids, -1]))
        count, accepted = int(outcome.num_tokens[0]), int(outcome.accepted[0])
        tokens += truth[made : made + count]
        positions += [*range(1, accepted + 1), 0][:count]
        drafts += [int(outcome.drafted[0]), *[-1] * (count - 1)]
        rejected += [7 if place == right < num_drafts else -1 for place in range(count)]
        finish = "stop" if bool(outcome.ended[0]) else None
        round_number += 1
    return Completion(
        tokens=tokens,
        text=None,
        finish_reason=finish or "length",
        draft_positions=positions,
        round_drafts=drafts,
        rejected=rejected,
        num_draft_tokens=num_drafts,
        logprobs=[TokenLogprob(-0.5, [(3, -0.5), (4, -float("inf"))])] * len(tokens),
        seconds=2.0,
        compile_seconds=0.0,
    )


def counts(completion: Completion) -> dict:
    keys = ("tokens", "finish_reason", "rounds", "drafted", "accepted", "accepted_per_position")
    return {key: completion.record()[key] for key in keys}


def expected(*args) -> dict:
    result = simulate(*args)
    del result["from_draft"]
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
