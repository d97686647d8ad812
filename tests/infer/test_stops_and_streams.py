"""End ids, stop strings and text as it comes, with drafts that always stand and with drafts that sometimes fall."""

import copy

import pytest
from reciting import byte_tokenizer, recite
from scripted import simulate

from infer.generator import Generator
from infer.sampling import Sampling
from infer.speculative import decode
from mtp_jax.errors import UserError

TEXT = "ab\n中文😀好é, xyz!"  # no byte twice
IDS = byte_tokenizer().encode(TEXT)
PROMPT, TRUTH = IDS[:1], IDS[1:]
AFTER = TEXT[1:]
TRACE = ("tokens", "draft_positions", "round_drafts", "rejected", "finish_reason", "accepted_per_position")


@pytest.fixture(scope="module")
def reciter() -> Generator:
    return recite(IDS)


def with_end_ids(generator, end_ids):
    other = copy.copy(generator)
    other.end_ids = frozenset(end_ids)
    return other


def told(completion):
    return {name: getattr(completion, name) for name in TRACE}


def run(generator, num_drafts=3, **settings):
    settings = {"max_new_tokens": len(TRUTH), **settings}
    (got,) = generator.generate([PROMPT], num_draft_tokens=num_drafts, **settings)
    return got


# Drafts that have no token of two thirds of the text fall there.
SOME = sorted({*IDS[1::3], 5})


@pytest.mark.parametrize(("num_drafts", "subset"), [(0, None), (1, None), (3, None), (1, SOME), (3, SOME)])
def test_every_stop_string_ends_the_text_as_an_end_id_in_its_place_would(reciter, num_drafts, subset):
    settings = {"num_drafts": num_drafts, "draft_vocabulary": subset}
    whole = run(reciter, **settings)
    assert whole.tokens == TRUTH
    assert whole.text == AFTER
    if num_drafts:
        assert (whole.accepted == whole.drafted) == (subset is None)
    for begin in range(len(AFTER)):
        for end in {begin + 1, begin + 4} & set(range(len(AFTER) + 1)):
            completing = len(AFTER[:end].encode())  # tokens up to the stop string's last byte
            got = run(reciter, stop=AFTER[begin:end], **settings)
            assert got.text == AFTER[:begin]
            assert told(got) == told(run(with_end_ids(reciter, [TRUTH[completing - 1]]), **settings))
            if subset is None:
                expected = simulate(TRUTH, [num_drafts], num_drafts, len(TRUTH), [TRUTH[completing - 1]])
                assert {name: getattr(got, name) for name in expected} == expected


def test_of_several_stops_the_first_to_end_counts(reciter):
    got = run(reciter, stop=["xyz", "😀好", "文😀"])
    assert (got.text, got.finish_reason) == ("b\n中", "stop")
    assert run(reciter, stop=["no", "nothing"]).finish_reason == "length"
    # An end id before, at and after a stop string.
    end = with_end_ids(reciter, [TRUTH[10]])
    late, early = run(end, stop="xyz"), run(end, stop="b\n")
    assert (late.text, late.tokens) == ("b\n中文\ufffd", TRUTH[:11])
    assert (early.text, early.tokens) == ("", TRUTH[:2])


def test_ends_do_not_count_before_the_least_number_of_new_tokens(reciter):
    got = run(reciter, stop=["b\n", "文"], sampling=Sampling(min_new_tokens=5))
    assert (got.text, len(got.tokens)) == ("b\n中", 8)


def test_several_end_ids_and_none(reciter):
    ids = byte_tokenizer().encode("yz,")
    ending = with_end_ids(reciter, ids)
    got = run(ending)
    assert (got.text, got.finish_reason, got.tokens[-1]) == ("b\n中文😀好é", "stop", ids[2])
    ignoring = run(ending, ignore_eos=True)
    assert told(ignoring) == told(run(reciter))
    assert ignoring.text == AFTER
    first = with_end_ids(reciter, [TRUTH[0]])
    assert (run(first).text, run(first).tokens, run(first).rounds) == ("", TRUTH[:1], 0)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("stop", [(), ("好é",), ("b",), ("!",), ("never",)])
