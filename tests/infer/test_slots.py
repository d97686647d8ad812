"""Many prompts through few slots: a finished row makes room for the next, and is the row that it would be alone."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest

from infer.buckets import bucket
from infer.carry import RUNNING
from infer.generator import Generator, _groups
from infer.job import Job
from infer.noise import row_key
from infer.row import Piece
from infer.sampling import Sampling
from infer.settings import Settings
from infer.slots import Slots
from infer.speculative import decode, fill, read

SAMPLED = Sampling(temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=5)
TRACE = ("tokens", "draft_positions", "round_drafts", "rejected", "finish_reason")


@pytest.fixture(scope="module")
def ending(generator: Generator) -> Generator:
    """With end ids, so that rows finish at any time."""
    other = copy.copy(generator)
    other.end_ids = frozenset([7, 22, 40])
    return other


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Eleven, of different lengths and limits, one of which is 0 and one 1."""
    rng = np.random.default_rng(3)
    lengths, limits = [5, 17, 1, 30, 2, 9, 16, 3, 12, 7, 20], [44, 30, 1, 20, 45, 0, 40, 33, 28, 45, 44]
    return [
        Job(rng.integers(60, size=length).tolist(), limit, row_key(5, index, 0))
        for index, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


def run(generator, jobs, sampling, **settings):
    chosen = Settings(num_draft_tokens=3, sampling=sampling, cache_length=64, **settings)
    pieces = list(generator.run(jobs, chosen))
    done = {piece.job: piece.completion for piece in pieces if isinstance(piece, Piece) and piece.completion}
    for index, completion in done.items():
        mine = [piece for piece in pieces if isinstance(piece, Piece) and piece.job == index]
        assert [token for piece in mine for token in piece.tokens] == completion.tokens
    return [{name: getattr(done[index], name) for name in TRACE} for index in range(len(jobs))]


@pytest.fixture
def watched(generator, monkeypatch):
    """For each filled slot and each call of the loop, how many new tokens each of the rows that go on has."""
    calls, call = {"fill": [], "decode": []}, generator.programs.call

    def watch(function, *args, **static):
        if function in (fill, decode):
            carry = args[1] if function is fill else args[2]
            running = np.asarray(carry.finish) == RUNNING
            calls[function.__name__].append(np.asarray(carry.num_new)[running].tolist())
        return call(function, *args, **static)

    monkeypatch.setattr(generator.programs, "call", watch)
    return calls


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_eleven_prompts_through_three_slots_are_each_alone(ending, jobs, sampling, watched):
    alone = [run(ending, [job], sampling, batch_size=1)[0] for job in jobs]
    assert {row["finish_reason"] for row in alone} == {"stop", "length"}
    for calls in watched.values():
        calls.clear()
    assert run(ending, jobs, sampling, batch_size=3) == alone
    assert len(watched["fill"]) == len(jobs) - 1  # one may emit nothing, and takes no slot
    # Later prompts took their places while others were in the middle of their texts.
    overlapping = [others for others in watched["fill"] if any(count > 1 for count in others)]
    assert len(overlapping) >= 5
    assert all(1 <= len(others) <= 3 for others in watched["decode"])
    rounds = [sum(drafts >= 0 for drafts in row["round_drafts"]) for row in alone]
    assert len(watched["decode"]) < sum(rounds)


def test_replacing_rows_compiles_nothing(ending, jobs, compiled):
    run(ending, jobs[:1] * 3, SAMPLED, batch_size=3)
    run(ending, [Job([1] * length, 2) for length in (16, 32)], SAMPLED, batch_size=1)  # both widths of a piece
    del compiled[:]
    run(ending, jobs, SAMPLED, batch_size=3)
    assert not compiled


@pytest.mark.parametrize("batch_size", [1, 2])
def test_nothing_of_a_replaced_row_is_left(ending, model, params, jobs, batch_size):
    """Rows that read token 60 become nan in trunk and head; batch mates and followers must not."""
    embedding = params["embed_tokens"]["embedding"].at[60].set(jnp.nan)
    poisoned = Generator(model, {**params, "embed_tokens": {"embedding": embedding}}, end_ids=ending.end_ids)
    poisoned.programs._compiled = ending.programs._compiled  # the same programs: parameters are an argument
    never_60 = Sampling(temperature=1.0, seed=5, banned_ids=[60])
    clean = [job for job in jobs if job.max_new_tokens > 20]
    alone = [run(poisoned, [job], never_60, batch_size=1)[0] for job in clean]
    assert alone == [run(ending, [job], never_60, batch_size=1)[0] for job in clean]
    poison = [Job([60, *job.prompt[1:], 60], 12, job.key) for job in clean]
    assert np.isnan(poisoned.next_logits(poison[0].prompt, 1, 12)).all()
    mixed = [job for pair in zip(poison, clean, strict=True) for job in pair]
    assert run(poisoned, mixed, never_60, batch_size=batch_size)[1::2] == alone


def test_samples_of_a_prompt_read_it_once(generator, prompts):
    reads, call = [], generator.programs.call
    other = copy.copy(generator)
    other.programs = copy.copy(generator.programs)

    def count(function, *args, **static):
        reads.extend([function] if function is read else [])
        return call(function, *args, **static)

    other.programs.call = count
    got = other.generate(prompts[:2], max_new_tokens=9, num_samples=5, sampling=SAMPLED, batch_size=2)
    assert len(got) == 10
    assert len(reads) == 2


def test_jobs_are_grouped_by_bucket_and_sorted_by_length():
    """A group smaller than a batch joins the next larger bucket: fewer shapes for few prompts."""
    prompts = [3, 100, 2, 2, 60, 90, 1, 300]
    jobs = [Job([7] * length, 10) for length in prompts]
    lengths = {index: bucket(length + 10, 64) for index, length in enumerate(prompts)}
    assert lengths == {0: 64, 1: 128, 2: 64, 3: 64, 4: 128, 5: 128, 6: 64, 7: 512}
    assert list(_groups(jobs, lengths, batch_size=4)) == [(64, [6, 2, 3, 0]), (512, [4, 5, 1, 7])]
    assert list(_groups(jobs, lengths, batch_size=3)) == [(64, [6, 2, 3, 0]), (128, [4, 5, 1]), (512, [7])]
    assert list(_groups(jobs, lengths, batch_size=99)) == [(512, [6, 2, 3, 0, 4, 5, 1, 7])]


def test_a_run_takes_its_shapes_from_its_groups(generator, monkeypatch):
    shapes = []

    class Watched(Slots):
        def __init__(self, programs, tokenizer, decoding, num_rows, num_slots, cache_length):
            shapes.append((num_rows, cache_length))
            super().__init__(programs, tokenizer, decoding, num_rows, num_slots, cache_length)

    monkeypatch.setattr("infer.generator.Slots", Watched)
    prompts = [[5], [3, 1], [4] * 70, [1, 4, 1], [9] * 60]
    got = generator.generate(prompts, max_new_tokens=8, num_draft_tokens=0, batch_size=3)
    assert shapes == [(3, 64), (2, 128)]
    assert [len(completion.tokens) for completion in got] == [8] * 5