def test_pieces_of_a_stream_are_the_whole(reciter, num_drafts, stop):
    pieces = list(reciter.stream(PROMPT, num_draft_tokens=num_drafts, max_new_tokens=len(TRUTH), stop=stop))
    whole = run(reciter, num_drafts, stop=stop)
    assert [piece.completion is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    last = pieces[-1].completion
    assert told(last) == told(whole)
    assert "".join(piece.text for piece in pieces) == last.text == whole.text
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    assert [k for piece in pieces for k in piece.draft_positions] == whole.draft_positions
    assert not any("\ufffd" in piece.text for piece in pieces)


def test_the_first_piece_comes_before_the_work_is_done(reciter, monkeypatch):
    chunks = counted(reciter, monkeypatch)
    stream = reciter.stream(PROMPT, num_draft_tokens=0, max_new_tokens=len(TRUTH))
    assert next(stream).tokens == TRUTH[:1]
    assert len(chunks) == 0
    assert next(stream).tokens == TRUTH[1:5]
    assert len(chunks) == 1
    list(stream)
    assert len(chunks) == -(-(len(TRUTH) - 1) // 4)


def counted(generator, monkeypatch, fail_at=None):
    """The calls of the loop from here on; the one numbered `fail_at` is interrupted."""
    chunks, call = [], generator.programs.call

    def count(function, *args, **static):
        if function is decode:
            chunks.append(args)
            if len(chunks) == fail_at:
                raise KeyboardInterrupt
        return call(function, *args, **static)

    monkeypatch.setattr(generator.programs, "call", count)
    return chunks


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_an_interrupt_within_the_loop_gives_what_there_is(reciter, monkeypatch, num_drafts):
    whole = run(reciter, num_drafts)
    counted(reciter, monkeypatch, fail_at=3)
    stream = reciter.stream(PROMPT, num_draft_tokens=num_drafts, max_new_tokens=40, stop=["no stop"])
    check_interrupted(stream, [], whole)


def check_interrupted(stream, pieces, whole):
    with pytest.raises(KeyboardInterrupt):
        pieces.extend(stream)
    last = pieces[-1].completion
    count = len(last.tokens)
    assert last.finish_reason == "interrupted"
    assert count > 0
    assert last.tokens == [*TRUTH, *IDS][:count] == [token for piece in pieces for token in piece.tokens]
    assert last.draft_positions[: len(TRUTH)] == whole.draft_positions[:count]
    assert last.accepted + last.rounds + 1 == count
    assert last.drafted == last.rounds * last.num_draft_tokens
    assert "".join(piece.text for piece in pieces) == last.text == byte_tokenizer().decode(last.tokens)
    return last


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_an_interrupt_of_the_caller_gives_what_there_is(reciter, taken):
    whole = run(reciter, 0)
    # Everything from the second letter on could begin this stop string: nothing is lost that was held back.
    stream = reciter.stream(PROMPT, num_draft_tokens=0, max_new_tokens=len(TRUTH), stop=[AFTER + "?"])
    pieces = [next(stream) for _ in range(taken)]
    pieces.append(stream.throw(KeyboardInterrupt()))
    last = check_interrupted(stream, pieces, whole)
    assert len(last.tokens) == 1 + 4 * (taken - 1)


def test_an_interrupt_before_the_first_token_gives_no_tokens(reciter, monkeypatch):
    call = reciter.programs.call

    def interrupted(function, *args, **static):
        if function.__name__ == "fill":
            raise KeyboardInterrupt
        return call(function, *args, **static)

    monkeypatch.setattr(reciter.programs, "call", interrupted)
    stream = reciter.stream(PROMPT, num_draft_tokens=3)
    last = next(stream).completion
    assert (last.tokens, last.text, last.finish_reason, last.tokens_per_round) == ([], "", "interrupted", None)
    with pytest.raises(KeyboardInterrupt):
        next(stream)


def test_bad_stops_are_a_users_error(reciter):
    with pytest.raises(UserError, match="at least one character, got ''"):
        run(reciter, stop=[""])
    bare = Generator(reciter.model, reciter.programs.params)
    with pytest.raises(UserError, match="no tokenizer"):
        run(bare, stop=["a"])


def test_other_stop_strings_and_streams_compile_nothing(reciter, compiled):
    run(reciter)
    del compiled[:]
    assert run(reciter, stop=["xyz", "never"]).finish_reason == "stop"
    assert run(reciter, stop="中文😀").text == AFTER[: AFTER.index("中")]
    for stop in ((), ["好"], ["!", "é", "z"]):
        list(reciter.stream(PROMPT, max_new_tokens=len(TRUTH), num_draft_tokens=3, stop=stop))
    assert not compiled
